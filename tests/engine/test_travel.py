"""Hops and routes in the in-process world: out and back is the identity, whatever the cut."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Grid, LocalWorld
from muon_tutorial.engine.collective import Label
from muon_tutorial.engine.travel import travel
from muon_tutorial.plan.layout import Hop, Owned, Partial, Placement, Replicate, Route, Shard, shard_box

from ..plan.cases import hand_cuts

HERE = Label("test")


def hold(x: torch.Tensor, placement: Placement, position: int, parts: int) -> torch.Tensor:
    if isinstance(placement, Owned) and placement.rank != position:
        return x.new_empty(0)
    return x[shard_box(tuple(x.shape), placement, position, parts).slices].clone()


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, int], parts: int) -> Placement:
    kind = draw(st.sampled_from(("shard", "hand", "replicate", "owned")))
    dim = draw(st.sampled_from((0, 1)))
    if kind == "shard":
        return Shard(dim)
    if kind == "hand":
        return Shard(dim, draw(hand_cuts(shape[dim], parts)))
    return Replicate() if kind == "replicate" else Owned(draw(st.integers(0, parts - 1)))


@st.composite
def hops(draw: st.DrawFn) -> tuple[Hop, int]:
    parts = draw(st.integers(1, 4))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    src = draw(placements(shape, parts))
    outward = {Shard: (Replicate, Owned), Replicate: (Shard, Owned), Owned: (Shard, Replicate)}
    dst = draw(placements(shape, parts).filter(lambda placement: type(placement) in outward[type(src)]))
    return Hop("tp", src, dst, shape), parts


@given(hops())
@settings(max_examples=200, deadline=None)
def test_a_hop_leaves_each_rank_with_its_destination_box_and_its_inverse_undoes_it(
    case: tuple[Hop, int],
) -> None:
    hop, parts = case
    x = torch.arange(hop.shape[0] * hop.shape[1], dtype=torch.float32).view(hop.shape)
    grid, route = Grid.of(tp=parts), Route((hop,), torch.float32)
    held = [hold(x, hop.src, position, parts) for position in range(parts)]

    there = LocalWorld(grid).run([travel(held[rank], route, grid.at(rank), HERE) for rank in grid.ranks])
    back = LocalWorld(grid).run(
        [travel(there[rank], route.inverse, grid.at(rank), HERE) for rank in grid.ranks]
    )

    for rank in grid.ranks:
        for expected, got in ((hold(x, hop.dst, rank, parts), there[rank]), (held[rank], back[rank])):
            assert torch.equal(got, expected)


@given(st.integers(1, 4), st.sampled_from((Shard(0), Replicate(), Owned(0))))
@settings(deadline=None)
def test_partial_sums_arrive_whole_or_cut_or_at_their_owner(parts: int, dst: Placement) -> None:
    route = Route((Hop("dp", Partial(), dst, (5, 3)),), torch.float32)
    grid = Grid.of(dp=parts)
    got = LocalWorld(grid).run(
        [travel(torch.full((5, 3), rank + 1.0), route, grid.at(rank), HERE) for rank in grid.ranks]
    )
    total = torch.full((5, 3), sum(range(1, parts + 1)) * 1.0)
    for rank in grid.ranks:
        assert torch.equal(got[rank], hold(total, dst, rank, parts))
