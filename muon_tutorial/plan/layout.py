"""How a tensor is spread over an axis (placements), and how that changes (hops and routes).

This module knows shapes, offsets, cuts and coordinates, but no data and no process groups. Hops and routes
are printed in the notation of ``docs/notation.md``: ``W[I, J_tp] → W[I, J]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..errors import GridError, OneWayError
from .grid import Coordinate

if TYPE_CHECKING:
    from .exchange import Exchange

FEW_RANKS = 16
"""The number of ranks whose boxes and parcels are cached. A process serves only a few of a plan's ranks."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis holds a tensor of the whole shape; the value is the sum of these tensors."""


@dataclass(frozen=True, slots=True)
class Owned:
    """One rank of the axis, at position ``rank``, holds the whole tensor; the others hold nothing."""

    rank: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank of the axis holds a run of indices along ``dim``.

    Without ``sizes``, the cut is the same as in ``torch.chunk`` and DTensor: each run has ``ceil(n / parts)``
    indices, and the last runs are shorter or empty. For any other cut, ``sizes`` has one length per position.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def lengths(self, length: int, parts: int) -> tuple[int, ...]:
        """Return the number of indices at each of ``parts`` positions, for a dimension of ``length``."""
        if self.sizes is None:
            step = -(-length // parts)
            return tuple(max(0, min(step, length - step * part)) for part in range(parts))
        if len(self.sizes) != parts or sum(self.sizes) != length or min(self.sizes) < 0:
            raise GridError(f"the cut {self.sizes} does not cover {length} indices over {parts} ranks")
        return self.sizes

    def run(self, length: int, position: int, parts: int) -> tuple[int, int]:
        """Return where the run of one position starts, and how many indices it has."""
        if self.sizes is None:  # do not list all positions: a plan may have thousands
            step = -(-length // parts)
            start = min(length, step * position)
            return start, min(step, length - start)
        starts = _starts(self, length, parts)
        return starts[position], starts[position + 1] - starts[position]


@lru_cache(maxsize=256)  # a plan needs the runs of many ranks
def _starts(cut: Shard, length: int, parts: int) -> tuple[int, ...]:
    """Return where the run of each position starts, and where the last run ends."""
    return tuple(accumulate(cut.lengths(length, parts), initial=0))


Placement = Shard | Replicate | Partial | Owned


def layout_text(shape: Sequence[int], held: Mapping[str, Placement]) -> str:
    """Write how the axes in ``held`` hold a tensor of ``shape``, in the notation of ``docs/notation.md``.

    A flat buffer has one dimension, B; a matrix has I rows and J columns.

    >>> layout_text((4, 6), {"dp": Shard(0), "tp": Shard(1)}), layout_text((24,), {"dp": Partial()})
    ('W[I_dp, J_tp]', 'w[B]{U_dp}')
    >>> layout_text((4, 6), {"dp": Owned(1), "tp": Replicate()})
    'W[I, J]@dp=1'
    """
    flat = len(shape) == 1
    cuts: list[list[str]] = [[] for _ in shape]
    behind = ""
    for axis, placement in held.items():
        if isinstance(placement, Shard):
            cuts[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            behind += f"{{U_{axis}}}"
        elif isinstance(placement, Owned):
            behind += f"@{axis}={placement.rank}"
    names = ["B"] if flat else [chr(ord("I") + dim) for dim in range(len(shape))]
    inside = (f"{name}_{'·'.join(axes)}" if axes else name for name, axes in zip(names, cuts, strict=True))
    return f"{'w' if flat else 'W'}[{', '.join(inside)}]{behind}"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor: where it starts and how far it reaches, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: ``tensor[box.slices]``."""
        return tuple(
            slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True)
        )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    def with_run(self, dim: int, start: int, length: int) -> Box:
        """Return the same box, but with ``length`` indices from ``start`` on along ``dim``."""
        offset, shape = list(self.offset), list(self.shape)
        offset[dim], shape[dim] = start, length
        return Box(tuple(offset), tuple(shape))

    def shifted(self, offset: tuple[int, ...]) -> Box:
        """Return this box of a tensor as a box of a larger tensor that contains the tensor at ``offset``."""
        return Box(tuple(here + there for here, there in zip(self.offset, offset, strict=True)), self.shape)

    def seen_from(self, frame: Box) -> Box:
        """Return this box with its offset counted from ``frame``'s offset: the opposite of ``shifted``."""
        return self.shifted(tuple(-start for start in frame.offset))

    def overlap(self, other: Box) -> Box:
        """Return the intersection of two boxes. It may be empty."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            (a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        return Box(low, tuple(max(0, min(end) - start) for start, end in zip(low, ends, strict=True)))


def shard_box(shape: tuple[int, ...], placement: Placement, position: int, parts: int) -> Box:
    """Return the box of a tensor of ``shape`` that the rank at ``position`` of ``parts`` holds.

    >>> shard_box((5, 4), Shard(0), 2, 3)
    Box(offset=(4, 0), shape=(1, 4))
    """
    if isinstance(placement, Owned) and placement.rank != position:
        return Box.whole((0,) * len(shape))
    if not isinstance(placement, Shard):
        return Box.whole(tuple(shape))
    run = placement.run(shape[placement.dim], position, parts)
    return Box.whole(tuple(shape)).with_run(placement.dim, *run)


def run_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes that cover elements ``start`` to ``stop - 1`` of a row-major tensor.

    For a matrix there are at most three boxes.

    >>> run_boxes((4, 3), 2, 10)
    (Box(offset=(0, 2), shape=(1, 1)), Box(offset=(1, 0), shape=(2, 3)), Box(offset=(3, 0), shape=(1, 1)))
    """
    if start >= stop:
        return ()
    if len(shape) == 1:
        return (Box((start,), (stop - start,)),)
    width = math.prod(shape[1:])
    first, last = -(-start // width), stop // width
    if first > last:
        return _boxes_in_row(shape, last, start - last * width, stop - last * width)
    whole = Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    return (
        *_boxes_in_row(shape, first - 1, start - (first - 1) * width, width),
        *([whole] if first < last else []),
        *_boxes_in_row(shape, last, 0, stop - last * width),
    )


def _boxes_in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> tuple[Box, ...]:
    inner = run_boxes(shape[1:], start, stop)
    return tuple(Box((row, *box.offset), (1, *box.shape)) for box in inner)


@dataclass(frozen=True, slots=True)
class HopPieces:
    """The pieces into which a hop's source or destination cuts its tensor, for one rank.

    ``mine`` is this rank's piece. ``size`` is the number of elements in the largest of the ``parts`` pieces.
    If all pieces are runs of equally many rows, they lie one after the other in memory, and ``uneven`` is
    empty. Otherwise ``uneven`` contains every piece that is not empty, by position.
    """

    mine: Box
    size: int
    parts: int
    uneven: Mapping[int, Box] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of elements in each position's piece."""
        return tuple(self.uneven[place].numel if place in self.uneven else 0 for place in range(self.parts))


@dataclass(frozen=True)  # no slots, because cached_property needs a __dict__
class Hop:
    """One change of a tensor's placement along one axis.

    ``shape`` is the shape that a rank would hold if this axis replicated the tensor; other axes may cut it.
    """

    axis: str
    src: Placement
    dst: Placement
    shape: tuple[int, ...]

    @property
    def inverse(self) -> Hop:
        """The hop back.

        Raises:
            OneWayError: the hop is a reduce_scatter or a reduce. A sum cannot be split into its summands.
        """
        if isinstance(self.src, Partial) and isinstance(self.dst, Shard | Owned):
            done, back = "reduce", "a broadcast"
            if isinstance(self.dst, Shard):
                done, back = "reduce_scatter", "an all_gather"
            raise OneWayError(
                f"a {done} over {self.axis!r} has no opposite: the ranks' summands are gone; ask for the hop "
                f"from {type(self.dst).__name__} to Replicate instead, which is {back}"
            )
        return Hop(self.axis, self.dst, self.src, self.shape)

    def __str__(self) -> str:
        src, dst = (layout_text(self.shape, {self.axis: held}) for held in (self.src, self.dst))
        return f"{src} → {dst}"

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @cached_property
    def silent(self) -> bool:
        """Whether every rank already holds what it needs, so that no collective is needed."""
        return isinstance(self.src, Replicate)

    @cached_property
    def pieces(self) -> Callable[[Coordinate], HopPieces]:
        """The pieces into which ``src`` or ``dst`` cuts the tensor. A few ranks' results are cached."""
        return lru_cache(FEW_RANKS)(self._pieces)

    def __reduce__(self) -> tuple[Any, ...]:  # leaves the cache out of a pickle
        return Hop, (self.axis, self.src, self.dst, self.shape)

    def _pieces(self, at: Coordinate) -> HopPieces:
        cut, parts = self.src if isinstance(self.src, Shard) else self.dst, at.size(self.axis)
        assert isinstance(cut, Shard)
        mine = shard_box(self.shape, cut, at[self.axis], parts)
        equal = len(set(cut.sizes)) == 1 if cut.sizes else self.shape[cut.dim] % parts == 0
        if equal and cut.dim == 0:  # do not list all positions: a plan may have thousands
            return HopPieces(mine, mine.numel, parts)
        boxes = _filled_boxes(self.shape, cut, parts)
        return HopPieces(mine, max((box.numel for box in boxes.values()), default=0), parts, boxes)


@lru_cache(maxsize=256)  # all ranks, and the hops of a bucket, share one dictionary
def _filled_boxes(shape: tuple[int, ...], cut: Shard, parts: int) -> dict[int, Box]:
    """Return the boxes that are not empty, by position."""
    lengths, whole = cut.lengths(shape[cut.dim], parts), Box.whole(shape)
    runs = enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False))
    boxes = {place: whole.with_run(cut.dim, start, length) for place, (start, length) in runs if length}
    return {place: box for place, box in boxes.items() if box.numel}


Move: TypeAlias = "Hop | Exchange"
"""An element of a route: a hop along one axis, or an exchange of many matrices over several axes."""


@dataclass(frozen=True)  # no slots, because cached_property needs a __dict__
class Route:
    """Hops in order, and the dtype that travels.

    >>> out = Route((Hop("tp", Shard(1), Replicate(), (4, 6)),), torch.bfloat16)
    >>> print(out)
    W[I, J_tp] → W[I, J], in bfloat16
    >>> print(out.inverse.hops[0])
    W[I, J] → W[I, J_tp]
    """

    hops: tuple[Move, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Write the layouts along the route, and the dtype that travels. Exchanges list no matrices."""
        hops = [move for move in self.hops if isinstance(move, Hop)]
        held = {hop.axis: hop.src for hop in (*hops, *reversed(hops))}  # where each axis begins
        terms = []
        for move in self.hops:
            if isinstance(move, Hop):
                after = held | {move.axis: move.dst}
                terms += [layout_text(move.shape, held), layout_text(move.shape, after)]
                held = after
            else:
                terms.append(f"exchange over {'·'.join(move.axes)}")
        return f"{' → '.join(dict.fromkeys(terms)) or 'stays where it is'}, in {str(self.dtype)[6:]}"

    @cached_property
    def inverse(self) -> Route:
        """The way back: the inverse hops in reverse order. Raises ``OneWayError`` if a hop has no inverse."""
        return Route(tuple(hop.inverse for hop in reversed(self.hops)), self.dtype)
