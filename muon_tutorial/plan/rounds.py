"""Which matrices are worked on at the same time: rounds, in which every owner has work of its own.

A round is limited by what one rank holds, not by what travels: on N owners it has about N times the limit.
Costs are operations, weights are bytes at each rank that works on the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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


def fill_rounds(jobs: Sequence[Job], limit: int) -> list[list[int]]:
    """Deal jobs into rounds of at most ``limit`` bytes a position; returns the numbers of each round's jobs.

    The costliest jobs go first, each into the first round that has room. The job that opens a round says how
    much its positions may hold: ``limit``, or its own bytes if those are more, and as much work as that many
    bytes of such jobs are. So a large matrix makes room for as much on the other ranks, which then have no
    more to do than its owner. Rounds and jobs come out in the order of the jobs' numbers, since gradients
    become complete in that order, backwards.

    >>> jobs = [Job(i, 10, 10, range(i % 2, i % 2 + 1)) for i in range(4)]
    >>> fill_rounds(jobs, 1), fill_rounds(jobs, 20)
    ([[0, 1], [2, 3]], [[0, 1, 2, 3]])
    >>> fill_rounds([Job(0, 10, 10, range(1)), Job(1, 0, 0, range(0))], 1)
    [[0, 1]]
    """
    rounds: list[_Round] = []
    first_open: dict[int, int] = {}  # of each position; those before are full
    least = min((job.weight for job in jobs), default=0)
    for job in sorted(jobs, key=lambda job: (-job.cost, job.number)):
        open_at = (first_open.get(place, 0) for place in job.places)
        start = max(open_at, default=0)  # an empty matrix has no place
        found = next((it for it in rounds[start:] if it.has_room(job)), None)
        if found is None:
            room = max(limit, job.weight)
            found = _Round(room, job.cost * max(1, room // max(1, job.weight)))
            rounds.append(found)
        found.add(job)
        for place in job.places:
            index = first_open.get(place, 0)
            while index < len(rounds) and rounds[index].held.get(place, 0) + least > rounds[index].most_bytes:
                index += 1
            first_open[place] = index
    return sorted(sorted(it.jobs) for it in rounds)
