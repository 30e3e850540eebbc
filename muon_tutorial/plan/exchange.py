"""Layouts of flat buffers, and the packed exchange of many matrices between two layouts.

A layout says which box of each matrix a rank's buffer holds, and where. An exchange moves many matrices at
once from one layout to another. Each rank sends every other rank the intersection of two boxes: the box that
the sender holds, and the box that the receiver needs. For the way back, the two layouts are swapped. Boxes
are computed on demand, because the boxes of all ranks would take gigabytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal

from .grid import Coordinate
from .layout import FEW_RANKS, Box, Owned, Shard, shard_box
from .matrix import BucketEntry


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """The box of a matrix that a rank's flat buffer holds, beginning at ``offset``. It may be empty.

    If the buffer is a slice, whose ends may lie inside a piece, the box is an interval of the flat piece.
    """

    entry: BucketEntry
    offset: int
    box: Box

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def interval(self) -> tuple[int, int]:
        """The box's elements in the buffer."""
        return self.offset, self.offset + self.numel

    @property
    def in_piece(self) -> tuple[int, int]:
        """Where the box lies in the rank's flat piece of the matrix: an interval of it, or all of it."""
        start = self.box.offset[0] if len(self.box.shape) == 1 else 0
        return (start, start + self.numel) if self.numel else (0, 0)


class Layout:
    """Says which box of each matrix a rank's flat buffer holds, and where: by default, one after the other.

    Exchanges use ``holders``, ``senders`` and ``sends``. No exchange begins or ends at a ``VirtualBuffer``.
    """

    __slots__ = ()

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """Return the box of the matrix that the rank holds. It may be empty."""
        return entry.matrix.box(at)

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """Yield the part of each matrix in the rank's buffer, in order."""
        offset = 0
        for entry in entries:
            box = self.box(entry, at)
            yield BufferSlice(entry, offset, box)
            offset += box.numel

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Return the number of elements in the rank's buffer."""
        return sum(self.box(entry, at).numel for entry in entries)

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Return the positions, in the rank's group over ``axes``, that may hold a part of the matrix."""
        return range(at.size(*axes))

    def senders(self, entry: BucketEntry, axes: tuple[str, ...], to: Coordinate) -> Iterable[int]:
        """Return the holders that may send to rank ``to``."""
        return self.holders(entry, axes, to)

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        """Whether rank ``at`` sends its part of the matrix to rank ``to``."""
        return True


@dataclass(frozen=True, slots=True)
class VirtualBuffer(Layout):
    """The whole virtual buffer: every rank holds its piece of each matrix at the entry's offset."""

    size: int

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        return (BufferSlice(entry, entry.offset, entry.matrix.box(at)) for entry in entries)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        return self.size


@dataclass(frozen=True)  # no slots, because cached_property needs a __dict__
class SlicedBuffer(Layout):
    """Every rank along ``axis`` holds its slice of the virtual buffer. Boxes are intervals of a flat piece.

    Slices have equal lengths by default. Otherwise ``sizes`` lists the lengths, or the position ``owner`` has
    the whole buffer.
    """

    axis: str
    size: int
    sizes: tuple[int, ...] | None = None
    owner: int | None = None

    @property
    def cut(self) -> Shard | Owned:
        return Shard(0, self.sizes) if self.owner is None else Owned(self.owner)

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        start = self._slice(at).offset[0]
        for entry in entries:
            box = self.box(entry, at)
            yield BufferSlice(entry, entry.offset + box.offset[0] - start if box.numel else 0, box)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        piece = Box((entry.offset,), (entry.matrix.box(at).numel,))
        return self._slice(at).overlap(piece).seen_from(piece)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        return self._slice(at).numel

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        first, last = entry.offset, entry.offset + entry.size - 1
        if axes != (self.axis,):
            return range(at.size(*axes))
        if self.owner is not None:
            return range(self.owner, self.owner + 1)
        if self.sizes is not None:
            return range(bisect_right(self._starts, first) - 1, bisect_right(self._starts, last))
        step = -(-self.size // at.size(self.axis))
        return range(first // step, last // step + 1)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where each slice begins, if ``sizes`` is given."""
        return tuple(accumulate(self.sizes or (), initial=0))[:-1]

    def _slice(self, at: Coordinate) -> Box:
        place = at[self.axis]
        if self.sizes is not None and self.owner is None:  # cached, because there may be thousands of starts
            return Box((self._starts[place],), (self.sizes[place],))
        return shard_box((self.size,), self.cut, place, at.size(self.axis))


@dataclass(frozen=True, slots=True)
class LocalShards(Layout):
    """Every rank holds its own pieces, cut like the parameters, one after the other.

    If several ranks hold the same piece, the sender is the rank with the receiver's position along every axis
    that does not cut the matrix.
    """

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        return all(at[axis] == to[axis] for axis in at if axis not in entry.matrix.axes)

    def senders(self, entry: BucketEntry, axes: tuple[str, ...], to: Coordinate) -> Iterable[int]:
        cutting = [axis for axis in axes if axis in entry.matrix.axes]
        return (Coordinate(to.grid, rank).position(*axes) for rank in to.group(*cutting))


@dataclass(frozen=True, slots=True)
class PiecesInSlices(LocalShards):
    """Slices of the virtual buffer that cut no piece. Each piece lies in one slice and keeps its shape."""

    slices: SlicedBuffer

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        for held in self.slices.buffer_slices(entries, at):
            yield BufferSlice(held.entry, held.offset, self.box(held.entry, at))

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        return self.slices.length(entries, at)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        box = entry.matrix.box(at)
        return box if self.slices.box(entry, at).numel else Box(box.offset, (0,) * len(box.shape))


@dataclass(frozen=True, slots=True)
class WholeMatrices(Layout):
    """A rank's buffer holds the matrices of which it is a worker, one after the other, and nothing else.

    With the frame ``"matrix"``, a worker holds the whole matrix, and sends its parts to all ranks on the way
    back. With ``"piece"``, a worker holds its whole tensor-parallel piece, flat, and sends nothing back,
    because all ranks that need a part of the piece are workers.
    """

    axes: tuple[str, ...]
    frame: Literal["matrix", "piece"] = "matrix"

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        return self.frame == "matrix" or at == to

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        return entry.workers if axes == self.axes else range(at.size(*axes))

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        shape = entry.matrix.shape if self.frame == "matrix" else (entry.matrix.box(at).numel,)
        works = at.position(*self.axes) in entry.workers
        return Box.whole(shape if works else (0,) * len(shape))


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A box that one rank sends to another; ``index`` finds the box in this rank's slice ``held``."""

    held: BufferSlice
    box: Box
    index: tuple[slice, ...]
    numel: int

    @property
    def key(self) -> tuple[int, Box]:
        """Two parts with equal keys are the same elements of the same matrix."""
        return self.held.entry.matrix.index, self.box


@dataclass(frozen=True, slots=True)
class Parcels:
    """What one rank sends to others and receives from them, in order of the position in the group.

    ``leaving`` are the parts to pack. Position p gets ``sends[p]`` of the packed elements, beginning at
    ``starts[p]``. Parts that several positions get are packed once. ``coming`` are the parts that arrive, and
    ``receives`` counts the elements from each position.

    Parts that a rank keeps do not travel: ``kept`` lists them in the old buffer, ``kept_as`` in the new one.
    ``kept_at`` is where each kept part begins among the packed elements, or None if no other rank gets the
    part. ``length`` is the number of elements in the new buffer.
    """

    leaving: tuple[SharedPart, ...]
    coming: tuple[SharedPart, ...]
    kept: tuple[SharedPart, ...]
    kept_as: tuple[SharedPart, ...]
    kept_at: tuple[int | None, ...]
    sends: tuple[int, ...]
    starts: tuple[int, ...]
    receives: tuple[int, ...]
    length: int


@dataclass(frozen=True)  # no slots, because cached_property needs a __dict__
class Exchange:
    """A move of many matrices at once between two layouts, over the group of ``axes``."""

    axes: tuple[str, ...]
    entries: tuple[BucketEntry, ...]
    src: Layout
    dst: Layout

    @cached_property
    def inverse(self) -> Exchange:
        return Exchange(self.axes, self.entries, self.dst, self.src)

    @cached_property
    def silent(self) -> bool:
        """Whether every rank already holds what it needs, so that no collective is needed."""
        if isinstance(self.src, WholeMatrices):
            return self.src.frame == "piece"
        cut = any(axis in self.axes for entry in self.entries for axis in entry.matrix.axes)
        return isinstance(self.src, LocalShards) and not cut

    def passes_by(self, at: Coordinate) -> bool:
        """Whether no rank in this rank's group has anything to send or receive."""
        ends = (end.slices for end in (self.src, self.dst) if isinstance(end, PiecesInSlices))
        return any(it.owner not in (None, at[it.axis]) for it in ends)

    @cached_property
    def parcels(self) -> Callable[[Coordinate], Parcels]:
        """What one rank sends, receives and keeps. The results for a few ranks are cached."""
        return lru_cache(FEW_RANKS)(self._parcels)

    def __reduce__(self) -> tuple[Any, ...]:  # leaves the cache out of a pickle
        return Exchange, (self.axes, self.entries, self.src, self.dst)

    def _parcels(self, at: Coordinate) -> Parcels:
        positions, own = at.size(*self.axes), at.position(*self.axes)
        out, into = _by_position(self._leaving(at)), _by_position(self._coming(at))
        kept, kept_as = tuple(out.pop(own, ())), tuple(into.pop(own, ()))
        leaving, starts, known = _packed_once(out)
        sends, receives = (
            {place: sum(part.numel for part in parts) for place, parts in found.items()}
            for found in (out, into)
        )
        return Parcels(
            leaving=leaving,
            coming=tuple(part for parts in into.values() for part in parts),
            kept=kept,
            kept_as=kept_as,
            kept_at=tuple(known.get(part.key) for part in kept),
            sends=_listed(sends, positions),
            starts=_listed(starts, positions),
            receives=_listed(receives, positions),
            length=self.dst.length(self.entries, at),
        )

    def _leaving(self, at: Coordinate) -> Iterator[tuple[int, SharedPart]]:
        group = at.group(*self.axes)
        for held in self._slices(self.src, at):
            if self.src == WholeMatrices(self.axes) and self.dst == LocalShards():
                yield from self._for_all(held, at)
                continue
            for position in self.dst.holders(held.entry, self.axes, at):
                to = Coordinate(at.grid, group[position])
                if self.src.sends(held.entry, at, to):
                    yield position, _part(held, self.dst.box(held.entry, to))

    def _for_all(self, held: BufferSlice, at: Coordinate) -> Iterator[tuple[int, SharedPart]]:
        """Yield an owner's part for each position. Axes that do not cut the matrix do not change the part."""
        cutting = tuple(axis for axis in self.axes if axis in held.entry.matrix.axes)
        peers = (at.peer(place, *cutting) for place in range(at.size(*cutting)))
        parts = [_part(held, self.dst.box(held.entry, to)) for to in peers]
        places = [0]
        for axis in self.axes:
            steps = range(at.size(axis)) if axis in cutting else (0,) * at.size(axis)
            times = at.size(axis) if axis in cutting else 1
            places = [place * times + step for place in places for step in steps]
        return ((position, parts[place]) for position, place in enumerate(places))

    def _coming(self, at: Coordinate) -> Iterator[tuple[int, SharedPart]]:
        group = at.group(*self.axes)
        for held in self._slices(self.dst, at):
            for position in self.src.senders(held.entry, self.axes, at):
                other = Coordinate(at.grid, group[position])
                if self.src.sends(held.entry, other, at):
                    yield position, _part(held, self.src.box(held.entry, other))

    def _slices(self, layout: Layout, at: Coordinate) -> list[BufferSlice]:
        """Return the slices that are not empty; with thousands of ranks, most are empty."""
        return [held for held in layout.buffer_slices(self.entries, at) if held.box.numel]


def _part(held: BufferSlice, theirs: Box) -> SharedPart:
    return SharedPart(held, *_shared(held.box, theirs))


def _by_position(pairs: Iterator[tuple[int, SharedPart]]) -> dict[int, list[SharedPart]]:
    """Sort the parts by position, and leave out empty parts."""
    found: dict[int, list[SharedPart]] = {}
    for position, part in pairs:
        if part.numel:
            found.setdefault(position, []).append(part)
    return dict(sorted(found.items()))


def _packed_once(
    parts: Mapping[int, Sequence[SharedPart]],
) -> tuple[tuple[SharedPart, ...], dict[int, int], dict[tuple[int, Box], int]]:
    """Return the parts to pack, where each position's parts begin, and where each part begins.

    Positions that get the same parts get the same tuple of parts.
    """
    leaving: list[SharedPart] = []
    starts: dict[int, int] = {}
    begins: dict[tuple[int, Box], int] = {}
    packed: dict[tuple[tuple[int, Box], ...], int] = {}
    length = 0
    known: dict[tuple[int, ...], int] = {}
    for position, own in parts.items():
        same = tuple(map(id, own))
        if same in known:
            starts[position] = known[same]
            continue
        key = tuple(part.key for part in own)
        starts[position] = known[same] = packed.setdefault(key, length)
        if starts[position] == length:
            for part in own:
                begins[part.key] = length
                length += part.numel
            leaving += own
    return tuple(leaving), starts, begins


def _listed(numbers: Mapping[int, int], positions: int) -> tuple[int, ...]:
    listed = [0] * positions
    for position, number in numbers.items():
        listed[position] = number
    return tuple(listed)


@lru_cache(maxsize=4096)  # even with thousands of ranks, most pairs of boxes repeat
def _shared(mine: Box, theirs: Box) -> tuple[Box, tuple[slice, ...], int]:
    """Return the intersection of two boxes, its index in the first, and its number of elements."""
    box = mine.overlap(theirs)
    return box, box.seen_from(mine).slices, box.numel
