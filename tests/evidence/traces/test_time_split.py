"""The split of wall time, its picture, and Perfetto's document are pure functions of a timeline."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_tutorial.evidence.traces.perfetto import lanes, merge_documents
from muon_tutorial.evidence.traces.time_intervals import intersect, union
from muon_tutorial.evidence.traces.time_split import (
    STATES,
    Flight,
    RankTimes,
    Timeline,
    paint,
    split,
    split_markdown,
)
from muon_tutorial.evidence.traces.timeline_picture import describe_timeline, draw_timeline

from . import traps
from .traps import assert_keeps_to_the_format

MS = 1_000_000


def flight(rank: int, issued: int, done: int, turn: int = 0, group: tuple[int, ...] = (0, 1)) -> Flight:
    return Flight(rank, "all_gather", "dp gather", "bucket 0", group, turn, issued, done, 64, 32)


def late_peer() -> Timeline:
    """Rank 0 asks at 10 ms, rank 1 only at 30 ms; both have the answer at 35 ms."""
    return Timeline(
        (
            RankTimes(0, 0, 40 * MS, ((0, 10 * MS),), (flight(0, 10 * MS, 35 * MS),)),
            RankTimes(1, 0, 40 * MS, ((0, 28 * MS),), (flight(1, 30 * MS, 35 * MS),)),
        )
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    instants = st.integers(0, 60)
    pairs = st.lists(st.tuples(instants, instants).map(lambda it: (min(it), max(it))), max_size=4)
    ranks = []
    for rank in range(draw(st.integers(1, 3))):
        begin, end = draw(st.tuples(st.integers(0, 20), st.integers(40, 60)))
        groups = st.sampled_from([(), (0, 1), (0, 1, 2)])
        flights = [flight(rank, *pair, turn, draw(groups)) for turn, pair in enumerate(draw(pairs))]
        compute = union(draw(pairs))
        ranks.append(RankTimes(rank, begin, end, compute, tuple(flights)))
    return Timeline(tuple(ranks))


@given(timelines())
def test_states_sum_to_the_whole_span_on_every_rank_and_never_hold_together(timeline: Timeline) -> None:
    for times, row in zip(timeline.ranks, split(timeline), strict=True):
        assert row.span == times.end - times.begin
        assert row.compute + row.communication + row.waiting + row.unsplit + row.neither == row.span
        assert sum(row.share(state) for state in STATES) == pytest.approx(1.0)
        assert 0 <= row.overlapped <= row.compute
    for states in paint(timeline).values():
        for one in STATES:
            assert all(intersect(states[one], states[other]) == () for other in STATES if other != one)


def test_a_rank_waits_until_the_last_member_asks() -> None:
    early, late = split(late_peer())
    assert (early.compute, early.waiting, early.communication) == (10 * MS, 20 * MS, 5 * MS)
    assert (late.compute, late.waiting, late.communication, late.neither) == (28 * MS, 0, 5 * MS, 7 * MS)
    assert (early.unsplit, late.unsplit) == (0, 0)


EARLY, LATE = late_peer().ranks
SPLITS: dict[str, tuple[tuple[RankTimes, ...], dict[str, int]]] = {
    "one rank alone cannot tell": ((EARLY,), {"unsplit": 25 * MS, "waiting": 0, "communication": 0}),
    "a sender that is done before its peer asks did not wait for it": (
        (replace(EARLY, flights=(flight(0, 10 * MS, 12 * MS),)), LATE),
        {"communication": 2 * MS, "waiting": 0},
    ),
    "compute counts as compute while a collective is under way": (
        (replace(EARLY, compute=((0, 20 * MS),)), LATE),
        {"compute": 20 * MS, "overlapped": 10 * MS, "waiting": 10 * MS},
    ),
    "blocked time of a rank without flights stays unsplit": (
        (RankTimes(0, 0, 10, ((0, 4),), (), ((3, 7),)),),
        {"compute": 4, "unsplit": 3, "neither": 3},
    ),
    # A rank is blocked from 8 to 36 ms, requests at 10, waits until 30, and data move until 35. Then 8 to 10
    # and 35 to 36 are communication, too.
    "if all ranks report flights, a rank blocked outside of them counts as communicating": (
        (replace(EARLY, compute=(), blocked=((8 * MS, 36 * MS),)), LATE),
        {"waiting": 20 * MS, "communication": 8 * MS, "unsplit": 0},
    ),
}


@pytest.mark.parametrize(("ranks", "due"), SPLITS.values(), ids=SPLITS)
def test_a_span_is_split(ranks: tuple[RankTimes, ...], due: dict[str, int]) -> None:
    row = split(Timeline(ranks))[0]
    assert {state: getattr(row, state) for state in due} == due


def test_split_markdown_has_a_row_for_each_rank() -> None:
    lines = split_markdown(split(late_peer())).splitlines()
    assert len(lines) == 4
    assert lines[2] == "| 0 | 40.00 | 25.0% | 12.5% | 50.0% | 0.0% | 12.5% | 0.0% |"


def test_the_picture_follows_from_the_timeline_alone() -> None:
    svg = draw_timeline(late_peer())
    assert svg == draw_timeline(late_peer())
    assert svg != draw_timeline(Timeline(late_peer().ranks[:1]))
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "waiting for the last member 50%" in describe_timeline(late_peer())


def test_the_picture_does_not_grow_with_the_run() -> None:
    many = union((2 * i, 2 * i + 1) for i in range(20_000))
    timeline = Timeline((RankTimes(0, 0, 40_000, many, ()),))
    assert len(draw_timeline(timeline)) < 300_000


def test_flights_that_overlap_get_lanes_of_their_own() -> None:
    flights = [flight(0, 0, 10), flight(0, 5, 8, 1), flight(0, 8, 12, 2), flight(0, 10, 11, 3)]
    assert [[f.turn for f in row] for row in lanes(flights)] == [[0, 3], [1, 2]]


def merged() -> dict[str, Any]:
    document = traps.counted_four_times()
    document["traceEvents"] += [
        {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 100, "ts": 0, "args": {"name": "main"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 100, "tid": 100, "ts": 900},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 0, "tid": 7, "ts": 1000, "bp": "e"},
        traps.event("Trace", "PyTorch Profiler (0)", 0, 9, "Spans", ""),
    ]
    return merge_documents({0: document, 1: document}, {0: 0, 1: 5 * MS}, late_peer())


def test_each_rank_gets_processes_and_flows_of_its_own_on_one_clock() -> None:
    document = merged()
    assert_keeps_to_the_format(document)
    events = document["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0 · GPU 0", "rank 1", "rank 1 · GPU 0"]
    assert (names[0], names[1]) == ("rank 0", "rank 1")
    kernels = {names[e["pid"]]: e["ts"] for e in events if e.get("cat") == "kernel"}
    assert kernels == {"rank 0 · GPU 0": 5200.0, "rank 1 · GPU 0": 200.0}
    assert {e["id"] for e in events if "id" in e} == {"0.7", "1.7"}


def test_events_of_the_profiler_that_cross_are_set_aside() -> None:
    crossing = [traps.event("cpu_op", "a", start, 1.5, 0, 0) for start in range(3)]
    documents: dict[int, Any] = {0: {"traceEvents": crossing}, 1: {"traceEvents": []}}
    document = merge_documents(documents, {0: 0, 1: 0}, late_peer())
    assert_keeps_to_the_format(document)
    tracks = [e["tid"] for e in document["traceEvents"] if e["ph"] == "X" and e["name"] == "a"]
    assert sorted(track != 0 for track in tracks) == [False, False, True]


def test_collectives_carry_phase_bucket_and_bytes() -> None:
    events = merged()["traceEvents"]
    first = next(event for event in events if event.get("cat") == "collective")
    assert first["name"] == "all_gather: dp gather of bucket 0"
    assert first["args"]["payload bytes"] == 64
    assert first["args"]["ring bytes"] == 32
    assert first["args"]["group"] == [0, 1]
    assert first["args"]["waited for the last member, µs"] == 20_000.0
