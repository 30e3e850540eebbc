"""Exchanges of many matrices: pieces reach their owners and come back, and no two boxes share memory."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muon_tutorial import Coordinate, Grid, LocalWorld, Matrix, Shard, owner
from muon_tutorial.engine.collective import Label, Walk
from muon_tutorial.engine.hop_collectives import take
from muon_tutorial.engine.pieces import Pieces
from muon_tutorial.plan.exchange import Exchange, LocalShards, WholeMatrices

CPU, HERE = torch.device("cpu"), Label("test")
GRIDS = ({"dp": 3}, {"dp": 4}, {"dp": 2, "tp": 3}, {"dp": 2, "tp": 2, "ep": 2})


@st.composite
def cases(draw: st.DrawFn) -> tuple[Grid, list[Matrix], list[int]]:
    """Matrices of any shapes, cut along any axes, each with an owner."""
    grid = Grid.of(**draw(st.sampled_from(GRIDS)))
    sides, dims = st.integers(1, 7), st.sampled_from((None, 0, 1))
    made = []
    for index in range(draw(st.integers(1, 5))):
        cuts = [(axis, Shard(dim)) for axis in grid.axes if (dim := draw(dims)) is not None]
        made.append(Matrix(index, f"m{index}", (draw(sides), draw(sides)), tuple(cuts)))
    owners = [draw(st.integers(0, grid.world_size - 1)) for _ in made]
    return grid, made, owners


def there_and_back(exchange: Exchange, at: Coordinate, whole: list[Tensor]) -> Walk:
    """Send pieces to owners, double them there, and send them back; returns this rank's boxes by matrix."""
    assert isinstance(exchange.src, LocalShards)
    assert isinstance(exchange.dst, WholeMatrices)
    pieces = Pieces(torch.float32, CPU)
    for held in exchange.src.buffer_slices(exchange.entries, at):
        pieces.put(held.entry.matrix.index, whole[held.entry.matrix.index][held.box.slices].clone())
    owned = yield from take(pieces, exchange, torch.float32, at, HERE)
    updates = Pieces(torch.float32, CPU)
    for held in exchange.dst.buffer_slices(exchange.entries, at):
        if held.box.numel:
            box = owned.take(held)
            assert torch.equal(box, whole[held.entry.matrix.index])
            updates.put(held.entry.matrix.index, 2 * box)
    back = yield from take(updates, exchange.inverse, torch.float32, at, HERE)
    found = exchange.src.buffer_slices(exchange.entries, at)
    return {held.entry.matrix.index: back.take(held) for held in found if held.box.numel}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_pieces_come_back_right_and_share_no_memory(case: tuple[Grid, list[Matrix], list[int]]) -> None:
    grid, matrices, owners = case
    whole = [torch.randn(matrix.shape) for matrix in matrices]
    (bucket,) = owner(matrices, grid, assign=owners).buckets
    (exchange,) = bucket.compute.hops
    assert isinstance(exchange, Exchange)
    walks = [there_and_back(exchange, at, whole) for at in map(grid.at, grid.ranks)]
    for at, boxes in zip(map(grid.at, grid.ranks), LocalWorld(grid).run(walks), strict=True):
        for index, box in boxes.items():
            assert torch.equal(box, 2 * whole[index][matrices[index].box(at).slices])
            before = {other: held.clone() for other, held in boxes.items() if other != index}
            box.zero_()
            assert all(torch.equal(boxes[other], held) for other, held in before.items())
