"""Arithmetic on intervals of time, sorted and disjoint, in whole nanoseconds, so that sums are exact.

A sum of durations counts overlaps twice; the measure of a union does not. Knows nothing about traces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Intervals = tuple[tuple[int, int], ...]  # (begin, end) in nanoseconds; sorted, disjoint, none empty


def union(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """The time that is covered by at least one piece.

    >>> union([(5, 9), (0, 2), (1, 3), (4, 4)])
    ((0, 3), (5, 9))
    """
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return tuple(joined)


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """The time that ``left`` and ``right`` both cover.

    >>> intersect(((0, 3), (5, 9)), ((2, 6),))
    ((2, 3), (5, 6))
    """
    both, here, there = [], 0, 0
    while here < len(left) and there < len(right):
        begin, end = max(left[here][0], right[there][0]), min(left[here][1], right[there][1])
        if begin < end:
            both.append((begin, end))
        if left[here][1] < right[there][1]:
            here += 1
        else:
            there += 1
    return tuple(both)


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """The time that ``left`` covers and ``right`` does not.

    >>> subtract(((0, 3), (5, 9)), ((2, 6),))
    ((0, 2), (6, 9))
    """
    if not left:
        return ()
    edges = [left[0][0], *(edge for piece in right for edge in piece), left[-1][1]]
    gaps = tuple((begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end)
    return intersect(left, gaps)


def clip(pieces: Intervals, begin: int, end: int) -> Intervals:
    """The parts of the pieces that lie between two instants.

    >>> clip(((0, 3), (5, 9)), 2, 6)
    ((2, 3), (5, 6))
    """
    first = max(0, bisect_left(pieces, (begin, begin)) - 1)
    return intersect(pieces[first : bisect_left(pieces, (end, end))], ((begin, end),))


def measure(pieces: Intervals) -> int:
    """The number of nanoseconds that are covered."""
    return sum(end - begin for begin, end in pieces)
