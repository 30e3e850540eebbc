"""Cases for tests of plans: random matrices on random grids."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from muon_tutorial import Coordinate, Grid, Matrix, Plan, Shard
from muon_tutorial.plan.matrix import Cut, split_parts
from muon_tutorial.plan.strategies import Builder

CAPS = (1, 64, 400, 25_000_000)
CutDrawer = Callable[[tuple[int, int], Grid], st.SearchStrategy[tuple[Cut, ...]]]
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of a builder."""

    matrices: tuple[Matrix, ...]
    grid: Grid
    round_bytes: int

    def plan(self, builder: Builder) -> Plan:
        return builder(self.matrices, self.grid, round_bytes=self.round_bytes)

    @property
    def places(self) -> list[Coordinate]:
        return [self.grid.at(rank) for rank in self.grid.ranks]


@st.composite
def hand_cuts(draw: st.DrawFn, length: int, parts: int) -> tuple[int, ...]:
    """Lengths of a cut made by hand; some may be 0."""
    marks = draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
    return tuple(high - low for low, high in itertools.pairwise([0, *sorted(marks), length]))


@st.composite
def tp_cuts(draw: st.DrawFn, shape: tuple[int, int], grid: Grid) -> tuple[Cut, ...]:
    """No cut, an even cut over tp (as for a DTensor), or a cut over tp by hand."""
    dim = draw(st.sampled_from((None, 0, 1)))
    if dim is None:
        return ()
    return (("tp", Shard(dim, draw(st.none() | hand_cuts(shape[dim], grid.size("tp"))))),)


@st.composite
def any_cuts(draw: st.DrawFn, shape: tuple[int, int], grid: Grid) -> tuple[Cut, ...]:
    """Nested cuts over any axes, as from FSDP2 over tensor parallelism."""
    axes = draw(st.lists(st.sampled_from(grid.axes), unique=True))
    return tuple((axis, Shard(draw(st.sampled_from((0, 1))))) for axis in axes)


@st.composite
def parameters(draw: st.DrawFn, index: int, first: int, grid: Grid, cuts: CutDrawer) -> list[Matrix]:
    """The matrices of one parameter: itself, or runs of its rows."""
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    group, dtype = draw(st.sampled_from((0, 0, 1))), draw(st.sampled_from(DTYPES))
    whole = Matrix(index, f"m{index}", shape, draw(cuts(shape, grid)), group, dtype, dtype)
    edge = draw(st.integers(1, shape[0]))
    return split_parts(whole, (edge, shape[0] - edge) if edge < shape[0] else None, first)


@st.composite
def cases(draw: st.DrawFn, cuts: CutDrawer = tp_cuts) -> Case:
    grid = Grid.of(dp=draw(st.integers(1, 4)), tp=draw(st.integers(1, 3)))
    made: list[Matrix] = []
    for index in range(draw(st.integers(1, 5))):
        made += draw(parameters(index, len(made), grid, cuts))
    return Case(tuple(made), grid, draw(st.sampled_from(CAPS)))
