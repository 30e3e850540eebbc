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
from .collective import IDLE, Label, Walk
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


def stand_by(route: Route) -> Walk:
    """Let others travel the route and back: as many empty turns as they make requests.

    So every rank of a group counts the same turns, and the order of requests stays the same on all of them.
    """
    for hop in (*route.hops, *route.inverse.hops):
        if not hop.silent:
            yield IDLE
