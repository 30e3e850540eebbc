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
from .rank_bucket import RankBucket, RankMatrix


def orthogonalize(bucket: RankBucket, inputs: Tensor) -> Walk:
    """From the Newton–Schulz inputs that this rank stores to the updates that it stores, both flat.

    Must be walked by all ranks of the grid. A rank that does not work on a matrix stands by.
    """
    there, back = (bucket.label(phase) for phase in bucket.plan.phases)
    gathered = yield from travel(inputs, bucket.plan.compute, bucket.at, there)  # 2: dp gather
    updates = torch.zeros_like(gathered)
    for matrix in bucket.matrices:
        if matrix.work is None:
            yield from stand_by(matrix.entry.route)
        else:
            piece = yield from _orthogonalize_one(bucket, matrix, view(gathered, matrix.work))
            view(updates, matrix.work).copy_(piece)
    return (yield from travel(updates, bucket.plan.compute.inverse, bucket.at, back))  # 6: dp slice


def _orthogonalize_one(bucket: RankBucket, matrix: RankMatrix, piece: Tensor) -> Walk:
    """From this rank's piece of a matrix, [its rows, its columns], to its piece of the update."""
    name, route = matrix.entry.matrix.name, matrix.entry.route
    whole = yield from travel(piece, route, bucket.at, Label("tp gather", name))  # 3
    with record_function(f"Newton-Schulz of {name}"):
        update = newton_schulz_update(whole, matrix.entry.matrix.sides, matrix.parameter.group)  # 4
    return (yield from travel(update, route.inverse, bucket.at, Label("tp slice", name)))  # 5


def newton_schulz_update(whole: Tensor, sides: Sequence[int], group: Mapping[str, Any]) -> Tensor:
    """Newton–Schulz with a group's settings, on a whole matrix seen as ``sides``; the shape is kept.

    ``sides`` are [rows, columns], or [matrices, rows, columns] for a stack of them.
    """
    update = zeropower_via_newtonschulz(
        whole.reshape(*sides), group["ns_steps"], group["ns_coefficients"], group["eps"]
    )
    return update.reshape(whole.shape)
