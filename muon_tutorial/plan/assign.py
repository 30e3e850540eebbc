"""Assigns matrices to ranks. A cost is the floating-point operations of one Newton–Schulz iteration."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def newton_schulz_cost(sides: tuple[int, int]) -> int:
    """Return the operations of one quintic iteration on an s×l matrix, s ≤ l: ``4s²l + 2s³``."""
    short, long = min(sides), max(sides)
    return 4 * short * short * long + 2 * short**3


def gram_cost(side: int, elements: int) -> int:
    """Return the operations per iteration of ``gram``, averaged over five iterations, on one rank.

    The rank holds ``elements`` of a matrix. In five iterations it computes two products with its shard, and
    17 products of ``side`` × ``side`` matrices, which every rank of the tp group repeats.
    """
    return (4 * side * elements + 34 * side**3) // 5


def longest_first(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Give each job to the position with the least work in this round, beginning with the costliest job.

    ``loads`` is each position's work from earlier rounds. The position with the smallest load gets the
    largest share of this round, so that rounds even out. Ties go to the lower position. A round takes at most
    4/3 of the best possible time (Graham 1969, "Bounds on multiprocessing timing anomalies").

    >>> longest_first([1, 4, 1, 1, 1], [0, 0])
    [1, 0, 1, 1, 1]
    >>> longest_first([18, 14, 6], [0, 0]), longest_first([18, 14, 6], [18, 20])
    ([0, 1, 1], [1, 0, 0])
    """
    owners = [0] * len(costs)
    least = sorted(range(len(loads)), key=loads.__getitem__)[: len(costs)]  # At most n positions get n jobs.
    work = [(0, loads[position], position) for position in least]  # A sorted list is a heap.
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        done, load, owner = work[0]
        owners[job] = owner
        heapq.heapreplace(work, (done + costs[job], load, owner))
    shares = {owner: done for done, _, owner in work}
    if len({loads[position] for position in shares}) <= 1:
        return owners
    largest = sorted(shares, key=lambda position: (-shares[position], position))
    lightest = sorted(shares, key=lambda position: (loads[position], position))
    taker = dict(zip(largest, lightest, strict=True))
    return [taker[owner] for owner in owners]
