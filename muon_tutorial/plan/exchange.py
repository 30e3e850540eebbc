"""Where flat buffers hold what, and the packed move between two such layouts.

A layout says which box of each matrix a rank's buffer holds, and where. An exchange moves many matrices at
once between two layouts: what a rank sends to another is the intersection of the box it holds with the box
the other needs. The way back is the same with the layouts swapped. Boxes are computed on demand, never
stored for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .grid import Coordinate
from .layout import Box, Shard, shard_box
from .matrix import BucketEntry


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Where a rank's flat buffer holds which box of a matrix; of no elements where it holds none."""

    entry: BucketEntry
    offset: int
    box: Box

    @property
    def interval(self) -> tuple[int, int]:
        """The elements of the buffer that hold the box."""
        return self.offset, self.offset + self.box.numel


@dataclass(frozen=True, slots=True)
class VirtualBuffer:
    """The virtual buffer, whole: every rank's own piece of each matrix at the entry's offset."""

    size: int

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's buffer holds of each matrix, in order."""
        return (BufferSlice(entry, entry.offset, entry.matrix.box(at)) for entry in entries)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return self.size


@dataclass(frozen=True, slots=True)
class SlicedBuffer:
    """Every rank along ``axis`` holds its slice of the virtual buffer. Boxes are intervals of a flat
    piece."""

    axis: str
    size: int

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's slice holds of each matrix: the slice intersected with the matrix's own
        elements."""
        start = self._slice(at).offset[0]
        for entry in entries:
            box = self.box(entry, at)
            yield BufferSlice(entry, entry.offset + box.offset[0] - start if box.numel else 0, box)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """The interval of the matrix' flat piece that the rank's slice holds."""
        piece = Box((entry.offset,), (entry.matrix.box(at).numel,))
        return self._slice(at).overlap(piece).seen_from(piece)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Elements of the rank's slice."""
        return self._slice(at).numel

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        """SlicedBuffer are disjoint: everyone sends its own."""
        return True

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold a part of the matrix."""
        step = -(-self.size // at.size(self.axis))
        touching = range(entry.offset // step, (entry.offset + entry.size - 1) // step + 1)
        return touching if axes == (self.axis,) else range(at.size(*axes))

    def _slice(self, at: Coordinate) -> Box:
        return shard_box((self.size,), Shard(0), at[self.axis], at.size(self.axis))


@dataclass(frozen=True, slots=True)
class LocalShards:
    """Every rank holds its own piece of each matrix, as the parameter is cut, one after the other."""

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's buffer holds of each matrix, in order."""
        return _in_line((entry, self.box(entry, at)) for entry in entries)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """The box of the matrix that the rank holds."""
        return entry.matrix.box(at)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return sum(entry.matrix.box(at).numel for entry in entries)

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        """Of ranks that hold the same piece, the one that differs from the receiver in no other axis
        sends."""
        return all(at[axis] == to[axis] for axis in at if axis not in entry.matrix.axes)

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold a part of the matrix: all."""
        return range(at.size(*axes))


@dataclass(frozen=True, slots=True)
class WholeMatrices:
    """A matrix' workers hold it whole, one matrix after the other; the others hold nothing.

    ``frame`` says whole what: the ``"matrix"``, or the ``"piece"`` of it that tensor parallelism left, flat.
    Of the workers, either the one ``"owner"`` sends to all, or each of the ``"keepers"`` has what it needs
    itself.
    """

    axes: tuple[str, ...]
    frame: Literal["matrix", "piece"]
    workers: Literal["owner", "keepers"]

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's buffer holds of each matrix, in order."""
        return _in_line((entry, self.box(entry, at)) for entry in entries)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return sum(self.box(entry, at).numel for entry in entries)

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        """The owner sends to all; a keeper to itself alone."""
        return self.workers == "owner" or at == to

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold the matrix: its workers."""
        return entry.workers if axes == self.axes else range(at.size(*axes))

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """The whole of it at a worker, nothing elsewhere."""
        shape = entry.matrix.shape if self.frame == "matrix" else (entry.matrix.box(at).numel,)
        works = at.position(*self.axes) in entry.workers
        return Box((0,) * len(shape), shape if works else (0,) * len(shape))


Layout = VirtualBuffer | SlicedBuffer | LocalShards | WholeMatrices


Parcels = dict[int, list[tuple[BufferSlice, Box]]]
"""By position in a group: spots of one's own buffer, and the box of each that travels."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A move of many matrices at once between two layouts, over the group of ``axes``."""

    axes: tuple[str, ...]
    entries: tuple[BucketEntry, ...]
    src: SlicedBuffer | LocalShards | WholeMatrices
    dst: SlicedBuffer | LocalShards | WholeMatrices

    @property
    def inverse(self) -> Exchange:
        """The same move, the other way."""
        return Exchange(self.axes, self.entries, self.dst, self.src)

    @property
    def silent(self) -> bool:
        """Whether every rank already holds what it needs, so that nothing has to be asked for."""
        if isinstance(self.src, WholeMatrices):
            return self.src.workers == "keepers"
        return isinstance(self.src, LocalShards) and not any(entry.matrix.cuts for entry in self.entries)

    def leaving(self, at: Coordinate) -> Parcels:
        """What this rank sends: by position in the group, from which spots which boxes, in order."""
        parcels: Parcels = {}
        for here in self._spots(self.src, at):
            for place in self.dst.holders(here.entry, self.axes, at):
                to = at.peer(place, *self.axes)
                if self.src.sends(here.entry, at, to):
                    _add(parcels, place, here, self.dst.box(here.entry, to))
        return parcels

    def coming(self, at: Coordinate) -> Parcels:
        """What this rank receives: by position in the group, to which spots which boxes, in order."""
        parcels: Parcels = {}
        for here in self._spots(self.dst, at):
            for place in self.src.holders(here.entry, self.axes, at):
                other = at.peer(place, *self.axes)
                if self.src.sends(here.entry, other, at):
                    _add(parcels, place, here, self.src.box(here.entry, other))
        return parcels

    def _spots(self, layout: SlicedBuffer | LocalShards | WholeMatrices, at: Coordinate) -> list[BufferSlice]:
        """The spots that hold anything: a rank shares few matrices with few ranks, of thousands."""
        return [spot for spot in layout.buffer_slices(self.entries, at) if spot.box.numel]


def _add(parcels: Parcels, place: int, here: BufferSlice, there: Box) -> None:
    box = here.box.overlap(there)
    if box.numel:
        parcels.setdefault(place, []).append((here, box))


def _in_line(boxes: Iterable[tuple[BucketEntry, Box]]) -> Iterator[BufferSlice]:
    offset = 0
    for entry, box in boxes:
        yield BufferSlice(entry, offset, box)
        offset += box.numel
