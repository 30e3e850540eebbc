"""The document that Perfetto opens: it keeps to the format, and each rank has processes and a clock in it."""

from __future__ import annotations

from typing import Any

from muon_tutorial.evidence.traces.perfetto import lanes, merge_documents

from . import traps
from .chrome_format import assert_keeps_to_the_format
from .test_time_split import MS, flight, late_peer


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


def test_a_merged_document_keeps_to_the_format() -> None:
    assert_keeps_to_the_format(merged())


def test_each_rank_gets_processes_and_flows_of_its_own_on_one_clock() -> None:
    events = merged()["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0 · GPU 0", "rank 1", "rank 1 · GPU 0"]
    assert (names[0], names[1]) == ("rank 0", "rank 1")
    kernels = {names[e["pid"]]: e["ts"] for e in events if e.get("cat") == "kernel"}
    assert kernels == {"rank 0 · GPU 0": 5200.0, "rank 1 · GPU 0": 200.0}
    assert {e["id"] for e in events if "id" in e} == {"0.7", "1.7"}


def test_events_of_the_profiler_that_cross_are_set_aside() -> None:
    crossing = [traps.event("cpu_op", "a", start, 1.5, 0, 0) for start in range(3)]
    document = merge_documents(
        {0: {"traceEvents": crossing}, 1: {"traceEvents": []}}, {0: 0, 1: 0}, late_peer()
    )
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
    assert first["args"]["waited for the last member, us"] == 20_000.0
