"""Which matrices are worked on at the same time: rounds, in which every owner has work of its own.

A round is limited by what one rank holds, not by what travels: on N owners it has about N times the limit.
Costs are operations, weights are bytes at each rank that works on the matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

IN_FLIGHT = 3
"""Rounds in flight by default: one travels to its owners, one is worked on, and one travels back."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Most bytes that a rank holds: of a round that takes ``all`` there is, or of ``each`` of several."""

    all: int
    each: int

    @classmethod
    def of(cls, in_flight: int, buffers: int) -> Limit:
        """The limits of rounds that hold ``in_flight`` bytes together while they are in flight."""
        each = in_flight // IN_FLIGHT
        return cls(in_flight if buffers == 1 else each, each)


@dataclass(frozen=True, slots=True)
class Job:
    """A matrix, by its number in the list of all: its bytes, its operations, its workers' positions."""

    number: int
    weight: int
    cost: int
    places: range


@dataclass(slots=True)
class _Round:
    """A round while it is filled: the most bytes and operations of a position, and what each has so far."""

    most_bytes: int
    most_work: int
    jobs: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    work: dict[int, int] = field(default_factory=dict)

    def has_room(self, job: Job) -> bool:
        """Whether every position that works on the matrix can take it."""
        return all(
            self.held.get(place, 0) + job.weight <= self.most_bytes
            and self.work.get(place, 0) + job.cost <= self.most_work
            for place in job.places
        )

    def add(self, job: Job) -> None:
        """Give the matrix to its positions."""
        self.jobs.append(job.number)
        for place in job.places:
            self.held[place] = self.held.get(place, 0) + job.weight
            self.work[place] = self.work.get(place, 0) + job.cost


def fill_rounds(jobs: Sequence[Job], limit: Limit) -> list[list[int]]:
    """Deal jobs into rounds; returns the numbers of each round's jobs.

    A round takes everything, or, where that is too much for a position, as much as the limit of each, but
    always the largest job, or as much of small ones.

    The costliest jobs go first, each into the first round that has room. The job that opens a round says how
    much work its positions may have: as many such jobs as a round takes. So the other ranks have no more to
    do than its owner. Rounds and jobs come out in the order of the jobs' numbers, since gradients become
    complete in that order, backwards.

    >>> jobs = [Job(i, 10, 10, range(i % 2, i % 2 + 1)) for i in range(4)]
    >>> fill_rounds(jobs, Limit(1, 1)), fill_rounds(jobs, Limit(20, 1))
    ([[0, 1], [2, 3]], [[0, 1, 2, 3]])
    >>> fill_rounds([Job(0, 10, 10, range(1)), Job(1, 0, 0, range(0))], Limit(1, 1))
    [[0, 1]]
    """
    weights = Counter[int]()
    for job in jobs:
        for place in job.places:
            weights[place] += job.weight
    if max(weights.values(), default=0) <= limit.all:
        return [[job.number for job in jobs]] if jobs else []
    rounds: list[_Round] = []
    first_open: dict[int, int] = {}  # of each position; those before are full
    least, most = min(job.weight for job in jobs), max(job.weight for job in jobs)
    room = max(limit.each, most)
    for job in sorted(jobs, key=lambda job: (-job.cost, job.number)):
        open_at = (first_open.get(place, 0) for place in job.places)
        start = max(open_at, default=0)  # an empty matrix has no place
        found = next((rounds[i] for i in range(start, len(rounds)) if rounds[i].has_room(job)), None)
        if found is None:
            found = _Round(room, job.cost * max(1, room // max(1, job.weight)))
            rounds.append(found)
        found.add(job)
        for place in job.places:
            index = first_open.get(place, 0)
            while index < len(rounds) and rounds[index].held.get(place, 0) + least > room:
                index += 1
            first_open[place] = index
    return sorted(sorted(it.jobs) for it in rounds)
