"""Small generators that walk a plan and *ask* for collectives. Communication never computes.

``gather`` and ``scatter`` are each other's mirror; ``orthogonalize`` is a gather, Newton–Schulz where a
matrix is whole, and a scatter. Who takes part follows from the route and the coordinate, never from the data
at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..plan.bucket import Bucket
from ..plan.grid import Coordinate
from ..plan.layout import Route
from ..plan.matrix import BucketEntry
from .collective import IDLE, Label, Walk
from .hops import asks, take, view

NewtonSchulz = Callable[[BucketEntry, Tensor], Tensor]


def gather(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """Walk the route out: from what storage holds to what the computation needs."""
    for hop in route.hops:
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def scatter(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """Walk the route back: the same hops in opposite order, each the other way."""
    for hop in reversed(route.hops):
        x = yield from take(x, hop.inverse, route.dtype, at, label)
    return x


def orthogonalize(x: Tensor, bucket: Bucket, at: Coordinate, newton_schulz: NewtonSchulz) -> Walk:
    """From the Newton–Schulz inputs that storage keeps to the updates that it keeps, both flat.

    dp gather → tp gather → Newton–Schulz → tp slice → dp slice, for the bucket's own routes.
    """
    out, back = (Label(phase, f"bucket {bucket.index}") for phase in bucket.phases)
    inputs = yield from gather(x, bucket.compute, at, out)
    updates = torch.zeros_like(inputs)
    for entry, work in zip(bucket.entries, bucket.work_slices(at), strict=True):
        if work is None:
            yield from stand_by(entry.route)
        else:
            name = entry.matrix.name
            matrix = yield from gather(view(inputs, work), entry.route, at, Label("tp gather", name))
            matrix = newton_schulz(entry, matrix)
            piece = yield from scatter(matrix, entry.route, at, Label("tp slice", name))
            view(updates, work).copy_(piece)
    return (yield from scatter(updates, bucket.compute, at, back))


def stand_by(route: Route) -> Walk:
    """Empty turns, as many as the route out and back would ask for, so that the order stays the same."""
    for hop in (*route.hops, *route.inverse.hops):
        if asks(hop):
            yield IDLE
