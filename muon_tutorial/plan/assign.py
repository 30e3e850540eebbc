"""Who orthogonalizes what. Costs are floating-point operations of one Newton–Schulz iteration."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def newton_schulz_cost(sides: tuple[int, int]) -> int:
    """Operations of one quintic iteration on an s×l matrix, s ≤ l: ``4s²l + 2s³``."""
    short, long = min(sides), max(sides)
    return 4 * short * short * long + 2 * short**3


def longest_first(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Give each job to the position with the least work of this round, the costliest jobs first.

    ``loads`` is what each position carries from earlier rounds: it decides between equals, then the lower
    position does. The makespan of a round is at most 4/3 of the best possible (Graham 1969, "Bounds on
    multiprocessing timing anomalies").

    >>> longest_first([1, 4, 1, 1, 1], [0, 0])
    [1, 0, 1, 1, 1]
    """
    owners = [0] * len(costs)
    least = sorted(range(len(loads)), key=loads.__getitem__)[: len(costs)]  # no others can be reached
    work = [(0, loads[position], position) for position in least]  # sorted, so that it is a heap
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        done, load, owner = work[0]
        owners[job] = owner
        heapq.heapreplace(work, (done + costs[job], load, owner))
    return owners
