"""Hops and routes in the in-process world: out and back is the identity, whatever the cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Grid, LocalWorld
from muon_tutorial.engine import hop_collectives
from muon_tutorial.engine.collective import Label
from muon_tutorial.engine.hop_collectives import SMALL
from muon_tutorial.engine.travel import travel
from muon_tutorial.plan.layout import Hop, Owned, Partial, Placement, Replicate, Route, Shard, shard_box

from ..plan.cases import hand_cuts

HERE = Label("test")


def hold(x: torch.Tensor, placement: Placement, position: int, parts: int) -> torch.Tensor:
    if isinstance(placement, Owned) and placement.rank != position:
        return x.new_empty(0)
    return x[shard_box(tuple(x.shape), placement, position, parts).slices].clone()


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], parts: int) -> Placement:
    kind = draw(st.sampled_from(("shard", "hand", "replicate", "owned")))
    dim = draw(st.sampled_from(range(len(shape))))
    if kind == "shard":
        return Shard(dim)
    if kind == "hand":
        return Shard(dim, draw(hand_cuts(shape[dim], parts)))
    return Replicate() if kind == "replicate" else Owned(draw(st.integers(0, parts - 1)))


@st.composite
def hops(draw: st.DrawFn) -> tuple[Hop, int]:
    parts = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    src = draw(placements(shape, parts))
    outward = {Shard: (Replicate, Owned), Replicate: (Shard, Owned), Owned: (Shard, Replicate)}
    dst = draw(placements(shape, parts).filter(lambda placement: type(placement) in outward[type(src)]))
    return Hop("tp", src, dst, shape), parts


@pytest.mark.parametrize("small", [0, SMALL], ids=["slice by slice", "at once"])
@given(hops())
@settings(max_examples=200, deadline=None)
def test_a_hop_brings_each_rank_its_box_and_its_inverse_undoes_it(small: int, case: tuple[Hop, int]) -> None:
    hop, parts = case
    x = torch.arange(math.prod(hop.shape), dtype=torch.float32).view(hop.shape)
    grid, route = Grid.of(tp=parts), Route((hop,), torch.float32)
    held = [hold(x, hop.src, position, parts) for position in range(parts)]

    def move(parts: Sequence[torch.Tensor], route: Route) -> list[torch.Tensor]:
        with mock.patch.object(hop_collectives, "SMALL", small):
            return LocalWorld(grid).run([travel(parts[r], route, grid.at(r), HERE) for r in grid.ranks])

    there = move(held, route)
    back = move(there, route.inverse)

    for rank in grid.ranks:
        for expected, got in ((hold(x, hop.dst, rank, parts), there[rank]), (held[rank], back[rank])):
            assert torch.equal(got, expected)


LONG, FLAT = (5, 3), (15,)
SUMS = [(LONG, Shard(0)), (LONG, Replicate()), (LONG, Owned(0)), (FLAT, Shard(0)), (FLAT, Replicate())]


@pytest.mark.parametrize("small", [0, SMALL], ids=["slice by slice", "at once"])
@given(st.integers(1, 4), st.sampled_from(SUMS))
@settings(deadline=None)
def test_partial_sums_arrive_summed(small: int, parts: int, case: tuple[tuple[int, ...], Placement]) -> None:
    shape, dst = case
    route = Route((Hop("dp", Partial(), dst, shape),), torch.float32)
    grid = Grid.of(dp=parts)
    with mock.patch.object(hop_collectives, "SMALL", small):
        held = [torch.full(shape, rank + 1.0) for rank in grid.ranks]
        got = LocalWorld(grid).run([travel(x, route, grid.at(r), HERE) for r, x in enumerate(held)])
    total = torch.full(shape, sum(range(1, parts + 1)) * 1.0)
    for rank in grid.ranks:
        assert torch.equal(got[rank], hold(total, dst, rank, parts))
