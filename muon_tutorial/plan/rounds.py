"""Divides matrices into rounds. All owners work on the matrices of a round at the same time.

A round's limit applies to each rank's memory, not to the bytes that travel. So with N owners a round may
contain N times the limit. A cost is a number of operations; a weight is a matrix's bytes on each worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

IN_FLIGHT = 3
"""Rounds in flight by default: one travels to its owners, one is orthogonalized, and one travels back."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How many bytes of a round a rank may hold: ``all`` if there is only one round, otherwise ``each``."""

    all: int
    each: int

    @classmethod
    def of(cls, round_bytes: int, buffers: int) -> Limit:
        """Return the limit that keeps all rounds in flight together within ``round_bytes`` on a rank."""
        each = round_bytes // IN_FLIGHT
        return cls(round_bytes if buffers == 1 else each, each)


@dataclass(frozen=True, slots=True)
class Job:
    """A matrix: its number among all matrices, its bytes and operations, and the positions of its workers."""

    number: int
    weight: int
    cost: int
    places: range


@dataclass(slots=True)
class _Round:
    """A round to which jobs are added: each position's limits, and its bytes and work so far."""

    most_bytes: int
    most_work: int
    jobs: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    work: dict[int, int] = field(default_factory=dict)

    def has_room(self, job: Job) -> bool:
        return all(
            self.held.get(place, 0) + job.weight <= self.most_bytes
            and self.work.get(place, 0) + job.cost <= self.most_work
            for place in job.places
        )

    def add(self, job: Job) -> None:
        self.jobs.append(job.number)
        for place in job.places:
            self.held[place] = self.held.get(place, 0) + job.weight
            self.work[place] = self.work.get(place, 0) + job.cost


def fill_rounds(jobs: Sequence[Job], limit: Limit) -> list[list[int]]:
    """Distribute jobs over rounds, and return the numbers of each round's jobs.

    If every position can hold all its jobs within ``limit.all``, there is one round. Otherwise each round
    takes up to ``limit.each`` bytes per position, or the bytes of the largest job if these are more. The
    costliest jobs are placed first, each in the first round that has room.

    If n jobs as large as the round's first job fit into a position's bytes, the position gets at most n times
    that job's work. This keeps a round's ranks about equally busy. Rounds and jobs are sorted by number. A
    step takes them in this order; gradients that are sent during backward go in the reverse order.

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
    first_open: dict[int, int] = {}  # each position's first round with room
    least, most = min(job.weight for job in jobs), max(job.weight for job in jobs)
    room = max(limit.each, most)
    for job in sorted(jobs, key=lambda job: (-job.cost, job.number)):
        open_at = (first_open.get(place, 0) for place in job.places)
        start = max(open_at, default=0)  # an empty matrix has no workers
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
