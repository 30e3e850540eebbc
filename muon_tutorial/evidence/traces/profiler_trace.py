"""Reads Chrome traces that torch.profiler (Kineto) wrote, here or elsewhere, plain or gzipped.

One collective appears in such a trace up to five times: as the kernel that ran, as an annotation on the GPU's
track, as the operator that launched it, as the bookkeeping under it (``record_param_comms``), and as an
annotation on the CPU's track. Only the kernel does the work. The reader counts each collective once, and
measures the time in which at least one event ran. It can also sum durations by name, to show how wrong such a
sum is.

One rank's trace cannot separate transfer from waiting: a communication kernel spins until its peers arrive,
so its duration includes both.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import TraceError
from .time_intervals import Intervals, subtract, union

Sort = Literal["kernel", "memory", "launch", "runtime", "gpu annotation", "cpu annotation", "other"]

SORTS: dict[str, Sort] = {
    "kernel": "kernel",
    "gpu_memcpy": "memory",
    "gpu_memset": "memory",
    "cpu_op": "launch",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "gpu_user_annotation": "gpu annotation",
    "user_annotation": "cpu annotation",
}
# Longer words come first, because "reduce_scatter" contains "reduce", and "all_gather" contains "gather".
KINDS = {
    "reduce_scatter": r"reduce_?scatter",
    "all_reduce": r"all_?reduce",
    "all_gather": r"all_?gather",
    "all_to_all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "send_recv": r"send_?recv",
    "gather": r"gather",
    "scatter": r"scatter",
    "reduce": r"reduce",
}
COMMUNICATION = re.compile(r"^(nccl|rccl|gloo:|_?c10d(_functional)?::)|record_param_comms", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One complete event, in nanoseconds; ``process`` and ``thread`` are the trace's own names."""

    name: str
    sort: Sort
    begin: int
    duration: int
    process: int | str
    thread: int | str
    args: Mapping[str, Any]

    @property
    def end(self) -> int:
        return self.begin + self.duration

    @property
    def interval(self) -> tuple[int, int]:
        return self.begin, self.end

    @property
    def communicates(self) -> bool:
        """Whether this event stands for a collective, in any of the five forms."""
        return COMMUNICATION.search(self.name) is not None

    @property
    def kind(self) -> str:
        """The collective's kind, or ``""`` if the name does not say."""
        name = str(self.args.get("Collective name") or self.name)
        found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
        return next(found, "")


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one process: its complete events in order, and the profiler's facts about the job."""

    source: str
    events: tuple[TraceEvent, ...]
    job: Mapping[str, Any]
    devices: tuple[str, ...]

    def of(self, *sorts: Sort) -> list[TraceEvent]:
        return [event for event in self.events if event.sort in sorts]

    @property
    def executed(self) -> list[TraceEvent]:
        """The events that ran on devices: kernels and memory operations. Empty for a trace without a GPU."""
        return self.of("kernel", "memory")

    @property
    def collectives(self) -> list[TraceEvent]:
        """The event that executed each collective: its kernel or, without a GPU, the backend's event.

        Gloo's sends and receives are left out, because their events show only the request.
        """
        if kernels := [event for event in self.of("kernel") if event.communicates]:
            return kernels
        return [event for event in self.of("cpu annotation") if event.name.startswith("gloo:") and event.kind]

    @property
    def compute(self) -> Intervals:
        """The time of computing: kernels that do not communicate, and memory operations.

        Without a GPU, this is the time in operators outside the backend's threads, minus the time in
        operators that communicate, because these mostly wait.
        """
        if ran := self.executed:
            return covered(event for event in ran if not event.communicates)
        return subtract(covered(event for event in self._called if not event.communicates), self.blocked)

    @property
    def blocked(self) -> Intervals:
        """The time in which a thread of the program was inside an operator that communicates. Empty with a
        GPU, where such operators only launch kernels."""
        return () if self.executed else covered(event for event in self._called if event.communicates)

    @property
    def _called(self) -> list[TraceEvent]:
        backend = {event.thread for event in self.collectives}
        return [event for event in self.of("launch") if event.thread not in backend]


@dataclass(frozen=True, slots=True)
class NameSum:
    """Events with the same name and ``sort``: their number, and the sum of their durations in nanoseconds."""

    name: str
    sort: Sort
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """Executed collectives of one kind, group and size. ``total`` is in nanoseconds, sizes in elements."""

    kind: str
    group: int
    dtype: str
    sent: int
    received: int
    count: int
    total: int


def read_trace(path: str | Path) -> Trace:
    """Read one file of Chrome's JSON, gzipped or not.

    Raises:
        TraceError: the file is not a trace.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        return parse_trace(json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), path.name)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path} cannot be read as a Chrome trace: {error}") from error


def parse_trace(document: object, source: str = "") -> Trace:
    """A trace from Chrome's JSON: an object with ``traceEvents``, or the bare list of events.

    Raises:
        TraceError: ``document`` has no list of events, or a complete event has no name, time or duration.
    """
    about: Mapping[str, Any] = document if isinstance(document, dict) else {}
    raw = about.get("traceEvents") if about else document
    if not isinstance(raw, list):
        raise TraceError(f"{source or 'the document'} holds no list of trace events")
    try:
        events = [_event(entry) for entry in raw if entry.get("ph") == "X"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{source or 'the document'} holds a malformed complete event: {error!r}") from error
    devices = tuple(str(device.get("name", "")) for device in about.get("deviceProperties", ()))
    events.sort(key=lambda event: event.interval)
    return Trace(source, tuple(events), about.get("distributedInfo", {}), devices)


def _event(entry: Mapping[str, Any]) -> TraceEvent:
    return TraceEvent(
        name=str(entry["name"]),
        sort=SORTS.get(str(entry.get("cat", "")).lower(), "other"),
        begin=nanoseconds(entry["ts"]),
        duration=nanoseconds(entry["dur"]),
        process=entry.get("pid", 0),
        thread=entry.get("tid", 0),
        args=entry.get("args") or {},
    )


def nanoseconds(microseconds: float) -> int:
    """Turn Chrome's microseconds into whole nanoseconds; Kineto prints three decimals, so nothing is lost."""
    return round(microseconds * 1000)


def span(events: Iterable[TraceEvent]) -> tuple[int, int]:
    """The first begin and the last end, in nanoseconds; (0, 0) without events."""
    events = list(events)
    if not events:
        return 0, 0
    return min(event.begin for event in events), max(event.end for event in events)


def covered(events: Iterable[TraceEvent]) -> Intervals:
    """The time in which at least one of the events ran."""
    return union(event.interval for event in events)


def sums_by_name(events: Iterable[TraceEvent], words: Iterable[str]) -> tuple[NameSum, ...]:
    """Sums of durations for each name that contains one of the words, to show how such sums mislead.

    If a kernel, a launch and an annotation have the same name, each of the three sorts gets its own sum. The
    words are compared in lower case. The largest sum comes first.
    """
    words = [word.lower() for word in words]
    sums: dict[tuple[str, Sort], list[int]] = {}
    for event in events:
        if any(word in event.name.lower() for word in words):
            sums.setdefault((event.name, event.sort), []).append(event.duration)
    rows = [NameSum(name, sort, len(times), sum(times)) for (name, sort), times in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total, row.name, row.sort)))


def sum_collectives(trace: Trace) -> tuple[CollectiveSum, ...]:
    """Sums of durations that count each collective once. Kinds are in the order in which they first ran."""
    sums: dict[tuple[str, int, str, int, int], list[int]] = {}
    for event in trace.collectives:
        sizes = int(event.args.get("In msg nelems", 0)), int(event.args.get("Out msg nelems", 0))
        key = (event.kind, int(event.args.get("Group size", 0)), str(event.args.get("dtype", "")), *sizes)
        sums.setdefault(key, []).append(event.duration)
    return tuple(CollectiveSum(*key, len(times), sum(times)) for key, times in sums.items())
