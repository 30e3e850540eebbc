"""Layouts of flat buffers, and the packed exchange of many matrices between two layouts.

A layout says which box of each matrix a rank's buffer holds, and where. An exchange moves many matrices at
once between two layouts: a rank sends to another the intersection of the box it holds with the box that the
other needs. The way back is the same with the layouts swapped. Boxes are computed on demand, never stored for
all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from .grid import Coordinate
from .layout import FEW_RANKS, Box, Owned, Shard, shard_box
from .matrix import BucketEntry


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Which box of a matrix a rank's flat buffer holds, and from which element on. The box may be empty."""

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
    """Every rank along ``axis`` holds its slice of the virtual buffer. Boxes are intervals of a flat piece.

    Slices are of one length, unless ``sizes`` states each, or all of it is with the ``owner``.
    """

    axis: str
    size: int
    sizes: tuple[int, ...] | None = None
    owner: int | None = None

    @property
    def cut(self) -> Shard | Owned:
        """How the axis cuts the buffer."""
        return Shard(0, self.sizes) if self.owner is None else Owned(self.owner)

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's slice holds of each matrix: the slice intersected with the matrix's own
        elements."""
        start = self._slice(at).offset[0]
        for entry in entries:
            box = self.box(entry, at)
            yield BufferSlice(entry, entry.offset + box.offset[0] - start if box.numel else 0, box)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """The interval of the matrix's flat piece that the rank's slice holds."""
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
        if axes != (self.axis,) or self.sizes is not None:
            return range(at.size(*axes))
        step = -(-self.size // at.size(self.axis))
        return range(entry.offset // step, (entry.offset + entry.size - 1) // step + 1)

    def senders(self, entry: BucketEntry, axes: tuple[str, ...], to: Coordinate) -> Iterable[int]:
        """Those of them that may send to a rank: all."""
        return self.holders(entry, axes, to)

    def _slice(self, at: Coordinate) -> Box:
        return shard_box((self.size,), self.cut, at[self.axis], at.size(self.axis))


@dataclass(frozen=True, slots=True)
class PiecesInSlices:
    """Slices of the virtual buffer that cut no piece: each matrix's lies whole in one, in its own shape."""

    slices: SlicedBuffer

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's slice holds of each matrix, in order."""
        for held in self.slices.buffer_slices(entries, at):
            yield BufferSlice(held.entry, held.offset, self.box(held.entry, at))

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Elements of the rank's slice."""
        return self.slices.length(entries, at)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """The box of the matrix that the rank holds, if its slice does."""
        box = entry.matrix.box(at)
        return box if self.slices.box(entry, at).numel else Box(box.offset, (0,) * len(box.shape))

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        """As of local shards: of ranks that hold the same piece, the one beside the receiver sends."""
        return LocalShards().sends(entry, at, to)

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold a part of the matrix: all."""
        return range(at.size(*axes))

    def senders(self, entry: BucketEntry, axes: tuple[str, ...], to: Coordinate) -> Iterable[int]:
        """Those of them that may send to a rank: they differ from it along the matrix's axes alone."""
        return LocalShards().senders(entry, axes, to)


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

    def senders(self, entry: BucketEntry, axes: tuple[str, ...], to: Coordinate) -> Iterable[int]:
        """Those of them that may send to a rank: they differ from it along the matrix's axes alone."""
        cutting = [axis for axis in axes if axis in entry.matrix.axes]
        return (Coordinate(to.grid, rank).position(*axes) for rank in to.group(*cutting))


@dataclass(frozen=True, slots=True)
class WholeMatrices:
    """The workers of each matrix hold it whole, one matrix after the other; other ranks hold nothing.

    ``frame`` says whole what: the ``"matrix"``, or the ``"piece"`` of it that tensor parallelism left, flat.
    On the way back either the one ``"owner"`` sends to all, or each of the ``"holders"`` already has what it
    needs.
    """

    axes: tuple[str, ...]
    frame: Literal["matrix", "piece"]
    workers: Literal["owner", "holders"]

    def buffer_slices(self, entries: Iterable[BucketEntry], at: Coordinate) -> Iterator[BufferSlice]:
        """What the rank's buffer holds of each matrix, in order."""
        return _in_line((entry, self.box(entry, at)) for entry in entries)

    def length(self, entries: Iterable[BucketEntry], at: Coordinate) -> int:
        """Elements of the rank's buffer."""
        return sum(self.box(entry, at).numel for entry in entries)

    def sends(self, entry: BucketEntry, at: Coordinate, to: Coordinate) -> bool:
        """The owner sends to all; a holder keeps what it has."""
        return self.workers == "owner" or at == to

    def holders(self, entry: BucketEntry, axes: tuple[str, ...], at: Coordinate) -> range:
        """Positions of the rank's group over ``axes`` that may hold the matrix: its workers."""
        return entry.workers if axes == self.axes else range(at.size(*axes))

    def senders(self, entry: BucketEntry, axes: tuple[str, ...], to: Coordinate) -> Iterable[int]:
        """Those of them that may send to a rank: all."""
        return self.holders(entry, axes, to)

    def box(self, entry: BucketEntry, at: Coordinate) -> Box:
        """The whole of it at a worker, nothing elsewhere."""
        shape = entry.matrix.shape if self.frame == "matrix" else (entry.matrix.box(at).numel,)
        works = at.position(*self.axes) in entry.workers
        return Box((0,) * len(shape), shape if works else (0,) * len(shape))


Layout = VirtualBuffer | SlicedBuffer | PiecesInSlices | LocalShards | WholeMatrices
End = SlicedBuffer | PiecesInSlices | LocalShards | WholeMatrices
"""What an exchange leads from and to."""


Index = tuple[slice, ...]
Cargo = tuple[tuple[BufferSlice, Index, tuple[int, ...]], ...]
"""Slices of a rank's own buffer and, of each, the part that moves or stays: an index into it, its shape."""


@dataclass(frozen=True, slots=True)
class Parcels:
    """What one rank sends to others and receives from them, in order of the position in the group.

    ``leaving`` is packed once, whoever gets it: position p gets the ``sends[p]`` elements from ``starts[p]``
    on, and those that get the same parts get the same elements. ``receives`` are the elements from each
    position. What a rank keeps for itself does not travel: ``kept`` of its buffer is ``kept_as`` of the one
    afterwards, part by part; ``kept_at`` is where such a part begins in what is packed, or None where nobody
    else gets it. ``length`` is how many elements the rank's buffer holds afterwards.
    """

    leaving: Cargo
    coming: Cargo
    kept: Cargo
    kept_as: Cargo
    kept_at: tuple[int | None, ...]
    sends: tuple[int, ...]
    starts: tuple[int, ...]
    receives: tuple[int, ...]
    length: int


@dataclass(frozen=True)  # without slots: the inverse and each rank's parcels are worked out once and kept
class Exchange:
    """A move of many matrices at once between two layouts, over the group of ``axes``."""

    axes: tuple[str, ...]
    entries: tuple[BucketEntry, ...]
    src: End
    dst: End

    @cached_property
    def inverse(self) -> Exchange:
        """The same move, the other way."""
        return Exchange(self.axes, self.entries, self.dst, self.src)

    @cached_property
    def silent(self) -> bool:
        """Whether every rank already holds what it needs, so that nothing has to be asked for."""
        if isinstance(self.src, WholeMatrices):
            return self.src.workers == "holders"
        cut = any(axis in self.axes for entry in self.entries for axis in entry.matrix.axes)
        return isinstance(self.src, LocalShards | PiecesInSlices) and not cut

    def passes_by(self, at: Coordinate) -> bool:
        """Whether nobody in this rank's group has anything to send or to receive."""
        ends = (end.slices for end in (self.src, self.dst) if isinstance(end, PiecesInSlices))
        return any(it.owner not in (None, at[it.axis]) for it in ends)

    def parcels(self, at: Coordinate) -> Parcels:
        """What one rank sends, receives and keeps; worked out once, for the few ranks of one process."""
        if at not in self._known:
            if len(self._known) == FEW_RANKS:
                self._known.clear()
            self._known[at] = self._parcels(at)
        return self._known[at]

    @cached_property
    def _known(self) -> dict[Coordinate, Parcels]:
        return {}

    def _parcels(self, at: Coordinate) -> Parcels:
        positions, own = at.size(*self.axes), at.position(*self.axes)
        out, into = self._by_position(at, self._leaving(at)), self._by_position(at, self._coming(at))
        kept, kept_as = out.pop(own, []), into.pop(own, [])
        leaving, starts, known = _packed_once(out)
        return Parcels(
            leaving=leaving,
            coming=tuple(part.cargo for parts in into.values() for part in parts),
            kept=tuple(part.cargo for part in kept),
            kept_as=tuple(part.cargo for part in kept_as),
            kept_at=tuple(known.get(part.key) for part in kept),
            sends=tuple(_elements(out.get(position, ())) for position in range(positions)),
            starts=tuple(starts.get(position, 0) for position in range(positions)),
            receives=tuple(_elements(into.get(position, ())) for position in range(positions)),
            length=self.dst.length(self.entries, at),
        )

    def _leaving(self, at: Coordinate) -> Iterator[tuple[int, BufferSlice, Box]]:
        for held in self._slices(self.src, at):
            for position in self.dst.holders(held.entry, self.axes, at):
                to = at.peer(position, *self.axes)
                if self.src.sends(held.entry, at, to):
                    yield position, held, self.dst.box(held.entry, to)

    def _coming(self, at: Coordinate) -> Iterator[tuple[int, BufferSlice, Box]]:
        for held in self._slices(self.dst, at):
            for position in self.src.senders(held.entry, self.axes, at):
                other = at.peer(position, *self.axes)
                if self.src.sends(held.entry, other, at):
                    yield position, held, self.src.box(held.entry, other)

    def _slices(self, layout: End, at: Coordinate) -> list[BufferSlice]:
        """The slices that hold anything: of thousands of ranks, one shares few matrices with few others."""
        return [held for held in layout.buffer_slices(self.entries, at) if held.box.numel]

    def _by_position(
        self, at: Coordinate, pairs: Iterator[tuple[int, BufferSlice, Box]]
    ) -> dict[int, list[_Part]]:
        """What this rank shares with each position, itself among them, in their order."""
        found: dict[int, list[_Part]] = {}
        for position, held, theirs in pairs:
            part = _Part(held, *_shared(held.box, theirs))
            if part.numel:
                found.setdefault(position, []).append(part)
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Part:
    """What two ranks have in common of a matrix: where the one holds it, and which box of it that is."""

    held: BufferSlice
    box: Box
    index: Index
    numel: int

    @property
    def cargo(self) -> tuple[BufferSlice, Index, tuple[int, ...]]:
        return self.held, self.index, self.box.shape

    @property
    def key(self) -> tuple[int, Box]:
        """Equal where the same elements of the same matrix are meant."""
        return self.held.entry.matrix.index, self.box


def _packed_once(
    parts: Mapping[int, Sequence[_Part]],
) -> tuple[Cargo, dict[int, int], dict[tuple[int, Box], int]]:
    """What is packed for all positions, equal parcels once; where each one's begins; where each part does."""
    cargo: list[_Part] = []
    starts: dict[int, int] = {}
    begins: dict[tuple[int, Box], int] = {}
    packed: dict[tuple[tuple[int, Box], ...], int] = {}
    length = 0
    for position, own in parts.items():
        key = tuple(part.key for part in own)
        starts[position] = packed.setdefault(key, length)
        if starts[position] == length:
            for part in own:
                begins[part.key] = length
                length += part.numel
            cargo += own
    return tuple(part.cargo for part in cargo), starts, begins


def _elements(parts: Iterable[_Part]) -> int:
    return sum(part.numel for part in parts)


@lru_cache(maxsize=4096)  # of thousands of ranks, most hold the same few boxes
def _shared(mine: Box, theirs: Box) -> tuple[Box, Index, int]:
    """What two boxes have in common: that box, its index in the first, and its elements."""
    box = mine.overlap(theirs)
    return box, box.seen_from(mine).slices, box.numel


def _in_line(boxes: Iterable[tuple[BucketEntry, Box]]) -> Iterator[BufferSlice]:
    offset = 0
    for entry, box in boxes:
        yield BufferSlice(entry, offset, box)
        offset += box.numel
