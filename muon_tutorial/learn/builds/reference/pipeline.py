"""A solution of lesson 12's build: micro-batches pass from stage to stage, forward and back."""

from __future__ import annotations

import torch
import torch.distributed as dist


def receive(source):
    x = torch.empty(5, 6, dtype=torch.float64)
    dist.recv(x, source)
    return x


def step(stage, batches, rank, ranks):
    pairs = []
    for batch in batches:
        x = batch if rank == 0 else receive(rank - 1).requires_grad_()
        y = stage(x)
        if rank < ranks - 1:
            dist.send(y.detach(), rank + 1)
        pairs.append((x, y))
    for x, y in pairs:
        if rank == ranks - 1:
            y.square().sum().backward()
        else:
            y.backward(receive(rank + 1))
        if rank > 0:
            dist.send(x.grad, rank - 1)
