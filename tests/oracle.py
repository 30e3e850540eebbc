"""The oracle for all strategies: one process with the whole matrices and the same full gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_tutorial import Coordinate, Grid, LiveWorld, Muon
from muon_tutorial.plan.layout import Placement, Shard, shard_box
from muon_tutorial.plan.strategies import Builder, zero1
from muon_tutorial.worlds.local import LocalMesh, LocalWorld


def perceptron(seed: int = 0) -> torch.nn.Sequential:
    """Two matrices and two biases."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6))


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


SMALL = partial(zero1, round_bytes=400)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor (all ranks must call), or any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_matrices(case: Case) -> list[Tensor]:
    """The parameters before the first step, which are equal on every rank."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=made).to(case.dtype) for shape in case.shapes]


def whole_gradients(case: Case) -> Iterator[list[Tensor | None]]:
    """The full gradients of each step, with so few bits that a sum over any number of ranks is exact.

    In the second step, one matrix has no gradient.
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
    """The part of a whole matrix that a rank's tensor-parallel position holds."""
    return whole[shard_box(tuple(whole.shape), cut, at["tp"], at.size("tp")).slices].clone()


def own_param(whole: Tensor, cut: Placement, at: Coordinate) -> torch.nn.Parameter:
    """A rank's parameter, cut by hand and marked so by its attributes."""
    param = torch.nn.Parameter(own_part(whole.detach(), cut, at))
    param.partition_dim = cut.dim if isinstance(cut, Shard) else -1  # type: ignore[attr-defined]
    if isinstance(cut, Shard):
        param.partition_sizes = cut.lengths(whole.shape[cut.dim], at.size("tp"))  # type: ignore[attr-defined]
    return param


def own_params(case: Case, at: Coordinate) -> list[torch.nn.Parameter]:
    return [own_param(whole, cut, at) for whole, cut in zip(whole_matrices(case), case.cuts, strict=True)]


def give_gradients(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], case: Case, at: Coordinate
) -> None:
    """Set each parameter's gradient to the rank's own part of the full one."""
    for param, grad, cut in zip(params, grads, case.cuts, strict=True):
        param.grad = None if grad is None else own_part(grad, cut, at)


def options(case: Case) -> dict:
    return {"lr": 0.02, "nesterov": case.nesterov, "adjust_lr_fn": case.adjust_lr_fn}


class Stock:
    """``torch.optim.Muon`` over the whole matrices of a case, step by step."""

    def __init__(self, case: Case = UNEVEN, **settings: Any) -> None:
        self.params = [torch.nn.Parameter(whole) for whole in whole_matrices(case)]
        self.muon = torch.optim.Muon(self.params, **{**options(case), **settings})

    def steps(self, each: Iterable[Sequence[Tensor | None]]) -> None:
        for grads in each:
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = None if grad is None else grad.clone()
            self.muon.step()


@cache
def single_process(case: Case) -> list[torch.nn.Parameter]:
    """The whole matrices after the steps of ``torch.optim.Muon``. Callers must not write to them."""
    stock = Stock(case)
    stock.steps(whole_gradients(case))
    return stock.params


def one_rank(
    case: Case, strategy: str | Builder, mesh: LiveWorld | LocalMesh, **settings: Any
) -> tuple[list[torch.nn.Parameter], Muon]:
    params = own_params(case, mesh.at)
    return params, Muon(params, **options(case), strategy=strategy, mesh=mesh, **settings)


@dataclass(slots=True, eq=False)
class Ranks:
    """The optimizers of all ranks over the same case, all in this process."""

    world: LocalWorld
    case: Case
    params: list[list[torch.nn.Parameter]]
    muons: list[Muon]

    @property
    def places(self) -> list[Coordinate]:
        return [self.world.grid.at(rank) for rank in self.world.grid.ranks]

    def held(self) -> list[list[Tensor]]:
        """A copy of every rank's parameters."""
        return [[param.detach().clone() for param in params] for params in self.params]

    def give(self, *grads: Sequence[Tensor | None]) -> None:
        """Give each dp position its own full gradients, or all positions the same."""
        for at, params in zip(self.places, self.params, strict=True):
            give_gradients(params, grads[at["dp"] % len(grads)], self.case, at)

    def ready(
        self, max_norm: float | None = None, rest: Sequence[Sequence[Tensor]] | None = None
    ) -> list[Tensor | None]:
        each = rest or [()] * len(self.muons)
        return self.world.run(
            [muon.ready_program(max_norm, rest=own) for muon, own in zip(self.muons, each, strict=True)]
        )

    def step(self) -> None:
        self.world.run([muon.program() for muon in self.muons])

    def steps(self, each: Iterable[Sequence[Tensor | None]]) -> None:
        for grads in each:
            self.give(grads)
            self.step()


def seated(grid: Grid, strategy: str | Builder = SMALL, case: Case = UNEVEN, **settings: Any) -> Ranks:
    """All ranks of a grid, each with its parts of the case's matrices."""
    world = LocalWorld(grid)
    made = [one_rank(case, strategy, world.mesh(rank), **settings) for rank in grid.ranks]
    return Ranks(world, case, [params for params, _ in made], [muon for _, muon in made])


def assert_alike(found: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> None:
    """Assert that two groups of ranks hold the same bits."""
    for mine, its in zip(found, others, strict=True):
        assert all(map(torch.equal, mine, its))


def assert_own_parts(
    found: Sequence[Sequence[Tensor]], wholes: Sequence[Tensor], case: Case, grid: Grid
) -> None:
    """Assert that every rank's parameters are exactly its parts of the whole matrices."""
    for at, params in zip(map(grid.at, grid.ranks), found, strict=True):
        for index, (param, whole, cut) in enumerate(zip(params, wholes, case.cuts, strict=True)):
            assert torch.equal(param, own_part(whole.detach(), cut, at)), f"{at}, matrix {index}"
