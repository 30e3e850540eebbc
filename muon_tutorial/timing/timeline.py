"""Timelines of predicted and recorded steps: what each rank did when, and how the two differ.

A timed world's run and a real one (``step_recorder``) both become a ``StepTimeline``, in seconds since the
start of all ranks. So one picture shows both, one table compares them, and Perfetto opens both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import TraceError
from ..evidence.traces.perfetto import merge_documents
from ..evidence.traces.time_intervals import union
from ..evidence.traces.time_split import CollectiveOfRank, Flight, RankTimes, Timeline
from .timed_world import Doing, Span, TimedRun

Source = Literal["predicted", "recorded"]
PROCESSOR_TRACK = 1 << 29  # larger than threads' numbers, smaller than the tracks' in evidence.traces
PREDICTED = 1000
"""Added to a rank's number in a prediction that shares a document with a recording."""
NEWTON_SCHULZ = "Newton–Schulz"


@dataclass(frozen=True, slots=True)
class RankFlight(CollectiveOfRank):
    """A collective on one rank: its times, in seconds since all ranks started, and its bytes.

    ``issued``: when the rank had made the request. ``begin``: when the last member of ``group`` had made its
    request. ``end``: when the rank's part was done. If a rank exchanges messages with only some others,
    ``end`` may precede the last member's request; then ``begin`` equals ``end``. ``answered``: when the rank
    had the answer. ``payload``: bytes that it handed over; ``ring``: bytes that it would send on a ring.
    """

    issued: float
    begin: float
    end: float
    answered: float
    payload: int = 0
    ring: int = 0


@dataclass(frozen=True, slots=True)
class RankPhase:
    """When a rank began a phase of one bucket or matrix, and when it had the answer, in seconds."""

    rank: int
    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """A step by rank. Products, copies and waits of a rank follow each other; its transfers overlap them."""

    source: Source
    spans: tuple[Span, ...]
    flights: tuple[RankFlight, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def seconds(self) -> float:
        """When the last rank ended."""
        return max((span.end for span in self.spans), default=0.0)

    def of(self, rank: int, *doing: Doing) -> list[Span]:
        """A rank's spans of some kinds (of all by default), in order."""
        found = [span for span in self.spans if span.rank == rank and (not doing or span.doing in doing)]
        return sorted(found, key=lambda span: span.begin)

    def total(self, doing: Doing, rank: int) -> float:
        return sum(span.end - span.begin for span in self.of(rank, doing))

    @property
    def phases(self) -> tuple[RankPhase, ...]:
        """Each rank's phases, named by their request, and its products, named by the request before them."""
        lived = [(flight.rank, flight.label, flight.issued, flight.answered) for flight in self.flights]
        for span in self.spans:
            if span.doing == "product":
                lived.append((span.rank, f"{NEWTON_SCHULZ} after {span.label}", span.begin, span.end))
        edges: dict[tuple[int, str], tuple[float, float]] = {}
        for rank, name, begin, end in lived:
            first, last = edges.get((rank, name), (begin, end))
            edges[rank, name] = min(first, begin), max(last, end)
        return tuple(RankPhase(*where, *when) for where, when in sorted(edges.items()))

    @property
    def trace(self) -> Timeline:
        """The step in the form of traces: computing, and collectives in flight, in whole nanoseconds."""
        return Timeline(tuple(self._rank_times(rank) for rank in self.ranks))

    def _rank_times(self, rank: int) -> RankTimes:
        flights = tuple(_flight(each) for each in self.flights if each.rank == rank)
        whole = self.of(rank, "product", "copy", "wait")
        begin, end = nanoseconds(whole[0].begin), nanoseconds(whole[-1].end)
        computing = (span for span in whole if span.doing != "wait")
        computed = union((nanoseconds(span.begin), nanoseconds(span.end)) for span in computing)
        return RankTimes(rank, begin, end, computed, flights)

    def document(self) -> dict[str, Any]:
        """The step as one document that Perfetto and chrome://tracing can open."""
        document = merge_documents({}, {}, self.trace)
        for rank in self.ranks:
            track = {"pid": rank, "tid": PROCESSOR_TRACK}
            name = {"name": f"processor, {self.source}"}
            document["traceEvents"].append({"ph": "M", "name": "thread_name", "ts": 0, **track, "args": name})
            for span in self.of(rank, "product", "copy", "wait"):
                event = {"ph": "X", "cat": "span", "name": span.doing, "ts": span.begin * 1e6}
                event |= {"dur": (span.end - span.begin) * 1e6, "args": {"phase": span.label}, **track}
                document["traceEvents"].append(event)
        return document


def side_by_side(predicted: StepTimeline, recorded: StepTimeline) -> dict[str, Any]:
    """Recording and prediction as one document, with a separate process for each rank's prediction."""
    document = recorded.document()
    for event in predicted.document()["traceEvents"]:
        moved = {**event, "pid": PREDICTED + event["pid"]}
        if event["name"] == "process_name":
            moved["args"] = {"name": f"{event['args']['name']}, predicted"}
        document["traceEvents"].append(moved)
    return document


def _flight(one: RankFlight) -> Flight:
    issued, done = nanoseconds(one.issued), nanoseconds(one.end)
    about = (one.rank, one.kind, one.phase, one.subject, one.group, one.turn)
    return Flight(*about, issued, max(issued, done), one.payload, one.ring)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def transfers(flights: Iterable[RankFlight]) -> list[Span]:
    """Spans of collectives in flight, from the last member's request to the end."""
    return [Span(one.rank, "transfer", one.begin, one.end, one.label) for one in flights]


def predicted_timeline(run: TimedRun) -> StepTimeline:
    turns: dict[tuple[int, ...], int] = {}
    flights = []
    for flight in run.flights:
        turns[flight.group] = turn = turns.get(flight.group, -1) + 1
        for rank, issued in sorted(flight.issued.items()):
            end = flight.done.get(rank, flight.begin)
            about = (rank, flight.kind, flight.label.phase, flight.label.subject, flight.group, turn)
            begin = min(flight.begin, end)  # a rank's messages may be done before the last member asks
            times = (issued, begin, end, flight.answered.get(rank, end))
            flights.append(RankFlight(*about, *times, flight.payload[rank], flight.ring[rank]))
    return StepTimeline("predicted", (*run.spans, *transfers(flights)), tuple(flights))


@dataclass(frozen=True, slots=True)
class PhaseGap(RankPhase):
    """How far a recorded phase's begin and end are from the prediction, as fractions of the recorded step.

    Positive means later than predicted.
    """

    @property
    def worst(self) -> float:
        """The larger of the two differences, without its sign."""
        return max(abs(self.begin), abs(self.end))


def compare_phases(predicted: StepTimeline, recorded: StepTimeline) -> list[PhaseGap]:
    """Each phase of each rank: how far its begin and end are from the prediction.

    Raises:
        TraceError: the timelines do not have the same phases, so they are not of the same step.
    """
    said = {(phase.rank, phase.name): phase for phase in predicted.phases}
    seen = {(phase.rank, phase.name): phase for phase in recorded.phases}
    if apart := sorted(said.keys() ^ seen.keys()):
        rank, name = apart[0]
        where = "predicted" if apart[0] in said else "recorded"
        raise TraceError(f"not the same step: only the {where} timeline has {name!r} on rank {rank}")
    step = recorded.seconds
    return [
        PhaseGap(*where, (seen[where].begin - due.begin) / step, (seen[where].end - due.end) / step)
        for where, due in said.items()
    ]


TICK = 1e-5
"""Written times are rounded to multiples of this many seconds."""
_DOINGS: tuple[Doing, ...] = ("product", "copy", "wait")


def as_data(timeline: StepTimeline) -> dict[str, Any]:
    """A timeline as plain data in few bytes: times in ticks, and indices instead of repeated values."""
    kept = [span for span in timeline.spans if span.doing != "transfer"]
    labels = list(dict.fromkeys(span.label for span in kept))
    kinds = list(dict.fromkeys(_about(flight) for flight in timeline.flights))
    return {
        "source": timeline.source,
        "labels": labels,
        "kinds": kinds,
        "spans": [
            [one.rank, _DOINGS.index(one.doing), labels.index(one.label), _ticks(one.begin), _ticks(one.end)]
            for one in kept
        ],
        "flights": [
            [one.rank, kinds.index(_about(one)), *map(_ticks, (one.issued, one.begin, one.end, one.answered))]
            for one in timeline.flights
        ],
    }


def _about(flight: RankFlight) -> tuple[Any, ...]:
    about = flight.kind, flight.phase, flight.subject, flight.group, flight.turn
    return *about, flight.payload, flight.ring


def _ticks(seconds: float) -> int:
    return round(seconds / TICK)


def from_data(held: Mapping[str, Any]) -> StepTimeline:
    """Read what ``as_data`` returned.

    Raises:
        TraceError: the data is not a timeline.
    """
    try:
        spans = [
            Span(rank, _DOINGS[doing], begin * TICK, end * TICK, held["labels"][label])
            for rank, doing, label, begin, end in held["spans"]
        ]
        flights = []
        for rank, about, *ticks in held["flights"]:
            kind, phase, subject, group, turn, payload, ring = held["kinds"][about]
            issued, begin, end, answered = (tick * TICK for tick in ticks)
            named = (rank, kind, phase, subject, tuple(group), turn)
            flights.append(RankFlight(*named, issued, begin, end, answered, payload, ring))
        return StepTimeline(held["source"], (*spans, *transfers(flights)), tuple(flights))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise TraceError(f"this is not a timeline of a step: {error!r}") from error


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The recorded steps of one strategy, window and link. ``link`` is in words. ``rate`` is in bytes per
    second; it is None if nothing limits the loopback. ``seconds`` has the seconds of every step, and
    ``timeline`` shows the step with the median time."""

    strategy: str
    window: int
    link: str
    rate: float | None
    seconds: tuple[float, ...]
    timeline: StepTimeline


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded steps of one task on one machine. ``about`` says in words what was recorded, when and with
    what. ``task`` and ``machine`` hold the numbers that a prediction needs. ``machine`` is a machine's
    file."""

    about: Mapping[str, str]
    task: Mapping[str, int]
    machine: Mapping[str, Any]
    steps: tuple[RecordedStep, ...]

    def step(self, strategy: str, window: int, link: str) -> RecordedStep:
        """One of the recorded steps.

        Raises:
            TraceError: there is no such step.
        """
        wanted = (strategy, window, link)
        by_name = {(step.strategy, step.window, step.link): step for step in self.steps}
        if wanted not in by_name:
            raise TraceError(f"the recording has no step {wanted!r}")
        return by_name[wanted]

    def write(self, path: str | Path) -> None:
        steps = [{**asdict(step), "timeline": as_data(step.timeline)} for step in self.steps]
        held = {"about": self.about, "task": self.task, "machine": self.machine, "steps": steps}
        Path(path).write_text(json.dumps(held, separators=(",", ":")) + "\n", encoding="utf-8")


def read_recording(path: str | Path) -> Recording:
    """Read what ``Recording.write`` wrote.

    Raises:
        TraceError: the file cannot be read, or is not a recording.
    """
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        steps = tuple(
            RecordedStep(**{**one, "seconds": tuple(one["seconds"]), "timeline": from_data(one["timeline"])})
            for one in held["steps"]
        )
        return Recording(held["about"], held["task"], held["machine"], steps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a recording of steps: {error!r}") from error


def middle(timelines: Sequence[StepTimeline]) -> StepTimeline:
    """The timeline of the step with the median time; it represents several steps of one kind."""
    return sorted(timelines, key=lambda timeline: timeline.seconds)[(len(timelines) - 1) // 2]
