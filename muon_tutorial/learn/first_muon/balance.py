"""Lesson 04: owners chosen by cost, and five matrices for which longest first is not the best."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan.assign import longest_first

TOY = (8, 7, 6, 5, 4)
"""Costs of five matrices, in some unit, for which longest first on two owners is not the best."""
TOY_BEST = (0, 0, 1, 1, 1)
"""Owners with the least makespan for ``TOY``."""


def loads_of(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The work of each rank.

    >>> loads_of([8, 7, 6, 5, 4], [0, 1, 1, 0, 0], 2)
    [17.0, 13.0]
    """
    loads = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def deal_longest_first(costs: list[int], ranks: int) -> list[int]:
    """Owners as the package chooses them: the costliest first, each to the rank that has least so far."""
    return longest_first(costs, [0] * ranks)


def toy_makespans() -> dict[str, int]:
    """The makespans of ``TOY`` on two owners: the costliest first, and the least possible."""
    longest = deal_longest_first(list(TOY), 2)
    return {
        name: int(max(loads_of(TOY, owners, 2)))
        for name, owners in (("longest_first", longest), ("best", TOY_BEST))
    }
