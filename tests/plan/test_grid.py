"""Ranks in named axes: coordinates, and what is refused. Strategies test the arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muon_tutorial import Grid
from muon_tutorial.errors import GridError


def test_an_axis_the_grid_does_not_have_has_one_rank() -> None:
    at = Grid.of(dp=3).at(2)
    assert (at["tp"], at.size("tp"), at.group("tp")) == (0, 1, (2,))
    assert at.peer(0, "tp") == at
    assert at.peer(1, "dp", "tp").rank == 1
    assert Grid.of().world_size == 1


def test_a_coordinate_reads_as_a_mapping_and_says_where_it_is() -> None:
    at = Grid.of(dp=2, tp=3).at(4)
    assert dict(at) == {"dp": 1, "tp": 1}
    assert (len(at), list(at)) == (2, ["dp", "tp"])
    assert str(at) == "rank 4 (dp=1, tp=1)"
    assert (str(at.grid), str(Grid.of())) == ("dp=2 × tp=3", "1 rank")


@pytest.mark.parametrize(
    ("axes", "sizes", "said"),
    [
        (("dp",), (2, 2), "one size for each"),
        (("dp", "dp"), (2, 2), "different names"),
        (("dp", "tp"), (2, 0), "'tp' needs a whole number of ranks, at least 1; got 0"),
        (("dp",), (1.5,), "'dp' needs a whole number"),
        (("dp",), (-2,), "got -2"),
    ],
)
def test_a_grid_that_is_none_is_refused(axes: tuple[str, ...], sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(GridError, match=said):
        Grid(axes, sizes)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        *((lambda grid, rank=rank: grid.at(rank), f"rank {rank} is not on a grid of 4") for rank in (-1, 4)),
        (lambda grid: grid.rank({"dp": 2}), "axis 'dp' has 2 positions on the grid dp=2 × tp=2; got 2"),
        (lambda grid: grid.rank({"tp": -1}), "got -1"),
        (lambda grid: grid.rank({"ep": 1}), "axis 'ep' has 1 positions"),
    ],
)
def test_a_place_off_the_grid_is_refused(ask: Callable[[Grid], object], said: str) -> None:
    with pytest.raises(GridError, match=said):
        ask(Grid.of(dp=2, tp=2))
