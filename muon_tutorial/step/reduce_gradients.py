"""Phase 1: average gradients over dp. Each rank keeps the part that it stores between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.hop_collectives import view
from ..engine.travel import all_reduce, travel
from ..plan.bucket import fill_buckets
from ..plan.grid import Coordinate
from ..plan.strategies import ROUND_BYTES
from .parameter_state import gradient_dtype, local_gradient, local_part
from .rank_bucket import RankBucket
from .unreduced_gradient import UnreducedDTensor, UnreducedGradient, unmarked


def reduce_gradients(bucket: RankBucket, flat: Tensor | None = None) -> Walk:
    """Average the ranks' gradients, and return the part that this rank stores, flat.

    For ``zero1`` the bucket's gradient route is a reduce_scatter over dp or, if slices differ in length, a
    reduce to the rank of each slice (one all_to_all if the slices are small). Pass gradients that
    ``pack_gradients`` has packed already as ``flat``. All ranks of the grid must run it.
    """
    flat = pack_gradients(bucket) if flat is None else flat
    phase = "gradient reduce" if bucket.is_owned else "gradient reduce_scatter"
    summed = yield from travel(flat, bucket.plan.gradient, bucket.at, Label(phase, bucket.name))
    return summed.div_(bucket.plan.summands) if bucket.plan.summands > 1 else summed


def pack_gradients(bucket: RankBucket) -> Tensor:
    """Return this rank's gradients, flat, [bucket.model_numel], with zeros for missing gradients."""
    flat = torch.zeros(bucket.model_numel, dtype=bucket.plan.gradient.dtype, device=bucket.device)
    for matrix in bucket.matrices:
        grad, piece = local_gradient(matrix.parameter.param), view(flat, matrix.model_slice)
        if grad is not None and piece.numel():  # FSDP2's empty shards may have any empty shape
            piece.copy_(grad[matrix.place])
    return flat


def average_others(
    params: Sequence[Tensor], at: Coordinate, phase: str = "other gradients all_reduce"
) -> Walk:
    """Average the gradients of parameters outside the plan over dp, in place.

    The gradients travel in flat buffers of at most 25 MB. A missing gradient counts as zero. All ranks of the
    grid must run it.
    """
    for run in _runs(params):
        for param in run:
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=gradient_dtype(param))
        grads = [grad for param in run if (grad := local_gradient(param)) is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        total = yield from all_reduce(flat, "dp", at, Label(phase))
        means = (total / at.size("dp")).split([grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view(grad.shape))
        for param in run:  # an averaged gradient may be clipped, so it becomes an ordinary tensor
            if isinstance(param.grad, UnreducedGradient | UnreducedDTensor):
                param.grad = unmarked(param.grad)


def _runs(params: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut a sequence into runs of at most 25 MB, each with a single gradient dtype."""
    ordered = sorted(params, key=lambda param: str(gradient_dtype(param)))
    for dtype, run in groupby(ordered, gradient_dtype):
        same = list(run)
        weights = [local_part(param).numel() * dtype.itemsize for param in same]
        yield from fill_buckets(same, weights, ROUND_BYTES)
