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
from .matrix import Entry


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank's flat buffer holds which box of a matrix; of no elements where it holds none."""

    entry: Entry
    offset: int
    box: Box

    @property
    def interval(self) -> tuple[int, int]:
        """The elements of the buffer that hold the box."""
        return self.offset, self.offset + self.box.numel


@dataclass(frozen=True, slots=True)
class Virtual:
    """The virtual buffer, whole: every rank's own piece of each matrix at the entry's offset."""

    size: int

    def spots(self, entries: Iterable[Entry], at: Coordinate) -> Iterator[Spot]:
        """What the rank's buffer holds of each matrix, in order."""
        return (Spot(entry, entry.offset, entry.matrix.box(at)) for entry in entries)

    def length(self, entries: Iterable[Entry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return self.size


@dataclass(frozen=True, slots=True)
class Slices:
    """Every rank along ``axis`` holds its slice of the virtual buffer. Boxes are intervals of a flat
    piece."""

    axis: str
    size: int

    def spots(self, entries: Iterable[Entry], at: Coordinate) -> Iterator[Spot]:
        """What the rank's slice holds of each matrix: the slice intersected with the matrix's own
        elements."""
        mine = self._slice(at)
        for entry in entries:
            piece = Box((entry.offset,), (entry.matrix.box(at).numel,))
            held = mine.overlap(piece)
            yield Spot(entry, held.offset[0] - mine.offset[0] if held.numel else 0, held.seen_from(piece))

    def length(self, entries: Iterable[Entry], at: Coordinate) -> int:
        """Elements of the rank's slice."""
        return self._slice(at).numel

    def sends(self, entry: Entry, at: Coordinate, to: Coordinate) -> bool:
        """Slices are disjoint: everyone sends its own."""
        return True

    def holders(self, entry: Entry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold a part of the matrix."""
        step = -(-self.size // at.size(self.axis))
        touching = range(entry.offset // step, (entry.offset + entry.size - 1) // step + 1)
        return touching if axes == (self.axis,) else range(at.size(*axes))

    def _slice(self, at: Coordinate) -> Box:
        return shard_box((self.size,), Shard(0), at[self.axis], at.size(self.axis))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Every rank holds its own piece of each matrix, as the parameter is cut, one after the other."""

    def spots(self, entries: Iterable[Entry], at: Coordinate) -> Iterator[Spot]:
        """What the rank's buffer holds of each matrix, in order."""
        return _in_line((entry, entry.matrix.box(at)) for entry in entries)

    def length(self, entries: Iterable[Entry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return sum(entry.matrix.box(at).numel for entry in entries)

    def sends(self, entry: Entry, at: Coordinate, to: Coordinate) -> bool:
        """Of ranks that hold the same piece, the one that differs from the receiver in no other axis
        sends."""
        return all(at[axis] == to[axis] for axis in at if axis not in entry.matrix.axes)

    def holders(self, entry: Entry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold a part of the matrix: all."""
        return range(at.size(*axes))


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix' workers hold it whole, one matrix after the other; the others hold nothing.

    ``frame`` says whole what: the ``"matrix"``, or the ``"piece"`` of it that tensor parallelism left, flat.
    Of the workers, either the one ``"owner"`` sends to all, or each of the ``"keepers"`` has what it needs
    itself.
    """

    axes: tuple[str, ...]
    frame: Literal["matrix", "piece"]
    workers: Literal["owner", "keepers"]

    def spots(self, entries: Iterable[Entry], at: Coordinate) -> Iterator[Spot]:
        """What the rank's buffer holds of each matrix, in order."""
        return _in_line((entry, self._box(entry, at)) for entry in entries)

    def length(self, entries: Iterable[Entry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return sum(self._box(entry, at).numel for entry in entries)

    def sends(self, entry: Entry, at: Coordinate, to: Coordinate) -> bool:
        """The owner sends to all; a keeper to itself alone."""
        return self.workers == "owner" or at == to

    def holders(self, entry: Entry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold the matrix: its workers."""
        return entry.workers if axes == self.axes else range(at.size(*axes))

    def _box(self, entry: Entry, at: Coordinate) -> Box:
        shape = entry.matrix.shape if self.frame == "matrix" else (entry.matrix.box(at).numel,)
        works = at.position(*self.axes) in entry.workers
        return Box((0,) * len(shape), shape if works else (0,) * len(shape))


Layout = Virtual | Slices | Pieces | Whole


@dataclass(frozen=True, slots=True)
class Exchange:
    """A move of many matrices at once between two layouts, over the group of ``axes``."""

    axes: tuple[str, ...]
    entries: tuple[Entry, ...]
    src: Slices | Pieces | Whole
    dst: Slices | Pieces | Whole

    @property
    def inverse(self) -> Exchange:
        """The same move, the other way."""
        return Exchange(self.axes, self.entries, self.dst, self.src)

    @property
    def silent(self) -> bool:
        """Whether every rank already holds what it needs, so that nothing has to be asked for."""
        if isinstance(self.src, Whole):
            return self.src.workers == "keepers"
        return isinstance(self.src, Pieces) and not any(entry.matrix.cuts for entry in self.entries)

    def partners(self, at: Coordinate) -> tuple[int, ...]:
        """The positions of the group that this rank may have something for, or from; no other one has.

        A rank exchanges with few of thousands, so that not all of them need to be asked.
        """
        out = (self.dst.holders(entry, self.axes, at) for entry in self._held(self.src, at))
        back = (self.src.holders(entry, self.axes, at) for entry in self._held(self.dst, at))
        return tuple(sorted({place for places in (*out, *back) for place in places}))

    def _held(self, layout: Slices | Pieces | Whole, at: Coordinate) -> list[Entry]:
        return [spot.entry for spot in layout.spots(self.entries, at) if spot.box.numel]

    def parcels(self, at: Coordinate, to: Coordinate) -> list[tuple[Spot, Spot, Box]]:
        """What one rank sends to another, in order: from which spot, to which spot, which box."""
        spots = zip(self.src.spots(self.entries, at), self.dst.spots(self.entries, to), strict=True)
        shared = ((here, there, here.box.overlap(there.box)) for here, there in spots if here.box.numel)
        return [
            (here, there, box)
            for here, there, box in shared
            if box.numel and self.src.sends(here.entry, at, to)
        ]


def _in_line(boxes: Iterable[tuple[Entry, Box]]) -> Iterator[Spot]:
    offset = 0
    for entry, box in boxes:
        yield Spot(entry, offset, box)
        offset += box.numel
