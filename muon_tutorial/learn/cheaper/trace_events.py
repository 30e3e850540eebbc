"""Lesson 13: traces of a CPU and of a GPU, the report's published figures, and waits in a timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...evidence.traces.profiler_trace import COMMUNICATION, Sort, TraceEvent, covered
from ...evidence.traces.time_intervals import measure
from ...evidence.traces.time_split import Flight, Timeline
from .published_traces import SOURCE, TraceSummary, compare_bytes, report
from .published_traces import gpu_step as gpu_step

GATHER = "ncclDevKernel_AllGather_RING_LL"
PRODUCT = "ampere_bf16_s16816gemm_bf16_128x128"
US = 1000  # nanoseconds
Waited = Callable[[Sequence[Flight]], Mapping[int, int]]
"""Takes the flights of one collective, and returns the nanoseconds that each rank waited."""


def collectives_in(events: Iterable[Any]) -> list[TraceEvent]:
    """The communication events of a profiler's ``events()``, found by name; the first begins at 0.

    Without a GPU there are no kernels: the backend's event in the thread that sends gets the sort ``kernel``.
    """
    found = [(each.name, each.time_range) for each in events if COMMUNICATION.search(each.name)]
    first = min((time.start for _, time in found), default=0)
    sorts: list[Sort] = ["launch" if name.startswith("c10d::") else "kernel" for name, _ in found]
    rows = zip(found, sorts, strict=True)
    made = [event(name, sort, time.start - first, time.elapsed_us()) for (name, time), sort in rows]
    return sorted(made, key=lambda each: each.begin)


def event(name: str, sort: Sort, begin: float, duration: float) -> TraceEvent:
    """An event of a trace, times in microseconds."""
    place, track = ("GPU 0", 7) if sort in ("kernel", "memory", "gpu annotation") else ("rank 0", 1)
    return TraceEvent(name, sort, round(begin * US), round(duration * US), place, track, {})


def one_collective(begin: int, duration: int) -> list[TraceEvent]:
    """One all_gather as a profiler logs it: two events for its launch, two for its run."""
    return [
        event("c10d::_allgather_base_", "launch", begin - 300, 103),
        event("nccl:_all_gather_base", "cpu annotation", begin - 274, 64),
        event("nccl:_all_gather_base", "gpu annotation", begin, duration),
        event(GATHER, "kernel", begin, duration),
    ]


def say_events(events: Iterable[TraceEvent]) -> str:
    """Events as a table, in microseconds."""
    rows = [f"{each.sort:15} {each.begin // US:6,} {each.duration // US:9,}   {each.name}" for each in events]
    return "\n".join([f"{'sort':15} {'begin':>6} {'duration':>9}   name", *rows])


def at_work(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """The events in which a collective really runs, without labels and launches."""
    return [each for each in events if each.sort == "kernel" and each.communicates]


def communicating(events: Iterable[TraceEvent]) -> int:
    """The exercise's reference: nanoseconds in which any collective ran."""
    return measure(covered(at_work(events)))


FIELDS: Mapping[str, tuple[str, Callable[[TraceSummary], int]]] = {
    "sum_over_names": ("all events with such a name", lambda run: run.sum_over_names),
    "kernels": ("communication kernels alone", lambda run: run.kernels),
    "launch.total": ("the optimizer's call, CPU", lambda run: run.launch.total),
    "full_step.total": ("the whole step, CPU", lambda run: run.full_step.total),
    "optimizer.total": ("the optimizer, GPU", lambda run: run.optimizer.total),
    "gpu_span": ("from first to last, GPU", lambda run: run.gpu_span),
}
"""The summary's fields that the exercise needs: each name's description and function."""


def say_report() -> str:
    """The ``FIELDS`` of all four runs, in milliseconds."""
    runs = report()
    rows = [f"{'field':16} {' '.join(f'{name:>12}' for name in runs)}   what it is"]
    for field, (what, of) in FIELDS.items():
        numbers = " ".join(f"{of(run) / 1e6:12.2f}" for run in runs.values())
        rows.append(f"{field:16} {numbers}   {what}")
    return "\n".join([*rows, f"from {SOURCE}"])


def right_headlines() -> dict[str, float]:
    """The published headlines and the corrected numbers, by the names of the exercise."""
    runs = report()
    adamw, muon, later = runs["adamw"], runs["muon"], runs["muon_async"]
    return {
        "0.57": muon.sum_over_names / adamw.sum_over_names,
        "0.57 once": muon.kernels / adamw.kernels,
        "1.1%": muon.launch.total / muon.full_step.total,
        "1.1% on the GPU": muon.optimizer.total / muon.gpu_span,
        "2.1": later.sum_over_names / muon.sum_over_names,
        "2.1 as a span": later.gpu_span / muon.gpu_span,
    }


def say_bytes() -> str:
    runs = report()
    rows = compare_bytes(runs["adamw"], runs["muon"])
    return "\n".join(f"{row.shown:6} {row.how:18} {row.what}" for row in rows)


def waited(flights: Sequence[Flight]) -> dict[int, int]:
    """The exercise's reference: each rank's wait until the last rank asks; 0 if its call ended before."""
    last = max(flight.issued for flight in flights)
    return {each.rank: last - each.issued if each.done >= last else 0 for each in flights}


def waits_of(timeline: Timeline, waited: Waited) -> list[tuple[int, int]]:
    """For each rank: its nanoseconds in collectives, and how many of these nanoseconds it waited."""
    calls: dict[tuple[tuple[int, ...], int], list[Flight]] = defaultdict(list)
    inside, waits = ({times.rank: 0 for times in timeline.ranks} for _ in range(2))
    for flight in (flight for times in timeline.ranks for flight in times.flights):
        calls[flight.group, flight.turn].append(flight)
        inside[flight.rank] += flight.done - flight.issued
    for rank, waiting in (item for flights in calls.values() for item in waited(flights).items()):
        waits[rank] += waiting
    return [(inside[rank], waits[rank]) for rank in inside]


def say_waits(timeline: Timeline, waited: Waited) -> str:
    """Each rank's time in collectives, as its own trace would show it, split into waiting and transfer."""
    rows = [f"{'':7} {'in collectives':>15} {'waiting':>10} {'transfer':>10}"]
    for rank, (inside, waiting) in enumerate(waits_of(timeline, waited)):
        cells = f"{inside / 1e6:12.2f} ms {waiting / 1e6:7.2f} ms {(inside - waiting) / 1e6:7.2f} ms"
        rows.append(f"rank {rank:2} {cells}")
    return "\n".join(rows)
