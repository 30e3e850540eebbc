"""The reader of foreign traces: it tells forms apart, counts each collective once, and avoids misreadings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_tutorial.errors import TraceError
from muon_tutorial.evidence.traces.profiler_trace import (
    covered,
    parse_trace,
    read_trace,
    span,
    sum_collectives,
    sums_by_name,
)
from muon_tutorial.evidence.traces.time_intervals import intersect, measure, subtract, union

from . import traps

MS = 1_000_000
pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(pieces, pieces)
def test_intervals_are_sets_of_instants(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    here, there = union(left), union(right)
    instants = {t for begin, end in left for t in range(begin, end)}
    others = {t for begin, end in right for t in range(begin, end)}
    assert measure(here) == len(instants)
    assert measure(intersect(here, there)) == len(instants & others)
    assert measure(subtract(here, there)) == len(instants - others)


def test_a_collective_that_appears_four_times_is_counted_once() -> None:
    trace = parse_trace(traps.counted_four_times())
    claimed = sums_by_name(trace.events, ["all_gather", "allgather"])
    assert sum(row.count for row in claimed) == 4
    assert sum(row.total for row in claimed) == 20_300_000
    (once,) = sum_collectives(trace)
    assert (once.kind, once.group, once.dtype) == ("all_gather", 2, "BFloat16")
    assert (once.sent, once.received) == (500_000, 1_000_000)
    assert (once.count, once.total) == (1, 10 * MS)


def test_a_launch_is_not_an_execution() -> None:
    trace = parse_trace(traps.launch_for_execution())
    (whole,) = sums_by_name(trace.of("cpu annotation"), ["Full_Training_Step"])
    (launch,) = sums_by_name(trace.of("cpu annotation"), ["Muon_Step"])
    (ran,) = sums_by_name(trace.of("gpu annotation"), ["Optimizer.step"])
    begin, end = span(trace.executed)
    assert launch.total / whole.total == pytest.approx(0.011, abs=0.0005)  # "1.1% overhead"
    assert ran.total / (end - begin) == pytest.approx(0.6)


def test_kernels_that_spin_sum_to_more_while_the_step_gets_shorter() -> None:
    plain, overlapped = (parse_trace(traps.spinning(overlapped)) for overlapped in (False, True))
    spans = [end - begin for begin, end in (span(plain.executed), span(overlapped.executed))]
    assert [sum(row.total for row in sum_collectives(t)) for t in (plain, overlapped)] == [10 * MS, 50 * MS]
    assert [measure(covered(t.collectives)) for t in (plain, overlapped)] == [10 * MS, 25 * MS]
    assert spans == [30 * MS, 25 * MS]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ampere_sgemm_128x64_nn", ""),
    ],
)
def test_kinds_are_read_from_kernel_names(name: str, kind: str) -> None:
    (event,) = parse_trace([traps.event("kernel", name, 1, 2, 0, 7)]).events
    assert (event.kind, event.communicates) == (kind, bool(kind))


def test_gloo_collectives_are_their_backends_events_and_compute_is_the_other_threads() -> None:
    rows = [
        ("cpu_op", "c10d::allreduce_", 0, 5),
        ("user_annotation", "gloo:all_reduce", 1, 6),
        ("cpu_op", "aten::copy_", 1.5, 6),
        ("cpu_op", "aten::mm", 4, 5),
        ("user_annotation", "gloo:send", 9, 5),
    ]
    trace = parse_trace([traps.event(sort, name, at, 2.5, 5, thread) for sort, name, at, thread in rows])
    assert [(e.kind, e.duration) for e in trace.collectives] == [("all_reduce", 2500)]
    assert trace.compute == ((4000, 6500),)
    assert trace.executed == []


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_a_file_is_read_plain_and_gzipped(tmp_path: Path, pack: type) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(pack(json.dumps(traps.counted_four_times()).encode()))
    assert read_trace(path).events == parse_trace(traps.counted_four_times()).events


NO_TRACES = {
    "empty": b"",
    "torn JSON": b"{",
    "an empty object": b"{}",
    "events that are no list": b'{"traceEvents": 3}',
    "an event without times": b'[{"ph": "X", "name": "a"}]',
    "a number": b"[3]",
    "torn gzip": gzip.compress(b"[]" * 1000)[:-12],
    "no file": None,
}


@pytest.mark.parametrize("data", NO_TRACES.values(), ids=NO_TRACES)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "broken.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TraceError, match=r"broken\.json"):
        read_trace(path)


def test_an_operator_that_waits_inside_another_is_no_compute() -> None:
    outer = traps.event("cpu_op", "autograd::engine::evaluate_function", 0, 10, 5, 5)
    waiting = traps.event("cpu_op", "_c10d_functional::wait_tensor", 2, 7, 5, 5)
    assert parse_trace([outer, waiting]).compute == ((0, 2000), (9000, 10_000))
