"""Clips gradients by their common norm. Every element counts once, even if several ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from ..engine.collective import Label, Walk
from ..engine.travel import all_reduce
from ..plan.exchange import SlicedBuffer
from ..plan.grid import Coordinate
from .momentum import stored_gradient
from .parameter_state import local_gradient
from .rank_bucket import RankBucket

Share = tuple[Tensor, int]
"""A part of a gradient, and the number of ranks that hold the same elements."""


def clip_gradients(
    buckets: Sequence[RankBucket],
    averaged: Mapping[int, Tensor],
    rest: Sequence[Tensor],
    max_norm: float,
    device: torch.device,
    at: Coordinate,
) -> Walk:
    """Scale gradients so that their common norm is at most ``max_norm``; return the old norm and the scale.

    ``averaged`` maps a bucket's index to its flat gradient, which is scaled here. Gradients of other buckets
    stay in the model, and the step multiplies them by the scale. ``rest`` are the parameters of another
    optimizer, whose gradients are also scaled here. All ranks of the grid must run it.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part, copies in (*_bucket_shares(buckets, averaged), *_rest_shares(rest, at)):
        total += part.double().square().sum() / copies
    for axis in at.grid.axes:
        total = yield from all_reduce(total, axis, at, Label("gradient norm"))
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensor in (*averaged.values(), *(grad for grad, _ in _rest_shares(rest, at))):
        tensor.mul_(scale.to(tensor.dtype))
    return norm, scale


def _bucket_shares(buckets: Sequence[RankBucket], averaged: Mapping[int, Tensor]) -> Iterable[Share]:
    for bucket in buckets:
        flat = averaged.get(bucket.plan.index)
        storage = bucket.plan.storage_layout
        sliced = (storage.axis,) if isinstance(storage, SlicedBuffer) else ()
        for matrix in bucket.matrices:
            pieces = bucket.at.size(*matrix.entry.matrix.axes, *sliced)
            yield stored_gradient(bucket, matrix, flat), bucket.at.grid.world_size // pieces


def _rest_shares(rest: Sequence[Tensor], at: Coordinate) -> Iterable[Share]:
    for param in rest:
        grad = local_gradient(param)
        if grad is not None:
            real = torch.view_as_real(grad) if grad.is_complex() else grad
            yield real, at.grid.world_size // _pieces(param, at)


def _pieces(param: Tensor, at: Coordinate) -> int:
    """Return into how many pieces a parameter is cut. A DTensor may lie on another mesh than Muon's."""
    if not isinstance(param, DTensor):
        cut = getattr(param, "partition_dim", None)
        return 1 if cut is None or cut < 0 else at.size("tp")
    return math.prod(param.device_mesh.size(dim) for dim in sharded_dims(param))


def sharded_dims(param: DTensor) -> list[int]:
    """Return the mesh dimensions that cut a DTensor."""
    # FSDP2 on top of tensor parallelism makes a _StridedShard, whose is_shard() is False.
    kinds = enumerate(param.placements)
    return [dim for dim, it in kinds if it.is_shard() or isinstance(it, _StridedShard)]
