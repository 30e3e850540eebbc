"""Matrices packed into flat buffers: the virtual buffer of ZeRO-1 and its master plan, ``DistMeta``.

Knows shapes and intervals, in elements. Refuses to know data and process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .grid import Coordinate, Grid
from .layout import Box, Placement, Route, Shard, run_boxes, shard_box

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One parameter as the plan sees it.

    ``shape`` is the whole matrix; ``cut`` says how the tensor-parallel axis holds it; ``group`` is the
    optimizer's parameter group; ``dtype`` is that of the parameter and ``grad_dtype`` that of its gradient.
    """

    index: int
    name: str
    shape: tuple[int, int]
    cut: Placement
    group: int = 0
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Entry:
    """A matrix's place in a bucket.

    ``offset`` and ``size`` are elements of the flat buffer, the same at every tensor-parallel position:
    ``size`` is the largest piece that any of them holds. ``workers`` are the positions along the bucket's
    axis that orthogonalize the matrix. ``route`` leads from one rank's tensor-parallel piece to the whole
    matrix.
    """

    matrix: Matrix
    offset: int
    size: int
    workers: range
    route: Route

    def box(self, at: Coordinate, axis: str = "tp") -> Box:
        """The rectangle of the whole matrix that the parameter on this rank holds."""
        return shard_box(self.matrix.shape, self.matrix.cut, at[axis], at.size(axis))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank keeps of one matrix: elements ``inside`` of its own tensor, at ``kept`` of its
    storage."""

    entry: Entry
    inside: Interval
    kept: Interval

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.inside[1] - self.inside[0]


@dataclass(frozen=True, slots=True)
class DistMeta:
    """A matrix's entry in the master plan, as one rank reads it (the names are those of Moonshot's proof of
    concept).

    Ranges are half-open, in elements: ``global_range`` in the bucket's flat buffer, ``local_range`` in the
    slice of it that this rank keeps (empty where the rank keeps nothing of the matrix). ``shape`` is this
    rank's tensor-parallel piece of ``global_shape``; ``tp_dim`` is None where the axis does not cut the
    matrix.
    """

    name: str
    shape: tuple[int, ...]
    global_shape: tuple[int, int]
    tp_dim: int | None
    buffer_idx: int
    bucket_idx: int
    global_range: Interval
    local_range: Interval


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together, and the three routes of their flat buffer along one axis.

    ``storage`` is how the axis holds gradient, momentum and update between steps. ``gradient`` leads from the
    gradients a step is handed to storage; ``compute`` from storage to where matrices are whole along the
    axis; ``parameter`` from storage to the parameters as the model keeps them. ``size`` is in elements, a
    multiple of the ranks on the axis; ``summands`` is how many local gradients the gradient route adds up.
    """

    index: int
    buffer: int
    axis: str
    size: int
    entries: tuple[Entry, ...]
    storage: Placement
    gradient: Route
    compute: Route
    parameter: Route
    summands: int = 1

    def kept(self, at: Coordinate) -> Interval:
        """The interval of the flat buffer that this rank keeps between steps."""
        box = shard_box((self.size,), self.storage, at[self.axis], at.size(self.axis))
        return box.offset[0], box.offset[0] + box.shape[0]

    def holdings(self, at: Coordinate) -> tuple[Holding, ...]:
        """What this rank keeps of each matrix, one piece an entry, empty ones included.

        An interval intersection: the matrix's own elements in the buffer against the slice this rank keeps.
        """
        start, stop = self.kept(at)
        return tuple(_holding(entry, start, stop, at) for entry in self.entries)

    def dist_meta(self, at: Coordinate) -> tuple[DistMeta, ...]:
        """The bucket's part of the master plan, as this rank reads it."""
        return tuple(_dist_meta(self, holding, at) for holding in self.holdings(at))

    def works_on(self, entry: Entry, at: Coordinate) -> bool:
        """Whether this rank orthogonalizes the matrix. It follows from the coordinate, never from data."""
        return at[self.axis] in entry.workers

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no matrix, at the tensor-parallel position that holds
        most."""
        return self.size - sum(entry.size for entry in self.entries)


def _holding(entry: Entry, start: int, stop: int, at: Coordinate) -> Holding:
    numel = entry.box(at).numel
    low = max(0, min(start - entry.offset, numel))
    high = max(low, min(stop - entry.offset, numel))
    if low == high:
        return Holding(entry, (0, 0), (0, 0))
    return Holding(entry, (low, high), (entry.offset + low - start, entry.offset + high - start))


def _dist_meta(bucket: Bucket, holding: Holding, at: Coordinate) -> DistMeta:
    entry, cut = holding.entry, holding.entry.matrix.cut
    return DistMeta(
        name=entry.matrix.name,
        shape=entry.box(at).shape,
        global_shape=entry.matrix.shape,
        tp_dim=cut.dim if isinstance(cut, Shard) else None,
        buffer_idx=bucket.buffer,
        bucket_idx=bucket.index,
        global_range=(entry.offset, entry.offset + entry.box(at).numel),
        local_range=holding.kept,
    )


def holding_boxes(holding: Holding, at: Coordinate) -> tuple[Box, ...]:
    """The rectangles of the whole matrix that a piece covers, in the order of its elements."""
    frame = holding.entry.box(at)
    if not holding.numel:
        return ()
    shape = (frame.shape[0], frame.shape[1])
    return tuple(box.shifted(frame.offset) for box in run_boxes(shape, *holding.inside))


def largest_piece(matrix: Matrix, parts: int) -> int:
    """Elements of the largest piece of ``matrix`` that any of ``parts`` tensor-parallel ranks holds."""
    return max(shard_box(matrix.shape, matrix.cut, position, parts).numel for position in range(parts))


def fill_buckets(matrices: Sequence[Matrix], grid: Grid, bucket_bytes: int) -> Iterator[tuple[Matrix, ...]]:
    """Cut ``matrices``, in order, into runs that share group and dtypes and weigh at most ``bucket_bytes``.

    Bytes are those of the gradient, per tensor-parallel rank. A matrix heavier than the cap gets a bucket of
    its own.
    """
    run: list[Matrix] = []
    weight = 0
    for matrix in sorted(matrices, key=_buffer_key):
        heavy = largest_piece(matrix, grid.size("tp")) * matrix.grad_dtype.itemsize
        if run and (_buffer_key(matrix)[:-1] != _buffer_key(run[0])[:-1] or weight + heavy > bucket_bytes):
            yield tuple(run)
            run, weight = [], 0
        run.append(matrix)
        weight += heavy
    if run:
        yield tuple(run)


def _buffer_key(matrix: Matrix) -> tuple[int, str, str, int]:
    return matrix.group, str(matrix.dtype), str(matrix.grad_dtype), matrix.index


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple, at least one of them."""
    return max(1, math.ceil(size / multiple)) * multiple
