"""Splits the wall time of each rank into computing, communicating, waiting and neither.

One clock for all ranks makes it possible to distinguish transfer from waiting, because a collective cannot
move anything before the last member of its group has requested it. Before that request, a rank waits for the
last member, although its own kernel or call is already running; after it, the rank communicates. All records
are plain data. Times are whole nanoseconds, so that a span's parts add up to exactly the span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...engine.collective import Label
from .time_intervals import Intervals, intersect, measure, subtract, union

State = Literal["compute", "communication", "waiting", "unsplit", "neither"]
STATES: tuple[State, ...] = ("compute", "communication", "waiting", "unsplit", "neither")


@dataclass(frozen=True, slots=True)
class CollectiveOfRank:
    """A collective in which one rank took part.

    ``group``: the ranks that take part. ``turn``: how many collectives of that group this rank has requested
    before. Records of several ranks belong to the same collective if ``group`` and ``turn`` are equal.
    ``group`` is empty if the recording does not show it.
    """

    rank: int
    kind: str
    phase: str
    subject: str
    group: tuple[int, ...]
    turn: int

    @property
    def label(self) -> str:
        """Phase and subject, in the form that requests print."""
        return str(Label(self.phase, self.subject))


@dataclass(frozen=True, slots=True)
class Flight(CollectiveOfRank):
    """A collective on one rank, from its request to the end of its part, in nanoseconds and bytes.

    ``payload``: bytes that the rank handed over; ``ring``: bytes that it would send on a ring.
    """

    issued: int
    done: int
    payload: int = 0
    ring: int = 0


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's recorded span, the times in which it computed, and its flights; in nanoseconds.

    ``blocked``: the times in which the rank was inside an operator that communicates. Blocked time outside
    the flights counts as communication if all members of every flight were recorded, otherwise as unsplit.
    """

    rank: int
    begin: int
    end: int
    compute: Intervals
    flights: tuple[Flight, ...]
    blocked: Intervals = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The activity of some ranks of a run, on one clock."""

    ranks: tuple[RankTimes, ...]

    @property
    def begin(self) -> int:
        return min(times.begin for times in self.ranks)

    @property
    def end(self) -> int:
        return max(times.end for times in self.ranks)


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """A rank's span in nanoseconds, and the five parts that sum to the span.

    ``compute``: all time in which the rank computed; ``overlapped``: the part of it during collectives. The
    other four parts do not contain time in which the rank computed. ``communication``: collectives in
    progress. ``waiting``: the last member of a collective had not made its request yet. ``unsplit``:
    communication or waiting, in collectives whose other members were not recorded. ``neither``: the rest,
    such as Python, launches, or an idle GPU.
    """

    rank: int
    span: int
    compute: int
    communication: int
    waiting: int
    unsplit: int
    neither: int
    overlapped: int

    def share(self, state: State) -> float:
        part: int = getattr(self, state)
        return part / self.span if self.span else 0.0


def split(timeline: Timeline) -> tuple[TimeSplit, ...]:
    found = []
    for times, states in zip(timeline.ranks, paint(timeline).values(), strict=True):
        moving = union((flight.issued, flight.done) for flight in times.flights)
        overlapped = measure(intersect(states["compute"], moving))
        parts = {state: measure(states[state]) for state in STATES}
        found.append(TimeSplit(times.rank, times.end - times.begin, **parts, overlapped=overlapped))
    return tuple(found)


def paint(timeline: Timeline) -> dict[int, dict[State, Intervals]]:
    """For each rank, the intervals of each state: disjoint, and together the rank's whole span."""
    asked = last_asked(timeline)
    return {times.rank: _paint_rank(times, asked) for times in timeline.ranks}


def last_asked(timeline: Timeline) -> Mapping[tuple[tuple[int, ...], int], int]:
    """For each (group, turn) of which all members were recorded: when the last member made its request."""
    asked: dict[tuple[tuple[int, ...], int], dict[int, int]] = {}
    for times in timeline.ranks:
        for flight in times.flights:
            asked.setdefault((flight.group, flight.turn), {})[flight.rank] = flight.issued
    return {key: max(when.values()) for key, when in asked.items() if key[0] and set(key[0]) == set(when)}


def _paint_rank(times: RankTimes, asked: Mapping[tuple[tuple[int, ...], int], int]) -> dict[State, Intervals]:
    parts: dict[State, list[tuple[int, int]]] = {"communication": [], "waiting": [], "unsplit": []}
    for flight in times.flights:
        for state, part in _parts(flight, asked.get((flight.group, flight.turn))):
            parts[state].append(part)
    wanted = {"compute": times.compute, **{state: union(pieces) for state, pieces in parts.items()}}
    left: Intervals = union([(times.begin, times.end)])
    painted: dict[State, Intervals] = {}
    for state, intervals in wanted.items():
        painted[state] = intersect(left, intervals)
        left = subtract(left, intervals)
    rest: State = "communication" if times.flights and not wanted["unsplit"] else "unsplit"
    painted[rest] = union([*painted[rest], *intersect(left, times.blocked)])
    return painted | {"neither": subtract(left, times.blocked)}


def _parts(flight: Flight, asked: int | None) -> list[tuple[State, tuple[int, int]]]:
    """Split a flight into waiting and communication. A rank that was done before the last member's request
    (because it only sent) did not wait for that member."""
    if asked is None:
        return [("unsplit", (flight.issued, flight.done))]
    if asked > flight.done:
        return [("communication", (flight.issued, flight.done))]
    return [("waiting", (flight.issued, asked)), ("communication", (asked, flight.done))]


def split_markdown(splits: Sequence[TimeSplit]) -> str:
    """A table with a row for each rank: its span in milliseconds, and the parts as fractions of the span."""
    head = "| rank | span, ms | " + " | ".join(STATES) + " | compute during a collective |"
    lines = [head, "|---" * (len(STATES) + 3) + "|"]
    for row in splits:
        shares = " | ".join(f"{row.share(state):.1%}" for state in STATES)
        overlapped = row.overlapped / row.span if row.span else 0.0
        lines.append(f"| {row.rank} | {row.span / 1e6:.2f} | {shares} | {overlapped:.1%} |")
    return "\n".join(lines)
