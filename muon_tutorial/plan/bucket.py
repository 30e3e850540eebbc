"""Matrices packed into flat buffers: the virtual buffer of ZeRO-1 and its master plan, ``DistMeta``.

Intervals count elements and exclude their end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

import torch

from .exchange import BufferSlice, Layout
from .grid import Coordinate
from .layout import Box, Route, run_boxes
from .matrix import BucketEntry, Matrix

T = TypeVar("T")
Interval = tuple[int, int]
GRAM_DTYPE = torch.float32
"""The dtype in which Gram matrices are summed, because the iteration on them diverges in bf16."""


@dataclass(frozen=True, slots=True)
class DistMeta:
    """A matrix's entry in the master plan for one rank. The names come from Moonshot's proof of concept.

    Ranges count elements and exclude their end. ``global_range`` is in the bucket's flat buffer.
    ``local_range`` is in this rank's slice of that buffer, and is empty if the matrix is not in the slice.
    ``shape`` is the shape of this rank's tensor-parallel piece, ``global_shape`` the shape of the whole
    matrix. ``tp_dim`` is the dimension that tp cuts, or None.
    """

    name: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    tp_dim: int | None
    buffer_idx: int
    bucket_idx: int
    global_range: Interval
    local_range: Interval


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together: three layouts of their flat buffer, and three routes between them.

    In ``model_layout``, the model holds gradients and parameters. In ``storage_layout``, each rank stores its
    part of the bucket between steps. In ``compute_layout``, workers hold the matrices that they
    orthogonalize. The route ``gradient`` leads from the model's layout to storage, ``compute`` from storage
    to the compute layout and back, and ``parameter`` from storage to the model's layout.

    An entry's workers are positions in the group over ``axes``. ``summands`` is how many local gradients the
    gradient route sums. Buckets of one ``round`` run at the same time, so that their owners all work.
    ``phases`` are the names of the compute route and of its way back.
    """

    index: int = field(default=0, kw_only=True)
    buffer: int = field(default=0, kw_only=True)
    axes: tuple[str, ...]
    entries: tuple[BucketEntry, ...]
    model_layout: Layout
    storage_layout: Layout
    compute_layout: Layout
    gradient: Route
    compute: Route
    parameter: Route
    summands: int = 1
    round: int = 0
    phases: tuple[str, str] = ("dp gather", "dp slice")

    def length(self, layout: Layout, at: Coordinate) -> int:
        """Return the number of elements in this rank's flat buffer under a layout."""
        return layout.length(self.entries, at)

    def buffer_slices(self, layout: Layout, at: Coordinate) -> tuple[BufferSlice, ...]:
        """Return one slice per entry: the matrix's part in this rank's flat buffer under a layout."""
        return tuple(layout.buffer_slices(self.entries, at))

    def stored_shards(self, at: Coordinate) -> tuple[BufferSlice, ...]:
        """Return the part of each matrix that this rank stores, one per entry, including empty parts."""
        return self.buffer_slices(self.storage_layout, at)

    def work_slices(self, at: Coordinate) -> tuple[BufferSlice | None, ...]:
        """For each entry, return the box of the buffer that this rank orthogonalizes, or None."""
        found: list[BufferSlice | None] = []
        for worked in self.buffer_slices(self.compute_layout, at):
            if len(worked.box.shape) == 1:  # a flat piece, which the worker has whole
                worked = replace(worked, box=worked.entry.matrix.box(at))
            found.append(worked if self.works_on(worked.entry, at) else None)
        return tuple(found)

    def works_on(self, entry: BucketEntry, at: Coordinate) -> bool:
        return at.position(*self.axes) in entry.workers

    def gram_bytes(self, at: Coordinate) -> int:
        """Return the bytes of the fp32 Gram matrices that this rank sums with its tp group."""
        summed = (entry.gram.elements for entry in self.entries if entry.gram and self.works_on(entry, at))
        return sum(summed) * GRAM_DTYPE.itemsize

    def dist_meta(self, at: Coordinate) -> tuple[DistMeta, ...]:
        """Return the bucket's part of the master plan for this rank."""
        pairs = zip(self.buffer_slices(self.model_layout, at), self.stored_shards(at), strict=True)
        return tuple(
            DistMeta(
                name=piece.entry.matrix.name,
                shape=piece.box.shape,
                global_shape=piece.entry.matrix.shape,
                tp_dim=None if (cut := piece.entry.matrix.cut("tp")) is None else cut.dim,
                buffer_idx=self.buffer,
                bucket_idx=self.index,
                global_range=piece.interval,
                local_range=shard.interval,
            )
            for piece, shard in pairs
        )

    def padding(self, at: Coordinate) -> int:
        """Return how many elements of this rank's buffer belong to no matrix (in the model's layout)."""
        shard = sum(piece.box.numel for piece in self.buffer_slices(self.model_layout, at))
        return self.length(self.model_layout, at) - shard


def matrix_boxes(shard: BufferSlice, at: Coordinate) -> tuple[Box, ...]:
    """Return the boxes of the whole matrix, [rows, columns], that a shard covers, in the shard's order."""
    offset, shape = flat_frame(shard.entry.matrix, at)
    return tuple(box.shifted(offset) for box in run_boxes(shape, *shard.in_piece))


def parameter_boxes(shard: BufferSlice, at: Coordinate) -> tuple[Box, ...]:
    """Return the boxes of the parameter that a shard covers, in the shard's order."""
    piece = shard.entry.matrix.box(at)
    boxes = (box.shifted(piece.offset) for box in run_boxes(piece.shape, *shard.in_piece))
    return tuple(part for box in boxes for part in shard.entry.matrix.in_parameter(box))


def flat_frame(matrix: Matrix, at: Coordinate) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the offset and shape (row, column) of the rank's piece. Dimensions after rows are columns."""
    box, lead = matrix.box(at), leading(matrix)
    if not box.numel:
        return (0, 0), (0, 0)
    inner = math.prod(box.shape[lead + 2 :])
    shape = box.shape[lead], math.prod(box.shape[lead + 1 :])
    return (box.offset[lead], box.offset[lead + 1] * inner), shape


def leading(matrix: Matrix) -> int:
    """Return the number of dimensions before rows and columns; these dimensions number the matrices."""
    return len(matrix.shape) - 2 if matrix.sides == matrix.shape[-2:] else 0


def fill_buckets(run: Sequence[T], weights: Sequence[int], round_bytes: int) -> Iterator[tuple[T, ...]]:
    """Split a sequence into runs of at most ``round_bytes``. A heavier item forms a run alone."""
    filled: list[T] = []
    load = 0
    for each, weight in zip(run, weights, strict=True):
        if filled and load + weight > round_bytes:
            yield tuple(filled)
            filled, load = [], 0
        filled.append(each)
        load += weight
    if filled:
        yield tuple(filled)


def by_buffer(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Return the matrices of each flat buffer. Matrices with the same group and dtypes share a buffer."""

    def kind(it: Matrix) -> tuple[int, str, str]:
        return it.group, str(it.dtype), str(it.grad_dtype)

    ordered = sorted(matrices, key=lambda it: (*kind(it), it.index))
    return [list(run) for _, run in groupby(ordered, kind)]


def padded(size: int, multiple: int) -> int:
    """Round ``size`` up to a multiple of ``multiple``; the result is at least ``multiple``."""
    return max(1, math.ceil(size / multiple)) * multiple
