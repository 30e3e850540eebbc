"""The oracle of all strategies: one process with the whole matrices, fed the same full gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.plan.grid import Coordinate
from muon_tutorial.plan.layout import Placement, Shard, shard_box
from muon_tutorial.plan.strategies import Builder
from muon_tutorial.worlds.live import LiveWorld
from muon_tutorial.worlds.local import LocalMesh


@dataclass(frozen=True, slots=True)
class Case:
    """Matrices, how tp cuts each, and how to step them."""

    shapes: tuple[tuple[int, int], ...]
    cuts: tuple[Placement, ...]
    dtype: torch.dtype = torch.float32
    steps: int = 3
    nesterov: bool = True
    adjust_lr_fn: str | None = None


UNEVEN = Case(
    shapes=((5, 7), (16, 4), (1, 9), (9, 1), (12, 12), (33, 6), (3, 50)),
    cuts=(Shard(0), Shard(1), Shard(1), Shard(0), Shard(1), Shard(0), Shard(1)),
)


def whole_matrices(case: Case) -> list[Tensor]:
    """The parameters before the first step; the same on every rank."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=made).to(case.dtype) for shape in case.shapes]


def whole_gradients(case: Case) -> Iterator[list[Tensor | None]]:
    """The full gradients of each step, of few enough bits that a sum over any number of ranks is exact.

    In the second step one matrix has none.
    """
    made = torch.Generator().manual_seed(2)
    for step in range(case.steps):
        grads: list[Tensor | None] = [
            (torch.randint(-31, 32, shape, generator=made) * 2.0**-6).to(case.dtype) for shape in case.shapes
        ]
        if step == 1:
            grads[2] = None
        yield grads


def own_part(whole: Tensor, cut: Placement, at: Coordinate) -> Tensor:
    """What the tensor-parallel position of a rank holds of a whole matrix."""
    return whole[shard_box(tuple(whole.shape), cut, at["tp"], at.size("tp")).slices].clone()


def own_params(case: Case, at: Coordinate) -> list[torch.nn.Parameter]:
    """One rank's parameters, hand-cut, carrying the attributes that say so."""
    params = [
        torch.nn.Parameter(own_part(whole, cut, at))
        for whole, cut in zip(whole_matrices(case), case.cuts, strict=True)
    ]
    for param, shape, cut in zip(params, case.shapes, case.cuts, strict=True):
        if isinstance(cut, Shard):
            param.partition_dim = cut.dim  # type: ignore[attr-defined]
            param.partition_sizes = cut.lengths(shape[cut.dim], at.size("tp"))  # type: ignore[attr-defined]
        else:
            param.partition_dim = -1  # type: ignore[attr-defined]
    return params


def give_gradients(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], case: Case, at: Coordinate
) -> None:
    """Set each parameter's gradient to the rank's own part of the full one."""
    for param, grad, cut in zip(params, grads, case.cuts, strict=True):
        param.grad = None if grad is None else own_part(grad, cut, at)


def options(case: Case) -> dict:
    """The optimizer's arguments."""
    return {"lr": 0.02, "nesterov": case.nesterov, "adjust_lr_fn": case.adjust_lr_fn}


def single_process(case: Case) -> list[Tensor]:
    """Where ``torch.optim.Muon`` takes the whole matrices."""
    params = [torch.nn.Parameter(whole) for whole in whole_matrices(case)]
    stock = torch.optim.Muon(params, **options(case))
    for grads in whole_gradients(case):
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        stock.step()
    return [param.detach() for param in params]


def one_rank(
    case: Case, strategy: str | Builder, mesh: LiveWorld | LocalMesh, **settings: Any
) -> tuple[list[torch.nn.Parameter], Muon]:
    """One rank's optimizer over its own parameters."""
    params = own_params(case, mesh.at)
    return params, Muon(params, **options(case), strategy=strategy, mesh=mesh, **settings)
