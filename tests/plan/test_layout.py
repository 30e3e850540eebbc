"""Boxes, cuts, runs and routes: the arithmetic under every plan."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_tutorial import Box, Hop, Owned, Partial, Replicate, Route, Shard
from muon_tutorial.errors import GridError, OneWayError
from muon_tutorial.plan.layout import Placement, run_boxes, shard_box

from .cases import hand_cuts

SHAPES = st.tuples(st.integers(0, 9), st.integers(0, 9))
PARTS = st.integers(1, 5)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    return Box(*(tuple(draw(st.integers(0, 7)) for _ in range(2)) for _ in range(2)))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, int], parts: int) -> Shard:
    dim = draw(st.sampled_from((0, 1)))
    return Shard(dim, draw(st.none() | hand_cuts(shape[dim], parts)))


PLACEMENTS: st.SearchStrategy[Placement] = st.one_of(
    st.sampled_from((Replicate(), Partial(), Shard(0), Shard(1))),
    st.builds(Owned, st.integers(0, 4)),
)
ONE_WAY = {Partial, Shard}
HOPS = st.builds(Hop, st.sampled_from(("dp", "tp")), PLACEMENTS, PLACEMENTS, SHAPES).filter(
    lambda hop: {type(hop.src), type(hop.dst)} != ONE_WAY
)
ROUTES = st.builds(Route, st.lists(HOPS, max_size=4).map(tuple), st.just(torch.bfloat16))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(cut.start, cut.stop) for cut in box.slices)))


@given(boxes(), boxes())
@settings(deadline=None)
def test_overlap_holds_what_both_hold(one: Box, other: Box) -> None:
    assert elements(one.overlap(other)) == elements(one) & elements(other)
    assert one.overlap(other) == other.overlap(one)
    assert one.overlap(one) == one
    assert one.overlap(other).numel == len(elements(one) & elements(other))


@given(boxes(), boxes())
@settings(deadline=None)
def test_seen_from_undoes_shifted(box: Box, frame: Box) -> None:
    assert box.shifted(frame.offset).seen_from(frame) == box
    assert box.seen_from(frame).shifted(frame.offset) == box
    assert box.seen_from(box).offset == (0, 0)


@given(SHAPES, st.data())
@settings(deadline=None)
def test_a_box_seen_from_its_frame_indexes_the_frames_tensor(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    x = torch.arange(shape[0] * shape[1]).view(shape)
    frame = shard_box(shape, data.draw(cuts(shape, 3)), 1, 3)
    inner = shard_box(shape, data.draw(cuts(shape, 2)), 0, 2).overlap(frame)
    assert torch.equal(x[frame.slices][inner.seen_from(frame).slices], x[inner.slices])


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
    assert len(found) <= 2 * len(sizes) - 1
    assert all(box.numel for box in found)
    pieces = [whole[box.slices].reshape(-1) for box in found]
    assert torch.equal(torch.cat([whole.new_empty(0), *pieces]), whole.reshape(-1)[start:stop])


def test_runs_of_nothing_of_a_whole_matrix_and_of_whole_rows_have_no_box_or_one() -> None:
    assert run_boxes((0, 4), 0, 0) == run_boxes((4, 0), 0, 0) == run_boxes((3, 3), 5, 5) == ()
    assert run_boxes((4, 3), 0, 12) == (Box((0, 0), (4, 3)),)
    assert run_boxes((4, 3), 3, 9) == (Box((1, 0), (2, 3)),)


@given(HOPS)
@settings(deadline=None)
def test_the_inverse_of_a_hop_swaps_its_ends(hop: Hop) -> None:
    assert (hop.inverse.src, hop.inverse.dst) == (hop.dst, hop.src)
    assert (hop.inverse.axis, hop.inverse.shape) == (hop.axis, hop.shape)
    assert hop.inverse.inverse == hop


def test_a_reduce_scatter_has_no_opposite_and_says_so() -> None:
    hop = Hop("dp", Partial(), Shard(0), (4, 4))
    with pytest.raises(OneWayError, match="reduce_scatter over 'dp' has no opposite"):
        hop.inverse
    with pytest.raises(OneWayError):
        Route((hop,), torch.float32).inverse


@given(ROUTES)
@settings(deadline=None)
def test_the_inverse_of_the_inverse_is_the_route(route: Route) -> None:
    assert route.inverse.inverse == route
    assert [hop.inverse for hop in route.inverse.hops] == list(reversed(route.hops))
    assert route.inverse.dtype == route.dtype
