"""Boxes, cuts, runs and routes: the arithmetic under every plan."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Box, Grid, Hop, Matrix, Owned, Partial, Replicate, Route, Shard, owner, zero1
from muon_tutorial.errors import GridError, OneWayError
from muon_tutorial.plan.layout import Placement, run_boxes, shard_box

from .cases import hand_cuts

SHAPES = st.tuples(st.integers(0, 9), st.integers(0, 9))
PARTS = st.integers(1, 5)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, int], parts: int) -> Shard:
    dim = draw(st.sampled_from((0, 1)))
    return Shard(dim, draw(st.none() | hand_cuts(shape[dim], parts)))


PLACEMENTS: st.SearchStrategy[Placement] = st.one_of(
    st.sampled_from((Replicate(), Partial(), Shard(0), Shard(1))),
    st.builds(Owned, st.integers(0, 4)),
)
ONE_WAY = ({Partial, Shard}, {Partial, Owned})
HOPS = st.builds(Hop, st.sampled_from(("dp", "tp")), PLACEMENTS, PLACEMENTS, SHAPES).filter(
    lambda hop: {type(hop.src), type(hop.dst)} not in ONE_WAY
)
ROUTES = st.builds(Route, st.lists(HOPS, max_size=4).map(tuple), st.just(torch.bfloat16))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(cut.start, cut.stop) for cut in box.slices)))


@given(SHAPES, PARTS, st.data())
@settings(deadline=None)
def test_every_element_is_in_the_box_of_exactly_one_position(
    shape: tuple[int, int], parts: int, data: st.DataObject
) -> None:
    cut = data.draw(cuts(shape, parts))
    held = [elements(shard_box(shape, cut, position, parts)) for position in range(parts)]
    assert sum(map(len, held)) == shape[0] * shape[1]
    assert set().union(*held) == elements(Box((0, 0), shape))


@given(st.integers(0, 40), st.integers(1, 9))
@settings(deadline=None)
def test_a_cut_without_sizes_is_torch_chunks(length: int, parts: int) -> None:
    chunks = torch.arange(length).chunk(parts) if length else ()
    expected = [len(chunk) for chunk in chunks] + [0] * (parts - len(chunks))
    assert list(Shard(0).lengths(length, parts)) == expected


@given(SHAPES, st.integers(0, 3), st.integers(0, 3))
@settings(deadline=None)
def test_a_tensor_is_whole_where_it_is_replicated_partial_or_owned(
    shape: tuple[int, int], owner: int, position: int
) -> None:
    for placement in (Replicate(), Partial()):
        assert shard_box(shape, placement, position, 4) == Box((0, 0), shape)
    held = shard_box(shape, Owned(owner), position, 4)
    assert held.shape == (shape if position == owner else (0, 0))


@pytest.mark.parametrize(
    ("sizes", "length", "parts"),
    [((3, 3), 7, 2), ((3, 4), 7, 3), ((9, -2), 7, 2), ((), 0, 1)],
    ids=["short", "one rank too many", "negative", "no rank"],
)
def test_a_cut_that_does_not_cover_is_refused(sizes: tuple[int, ...], length: int, parts: int) -> None:
    with pytest.raises(GridError, match=f"does not cover {length} indices over {parts} ranks"):
        Shard(0, sizes).lengths(length, parts)


@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(deadline=None)
def test_a_run_of_a_tensor_is_the_elements_of_its_boxes_in_order(
    data: st.DataObject, sizes: list[int]
) -> None:
    whole = torch.arange(math.prod(sizes)).view(sizes)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = run_boxes(tuple(sizes), start, stop)
    assert len(found) <= (1 if (start, stop) == (0, whole.numel()) else 2 * len(sizes) - 1)
    assert all(box.numel for box in found)
    pieces = [whole[box.slices].reshape(-1) for box in found]
    assert torch.equal(torch.cat([whole.new_empty(0), *pieces]), whole.reshape(-1)[start:stop])


@pytest.mark.parametrize(("kept", "said"), [(Shard(0), "reduce_scatter"), (Owned(1), "reduce")])
def test_a_sum_has_no_opposite_and_says_so(kept: Placement, said: str) -> None:
    hop = Hop("dp", Partial(), kept, (4, 4))
    with pytest.raises(OneWayError, match=f"a {said} over 'dp' has no opposite"):
        hop.inverse
    with pytest.raises(OneWayError):
        Route((hop,), torch.float32).inverse


@given(ROUTES)
@settings(deadline=None)
def test_the_inverse_of_the_inverse_is_the_route(route: Route) -> None:
    assert route.inverse.inverse == route
    assert [hop.inverse for hop in route.inverse.hops] == list(reversed(route.hops))
    assert route.inverse.dtype == route.dtype


NOTATION = (Path(__file__).resolve().parents[2] / "docs" / "notation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "hop", ["all_gather", "gather", "drop", "all_to_all", "sum", "reduce", "reduce_scatter"]
)
def test_hops_print_what_the_page_on_notation_says(hop: str) -> None:
    rows, columns, copied, summed, owned = Shard(0), Shard(1), Replicate(), Partial(), Owned(1)
    ends: dict[str, tuple[Placement, Placement]] = {
        "all_gather": (rows, copied),
        "gather": (rows, owned),
        "drop": (copied, owned),
        "all_to_all": (rows, columns),
        "sum": (summed, copied),
        "reduce": (summed, owned),
        "reduce_scatter": (summed, rows),
    }
    (src, dst), shape = ends[hop], (4, 6)
    out, back = Hop("dp", src, dst, shape), Hop("dp", dst, src, shape)
    page = NOTATION.replace("=k", "=1").replace("G[", "W[")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{out}`")]
    assert f"`{back}`" in row


def test_a_route_prints_the_layouts_it_leads_through() -> None:
    dp, tp = Hop("dp", Shard(0), Replicate(), (4, 3)), Hop("tp", Shard(1), Replicate(), (4, 6))
    out = Route((dp, tp), torch.bfloat16)
    assert str(out) == "W[I_dp, J_tp] → W[I, J_tp] → W[I, J], in bfloat16"
    assert str(out.inverse) == "W[I, J] → W[I, J_tp] → W[I_dp, J_tp], in bfloat16"
    assert str(Route((), torch.float32)) == "stays where it is, in float32"
    both = Route((dp, Hop("tp", Shard(0), Replicate(), (8, 3))), torch.float32)
    assert str(both) == "W[I_dp·tp, J] → W[I_tp, J] → W[I, J], in float32"


def test_routes_of_plans_print_as_the_page_on_notation_says_of_the_step() -> None:
    matrices = [Matrix(index, f"m{index}", (9, 7), (("tp", Shard(1)),)) for index in range(40)]
    [bucket, *_] = zero1(matrices, Grid.of(dp=2, tp=2)).buckets
    assert str(bucket.gradient) == "w[B]{U_dp} → w[B_dp], in float32"
    assert str(bucket.compute) == "w[B_dp] → w[B], in bfloat16"
    assert str(bucket.entries[0].route) == "W[I, J_tp] → W[I, J], in bfloat16"
    assert str(bucket.compute.inverse) == "w[B] → w[B_dp], in bfloat16"
    assert str(bucket.parameter) == "w[B_dp] → w[B], in float32"
    assert all(
        f"`{term}`" in NOTATION for term in ("g[B]{U_dp} → g[B_dp]", "x[B_dp] → x[B]", "w[B_dp] → w[B]")
    )
    [bucket, *_] = owner(matrices, Grid.of(dp=2, tp=2)).buckets
    assert str(bucket.compute) == "exchange over dp·tp, in bfloat16"
