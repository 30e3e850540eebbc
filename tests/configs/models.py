"""Small real models, one for each kind of parallelism, each with a real backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd


class Block(nn.Module):
    """One residual block; Muon steps its two weights."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlp(nn.Module):
    """A few blocks, and a norm that Muon does not step."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Experts(nn.Module):
    """Experts spread over a group, one per rank; a router sends each token to its highest-rated expert."""

    def __init__(self, width: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.router = nn.Linear(width, dist.get_world_size(group), bias=False)
        self.expert = Block(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sends = torch.bincount(chosen, minlength=dist.get_world_size(self.group))
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=self.group)
        there, back = sends.tolist(), receives.tolist()
        arrived = all_to_all_single_autograd(x[order].contiguous(), back, there, self.group)
        returned = all_to_all_single_autograd(self.expert(arrived), there, back, self.group)
        out = torch.zeros_like(x).index_copy(0, order, returned)
        return x + weights[:, None] * out
