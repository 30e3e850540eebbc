"""Ranks in named axes: the same arithmetic as a ``DeviceMesh``'s."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Grid
from muon_tutorial.errors import GridError

AXES = ("pp", "dp", "cp", "tp")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    axes = draw(st.permutations(AXES))[: draw(st.integers(0, 4))]
    return Grid(tuple(axes), tuple(draw(st.integers(1, 3)) for _ in axes))


def mesh_of(grid: Grid) -> torch.Tensor:
    """The ranks as ``init_device_mesh`` lays them out."""
    return torch.arange(grid.world_size).view(grid.sizes)


@given(grids())
@settings(deadline=None)
def test_ranks_stand_where_a_device_mesh_puts_them(grid: Grid) -> None:
    mesh = mesh_of(grid)
    for rank in grid.ranks:
        place = tuple(grid.at(rank)[axis] for axis in grid.axes)
        assert mesh[place].item() == rank
        assert grid.rank(grid.at(rank)) == rank


@given(grids(), st.data())
@settings(deadline=None)
def test_a_group_is_the_meshs_row_through_the_rank(grid: Grid, data: st.DataObject) -> None:
    at = grid.at(data.draw(st.sampled_from(grid.ranks)))
    for number, axis in enumerate(grid.axes):
        through = [slice(None) if i == number else at[other] for i, other in enumerate(grid.axes)]
        assert list(at.group(axis)) == mesh_of(grid)[tuple(through)].tolist()
        assert at.group(axis)[at[axis]] == at.rank


@given(grids(), st.data())
@settings(deadline=None)
def test_groups_over_several_axes_split_the_world_evenly(grid: Grid, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(AXES), unique=True))
    groups = {grid.at(rank).group(*axes) for rank in grid.ranks}
    assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
    for rank in grid.ranks:
        at = grid.at(rank)
        assert at.size(*axes) == len(at.group(*axes))
        assert at.group(*axes)[at.position(*axes)] == rank
        assert {grid.at(peer).group(*axes) for peer in at.group(*axes)} == {at.group(*axes)}


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
        (("dp", "dp"), (2, 2), "named differently"),
        (("dp", "tp"), (2, 0), "'tp' needs a whole number of ranks, at least 1; got 0"),
        (("dp",), (1.5,), "'dp' needs a whole number"),
        (("dp",), (-2,), "got -2"),
    ],
)
def test_a_grid_that_is_none_is_refused(axes: tuple[str, ...], sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(GridError, match=said):
        Grid(axes, sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_off_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(GridError, match=rf"rank {rank} is not on a grid of 4 ranks \(dp=2 × tp=2\)"):
        Grid.of(dp=2, tp=2).at(rank)


@pytest.mark.parametrize("positions", [{"dp": 2}, {"dp": -1}, {"tp": 1}])
def test_a_position_off_the_grid_is_refused(positions: dict[str, int]) -> None:
    with pytest.raises(GridError, match=r"has [12] positions on the grid dp=2"):
        Grid.of(dp=2).rank(positions)
