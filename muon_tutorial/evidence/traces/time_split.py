"""Splits the wall time of each rank into computing, communicating, waiting and neither.

One clock for all ranks is what tells transfer from waiting: a collective can move nothing before the last
member of its group has asked for it. Until then a rank waits for that member, whatever its kernel or its call
looks like from inside; after that, communication is in progress. Pure data; times are whole nanoseconds, so
that the parts of a span sum to it exactly.
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
    """Which collective one rank took part in.

    ``group`` holds the ranks that take part, ``turn`` is how many collectives of that group this rank asked
    for before. Records of several ranks belong to the same collective where both are equal. ``group`` is
    empty where the recording does not tell it.
    """

    rank: int
    kind: str
    phase: str
    subject: str
    group: tuple[int, ...]
    turn: int

    @property
    def label(self) -> str:
        """Phase and subject, as requests print them."""
        return str(Label(self.phase, self.subject))


@dataclass(frozen=True, slots=True)
class Flight(CollectiveOfRank):
    """A collective from one rank's request to its own end. Nanoseconds and bytes.

    ``payload`` is what the rank handed over, ``ring`` what it sends on a ring.
    """

    issued: int
    done: int
    payload: int = 0
    ring: int = 0


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's recorded span, when it computed, its flights, and when it was ``blocked`` in an operator
    that communicates, whichever collective that served. Nanoseconds.

    Where every flight is known from all sides, what a rank is blocked beyond them is its own calls into the
    library: communication. Else nobody can say.
    """

    rank: int
    begin: int
    end: int
    compute: Intervals
    flights: tuple[Flight, ...]
    blocked: Intervals = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """What some ranks of a run did, on one clock."""

    ranks: tuple[RankTimes, ...]

    @property
    def begin(self) -> int:
        """When the first of the ranks began."""
        return min(times.begin for times in self.ranks)

    @property
    def end(self) -> int:
        """When the last of the ranks ended."""
        return max(times.end for times in self.ranks)


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """A rank's span in nanoseconds: its five parts sum to it.

    ``compute`` is all time in which the rank computed, also between a collective's request and its end: that
    much is ``overlapped``. ``communication`` and ``waiting`` are what is left of collectives in progress, and
    of those whose last member had not asked yet. ``unsplit`` is time in collectives whose other members were
    not recorded: transfer or waiting, nobody can say. ``neither`` is the rest: Python, launches, an idle GPU.
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
        """A part's share of the span."""
        part: int = getattr(self, state)
        return part / self.span if self.span else 0.0


def split(timeline: Timeline) -> tuple[TimeSplit, ...]:
    """The wall time of each rank, taken apart."""
    return tuple(
        _measured(times, states)
        for times, states in zip(timeline.ranks, paint(timeline).values(), strict=True)
    )


def _measured(times: RankTimes, states: Mapping[State, Intervals]) -> TimeSplit:
    moving = union((flight.issued, flight.done) for flight in times.flights)
    return TimeSplit(
        rank=times.rank,
        span=times.end - times.begin,
        **{state: measure(states[state]) for state in STATES},
        overlapped=measure(intersect(states["compute"], moving)),
    )


def paint(timeline: Timeline) -> dict[int, dict[State, Intervals]]:
    """For each rank, which state holds when: disjoint, and together the rank's span."""
    asked = last_asked(timeline)
    return {times.rank: _paint_rank(times, asked) for times in timeline.ranks}


def last_asked(timeline: Timeline) -> Mapping[tuple[tuple[int, ...], int], int]:
    """When the last member asked, for each (group, turn) of which all members were recorded."""
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
    """A flight as waiting and communication. A rank that was done before the last member asked (it only sent)
    did not wait for it."""
    if asked is None:
        return [("unsplit", (flight.issued, flight.done))]
    if asked > flight.done:
        return [("communication", (flight.issued, flight.done))]
    return [("waiting", (flight.issued, asked)), ("communication", (asked, flight.done))]


def split_markdown(splits: Sequence[TimeSplit]) -> str:
    """A table with a row for each rank: milliseconds and shares of its span."""
    head = "| rank | span, ms | " + " | ".join(STATES) + " | compute during a collective |"
    lines = [head, "|---" * (len(STATES) + 3) + "|"]
    for row in splits:
        shares = " | ".join(f"{row.share(state):.1%}" for state in STATES)
        overlapped = row.overlapped / row.span if row.span else 0.0
        lines.append(f"| {row.rank} | {row.span / 1e6:.2f} | {shares} | {overlapped:.1%} |")
    return "\n".join(lines)
