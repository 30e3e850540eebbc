"""How a tensor travels a route: hop by hop.

There is one function for both directions. The way back is ``travel(x, route.inverse, ...)``: the same hops in
opposite order, each the other way. Who takes part follows from the route and the coordinate, never from the
data at hand.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..plan.grid import Coordinate
from ..plan.layout import Hop, Partial, Replicate, Route
from .collective import IDLE, Collective, Label, Walk
from .hops import take


def travel(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """Carry this rank's part of a tensor along a route; returns what the rank holds at its end.

    Must be walked by all ranks of the groups that the route crosses.
    """
    for hop in route.hops:
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def all_reduce(x: Tensor, axis: str, at: Coordinate, label: Label) -> Walk:
    """The sum of all ranks' tensors along one axis, on each of them. All ranks of the axis must walk it."""
    hop = Hop(axis, Partial(), Replicate(), tuple(x.shape))
    return travel(x, Route((hop,) if at.size(axis) > 1 else (), x.dtype), at, label)


AT_ONCE = 8
"""The most ranks along an axis that send each other all they have, where it is little."""


def sum_over_grid(x: Tensor, at: Coordinate, label: Label) -> Walk:
    """The sum of all ranks' few numbers, [n], on each of them, to the same bits.

    Along a short axis every rank sends its numbers to every other: one round, where an all_reduce takes two
    for each other rank, and with more ranks than cores a round takes a millisecond. All ranks of the grid
    must walk it.
    """
    n = x.numel()
    for axis in at.grid.axes:
        ranks = at.size(axis)
        if ranks > AT_ONCE:
            x = yield from all_reduce(x, axis, at, label)
        elif ranks > 1:
            each, send = (n,) * ranks, x.repeat(ranks)
            rows = yield Collective("all_to_all", (axis,), x.dtype, send, ranks * n, label, None, each, each)
            x = rows.view(ranks, n).sum(0)
    return x


def stand_by(route: Route) -> Walk:
    """Let others travel the route and back: as many empty turns as they make requests.

    So every rank of a group counts the same turns, and the order of requests stays the same on all of them.
    """
    for hop in (*route.hops, *route.inverse.hops):
        if not hop.silent:
            yield IDLE
