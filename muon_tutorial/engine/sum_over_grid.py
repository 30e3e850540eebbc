"""Sums a few numbers over all ranks, for the checks before a step."""

from __future__ import annotations

from torch import Tensor

from ..plan.grid import Coordinate
from .collective import Collective, Label, Walk
from .travel import all_reduce

AT_ONCE = 8
"""Along an axis with at most this many ranks, ``sum_over_grid`` uses an all_to_all."""


def sum_over_grid(x: Tensor, at: Coordinate, label: Label) -> Walk:
    """Sum a few numbers, [n], over all ranks, with the same bits on each rank.

    Along a short axis every rank sends its numbers to every other rank. This takes one round of messages,
    while an all_reduce over n ranks takes 2(n - 1) rounds. All ranks of the grid must run it.
    """
    n = x.numel()
    for axis, ranks in zip(at.grid.axes, at.grid.sizes, strict=True):
        if ranks > AT_ONCE:
            x = yield from all_reduce(x, axis, at, label)
        elif ranks > 1:
            each, send = (n,) * ranks, x.repeat(ranks)
            rows = yield Collective("all_to_all", (axis,), x.dtype, send, ranks * n, label, None, each, each)
            x = rows.view(ranks, n).sum(0)
    return x
