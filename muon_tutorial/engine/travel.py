"""Moves a tensor along a route, hop by hop.

The way back is ``travel(x, route.inverse, ...)``, which takes the inverse hops in reverse order. Which ranks
take part depends only on the route and the coordinate, never on the data.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..plan.grid import Coordinate
from ..plan.layout import Hop, Partial, Replicate, Route
from .collective import IDLE, Label, Walk
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


def stand_by(route: Route) -> Walk:
    """Yield ``IDLE`` for each request that other ranks make along the route and back.

    So all ranks of a group take the same number of turns, and issue their requests in the same order.
    """
    for hop in (*route.hops, *route.inverse.hops):
        if not hop.silent:
            yield IDLE
