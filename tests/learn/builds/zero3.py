"""A solution of lesson 11's build: a rank keeps a part of each weight, and gathers it to compute."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint


class Fetch(torch.autograd.Function):
    """Forward gathers a weight from all ranks; backward gives each rank its part of the mean gradient."""

    @staticmethod
    def forward(ctx, part, shape):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx, gradient):
        flat = padded(gradient)
        part = torch.empty_like(flat[0])
        dist.reduce_scatter(part, list(flat))
        return part / len(flat), None


def padded(whole):
    ranks = dist.get_world_size()
    return pad(whole.reshape(-1), (0, -whole.numel() % ranks)).view(ranks, -1)


class Sharded(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in model]
        for p in model.parameters():
            p.data = padded(p.data)[dist.get_rank()].clone()

    def run(self, layer, shapes, x):
        weights = {name: Fetch.apply(p, shapes[name]) for name, p in layer.named_parameters()}
        return functional_call(layer, weights, (x,))

    def forward(self, x):
        for layer, shapes in zip(self.model, self.shapes, strict=True):
            x = checkpoint(self.run, layer, shapes, x, use_reentrant=False)  # backward fetches again
        return x


def shard(model):
    return Sharded(model)


def whole(sharded):
    return [
        Fetch.apply(p, shapes[name]).detach()
        for layer, shapes in zip(sharded.model, sharded.shapes, strict=True)
        for name, p in layer.named_parameters()
    ]
