"""Moves a tensor along a route, hop by hop.

The way back is ``travel(x, route.inverse, ...)``, which takes the inverse hops in reverse order. Which ranks
take part depends only on the route and the coordinate, never on the data.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..plan.grid import Coordinate
from ..plan.layout import Hop, Partial, Replicate, Route
from .collective import IDLE, Collective, Label, Walk
from .hop_collectives import take


def travel(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """Move this rank's part of a tensor along a route; returns the rank's part at the end.

    All ranks of the groups along the route must run it.
    """
    for hop in route.hops:
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def all_reduce(x: Tensor, axis: str, at: Coordinate, label: Label) -> Walk:
    """Sum the tensors of all ranks along one axis. All ranks of the axis must run it, and get the sum."""
    hop = Hop(axis, Partial(), Replicate(), tuple(x.shape))
    return travel(x, Route((hop,) if at.size(axis) > 1 else (), x.dtype), at, label)


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


def stand_by(route: Route) -> Walk:
    """Yield ``IDLE`` for each request that other ranks make along the route and back.

    So all ranks of a group take the same number of turns, and issue their requests in the same order.
    """
    for hop in (*route.hops, *route.inverse.hops):
        if not hop.silent:
            yield IDLE
