"""Phases 2 to 6: every matrix travels to where it is whole, meets Newton–Schulz there, and travels back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..engine.collective import Label, Walk
from ..engine.hops import view
from ..engine.travel import stand_by, travel
from ..newton_schulz import zeropower_via_newtonschulz
from .rank_bucket import RankBucket


def orthogonalize(bucket: RankBucket, inputs: Tensor) -> Walk:
    """From the Newton–Schulz inputs that this rank stores to the updates that it stores, both flat.

    Must be walked by all ranks of the grid. A rank that does not work on a matrix stands by.
    """
    there, back = (Label(phase, bucket.name) for phase in bucket.plan.phases)
    gathered = yield from travel(inputs, bucket.plan.compute, bucket.at, there)  # 2: dp gather
    updates = torch.zeros_like(gathered)
    for matrix in bucket.matrices:
        route = matrix.entry.route
        if matrix.work is None:
            yield from stand_by(route)
            continue
        piece = view(gathered, matrix.work)
        whole = yield from travel(piece, route, bucket.at, Label("tp gather", matrix.name))  # 3
        with record_function(f"Newton-Schulz of {matrix.name}"):
            whole = newton_schulz_update(whole, matrix.sides, matrix.parameter.group)  # 4
        piece = yield from travel(whole, route.inverse, bucket.at, Label("tp slice", matrix.name))  # 5
        view(updates, matrix.work).copy_(piece)
    return (yield from travel(updates, bucket.plan.compute.inverse, bucket.at, back))  # 6: dp slice


def newton_schulz_update(whole: Tensor, sides: Sequence[int], group: Mapping[str, Any]) -> Tensor:
    """Newton–Schulz with a group's settings, on a whole matrix seen as ``sides``; the shape is kept.

    ``sides`` are [rows, columns], or [matrices, rows, columns] for a stack of them.
    """
    update = zeropower_via_newtonschulz(
        whole.reshape(*sides), group["ns_steps"], group["ns_coefficients"], group["eps"]
    )
    return update.reshape(whole.shape)
