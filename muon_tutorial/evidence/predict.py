"""What a plan will cost, from the plan alone: one rank walked without data, on any number of ranks.

The walk is the engine's own, over tensors of the meta device, which have sizes and no values. So a prediction
costs a few milliseconds a bucket and next to no memory, whether the grid has 4 ranks or 16,384.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.order import pipeline
from ..engine.travel import gather, orthogonalize
from ..plan.bucket import Bucket
from ..plan.grid import Coordinate
from ..plan.layout import Hop, Partial, Replicate, Route
from ..plan.matrix import BucketEntry as BucketEntry
from ..plan.strategies import BUCKET_BYTES, Plan
from ..worlds.shadow import requests_of
from .ledger import Ledger, entry_of

Rest = Sequence[tuple[int, torch.dtype]]


def predict(plan: Plan, at: Coordinate, *, rest: Rest | None = None, window: int = 1) -> Ledger:
    """The ledger of one rank's step, as counted in a real run, without running it.

    Args:
        rest: elements and dtype of each parameter that AdamW steps, where ``ready_gradients`` averages them
            too (``MuonWithAdamW``); None where there are none and ``step`` readies gradients by itself.
        window: how many buckets may be in flight; it changes the order, never the sums.
    """
    return Ledger([entry_of(request, at) for request in requests_of(_step(plan, at, rest, window))])


def _step(plan: Plan, at: Coordinate, rest: Rest | None, window: int) -> Walk:
    yield from _flags(plan, at, len(rest or ()))
    if rest is None:
        yield from pipeline((_whole_bucket(bucket, at) for bucket in plan.buckets), window)
        return
    yield from pipeline((_reduce(bucket, at) for bucket in plan.buckets), window)
    if plan.expects == "local" and at.size("dp") > 1:
        yield from _average(rest, at)
    yield from pipeline((_update(bucket, at) for bucket in plan.buckets), window)


def _flags(plan: Plan, at: Coordinate, others: int) -> Walk:
    """Before each step ranks agree on which gradients exist and which are finite: two numbers a parameter."""
    params = {entry.matrix.param for bucket in plan.buckets for entry in bucket.entries}
    flags = _empty(2 * (len(params) + others), torch.float32)
    for axis in at.grid.axes:
        if at.size(axis) > 1:
            yield from gather(flags, _sum_over(axis, flags), at, Label("gradient flags"))


def _average(rest: Rest, at: Coordinate) -> Walk:
    for numel, dtype in _runs(rest):
        flat = _empty(numel, dtype)
        yield from gather(flat, _sum_over("dp", flat), at, Label("other gradients all_reduce"))


def _runs(rest: Rest) -> list[tuple[int, torch.dtype]]:
    """The flat buffers in which the rest is averaged: of one dtype, at most 25 MB each."""
    runs: list[tuple[int, torch.dtype]] = []
    for numel, dtype in sorted(rest, key=lambda one: str(one[1])):
        if runs and runs[-1][1] == dtype and (runs[-1][0] + numel) * dtype.itemsize <= BUCKET_BYTES:
            numel += runs.pop()[0]
        runs.append((numel, dtype))
    return runs


def _whole_bucket(bucket: Bucket, at: Coordinate) -> Walk:
    yield from _reduce(bucket, at)
    yield from _update(bucket, at)


def _reduce(bucket: Bucket, at: Coordinate) -> Walk:
    flat = _empty(bucket.length(bucket.model_layout, at), bucket.gradient.dtype)
    return (yield from gather(flat, bucket.gradient, at, _label("gradient reduce_scatter", bucket)))


def _update(bucket: Bucket, at: Coordinate) -> Walk:
    stored = bucket.length(bucket.storage_layout, at)
    yield from orthogonalize(_empty(stored, bucket.compute.dtype), bucket, at, _as_it_is)
    parameter = _empty(stored, bucket.parameter.dtype)
    yield from gather(parameter, bucket.parameter, at, _label("parameter all_gather", bucket))


def _as_it_is(entry: BucketEntry, matrix: Tensor) -> Tensor:
    return matrix


def _sum_over(axis: str, tensor: Tensor) -> Route:
    return Route((Hop(axis, Partial(), Replicate(), tuple(tensor.shape)),), tensor.dtype)


def _empty(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


def _label(phase: str, bucket: Bucket) -> Label:
    return Label(phase, f"bucket {bucket.index}")
