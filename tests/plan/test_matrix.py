"""Matrices that are parts of a parameter, cut anywhere: the ranks' pieces add up to each matrix."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_tutorial import Grid, Shard
from muon_tutorial.plan.layout import run_boxes
from muon_tutorial.plan.matrix import Matrix, Parts, split_parts

HERE = Grid((), ()).at(0)


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[Matrix, Parts, bool, Grid]:
    """A parameter with several parts, and two nested cuts of it."""
    kind = draw(st.sampled_from([(), ("interleaved",), ("heads",)]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lines = sum(sizes) * (draw(st.integers(1, 4)) if kind else 1)
    transposed, stacked = draw(st.booleans()), draw(st.booleans())
    sides = (draw(st.integers(1, 5)), lines) if transposed else (lines, draw(st.integers(1, 5)))
    shape = (draw(st.integers(1, 3)), *sides) if stacked else sides
    axes = draw(st.permutations(["tp", "dp"]))
    cuts = tuple((axis, Shard(draw(st.integers(0, len(shape) - 1)))) for axis in axes)
    grid = Grid.of(tp=draw(st.integers(1, 3)), dp=draw(st.integers(1, 3)))
    parts = (*(("stack",) if stacked else ()), *kind, *sizes)
    return Matrix(0, "w", shape, cuts), parts, transposed, grid


@given(cut_parameters(), st.data())
def test_ranks_boxes_make_up_each_part_and_lie_where_the_parameter_has_them(
    cut: tuple[Matrix, Parts, bool, Grid], data: st.DataObject
) -> None:
    whole, parts, transposed, grid = cut
    values = torch.arange(whole.numel).view(whole.shape)
    alone = split_parts(Matrix(0, "w", whole.shape), parts, 0, transposed)
    seen = torch.cat([values[matrix.slices(HERE)].reshape(-1) for matrix in alone])
    assert sorted(seen.tolist()) == list(range(whole.numel))  # each element is in one part
    for matrix, uncut in zip(split_parts(whole, parts, 0, transposed), alone, strict=True):
        joined = torch.full(matrix.shape, -1)
        for at in map(grid.at, grid.ranks):
            piece, box = values[whole.box(at).slices][matrix.slices(at)], matrix.box(at)
            assert piece.numel() == box.numel
            if not box.numel:
                continue
            joined[box.slices] = piece
            start = data.draw(st.integers(0, box.numel - 1))
            stop = data.draw(st.integers(start + 1, box.numel))
            runs = (run.shifted(box.offset) for run in run_boxes(box.shape, start, stop))
            saved = [values[its.slices].reshape(-1) for run in runs for its in matrix.in_parameter(run)]
            assert torch.equal(torch.cat(saved), piece.reshape(-1)[start:stop])
        assert torch.equal(joined, values[uncut.slices(HERE)])
