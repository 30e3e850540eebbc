"""A solution of lesson 11's build: a rank keeps a part of each weight, and gathers it to compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from muon_tutorial.learn.builds import ring

lane = ThreadPoolExecutor(1)  # one thread sends everything, in order, while others compute


def begin(collective, *given):
    return lane.submit(collective, *given, dist.get_rank(), dist.get_world_size())


def padded(whole):
    ranks = dist.get_world_size()
    return pad(whole.reshape(-1), (0, -whole.numel() % ranks)).view(ranks, -1)


class Fetch(torch.autograd.Function):
    """Forward waits for a whole weight; backward gives each rank its part of the mean gradient."""

    @staticmethod
    def forward(ctx, part, shape, coming):
        return torch.cat(coming.result())[: shape.numel()].view(shape).to(part.dtype)

    @staticmethod
    def backward(ctx, gradient):
        flat = padded(gradient)
        return begin(ring.reduce_scatter, list(flat)).result() / len(flat), None, None


class Sharded(nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype, self.coming = model, dtype, {}
        self.shapes = [[p.shape for p in layer.parameters()] for layer in model]
        for p in model.parameters():
            p.data = padded(p.data)[dist.get_rank()].clone()

    def begin(self, number, dtype):
        if 0 <= number < len(self.model) and number not in self.coming:
            parts = (p.detach().to(dtype) for p in self.model[number].parameters())
            self.coming[number] = [begin(ring.all_gather, part) for part in parts]

    def fetch(self, number, dtype, then=-1):
        """A layer's weights by name. Also begins to gather those of the layer ``then``."""
        self.begin(number, dtype)
        coming = self.coming.pop(number)
        self.begin(then, dtype)
        parts = self.model[number].named_parameters()
        mine = zip(parts, self.shapes[number], coming, strict=True)
        return {name: Fetch.apply(p, shape, its) for (name, p), shape, its in mine}

    def run(self, number, ways, x):
        weights = self.fetch(number, self.dtype, then=number + next(ways))
        return functional_call(self.model[number], weights, (x,))

    def forward(self, x):
        for number in range(len(self.model)):  # checkpoint runs a layer now, and in backward once more
            x = checkpoint(self.run, number, iter((1, -1)), x, use_reentrant=False)
        return x


def shard(model, dtype=torch.float32):
    return Sharded(model, dtype)


def whole(sharded):
    layers = range(len(sharded.model))
    return [w.detach() for number in layers for w in sharded.fetch(number, torch.float32).values()]
