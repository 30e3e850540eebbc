"""Who has heard of whom, call by call, when every rank calls its two groups. No rank runs here.

A call of a group ends when all of its members have come; then all of them know what any of them knew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ... import Grid

Axis = Literal["dp", "tp"]
NOBODY = -1
LAST = 4
"""The last moment of a film."""


@dataclass(frozen=True, slots=True)
class CallMoment:
    """One moment: the axis whose groups call, whom each rank has heard of, who waits, and who is done.

    ``ended`` says whether the call has ended, for those groups in which all have come.
    """

    axis: Axis | None
    ended: bool
    heard: tuple[frozenset[int], ...]
    waits: frozenset[int] = frozenset()


def film_of(grid: Grid, first: Axis = "tp", skips: int = NOBODY) -> list[CallMoment]:
    """Start, the first call, its end, the second call, its end. Rank ``skips`` leaves out the first.

    >>> film = film_of(Grid.of(dp=2, tp=3), "tp", skips=0)
    >>> sorted(film[-1].heard[0]), sorted(film[-1].waits)
    ([0, 3, 4, 5], [1, 2, 4, 5])
    """
    heard = tuple(frozenset([rank]) for rank in grid.ranks)
    moments, waits = [CallMoment(None, True, heard)], frozenset[int]()
    second: Axis = "dp" if first == "tp" else "tp"
    for axis, absent in ((first, skips), (second, NOBODY)):
        moments.append(CallMoment(axis, False, heard, waits))
        groups = {grid.at(rank).group(axis) for rank in grid.ranks}
        away = waits | {absent}
        waits = waits.union(*(set(group) - away for group in groups if away & set(group)))
        for group in (group for group in groups if not away & set(group)):
            known = frozenset().union(*(heard[rank] for rank in group))
            heard = tuple(known if rank in group else old for rank, old in enumerate(heard))
        moments.append(CallMoment(axis, True, heard, waits))
    return moments
