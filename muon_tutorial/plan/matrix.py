"""One matrix as the plan sees it: its shape, how axes cut it, and where it lies in its parameter.

Shapes and boxes alone: no data, no process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

import torch

from ..errors import StrategyError, UsageError
from .assign import gram_cost, newton_schulz_cost
from .grid import Coordinate
from .layout import Box, Route, Shard, shard_box

Cut = tuple[str, Shard]


@dataclass(frozen=True, slots=True)
class Part:
    """Where a matrix lies in a parameter: the ``param``-th, of which shape, from which offset on.

    ``single`` says that the parameter's leading dimensions only count matrices.
    """

    param: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    single: bool = True


@dataclass(frozen=True, slots=True)
class Matrix:
    """What Newton–Schulz is to orthogonalize at once.

    ``shape`` is the whole matrix, as it lies in its parameter (a convolution's has four dimensions);
    ``cuts`` say along which axes ranks hold runs of the *parameter*, outermost first; axes that are not
    named hold it whole. ``group`` is the optimizer's parameter group; ``dtype`` is that of the parameter and
    ``grad_dtype`` that of its gradient. ``part`` is None where the matrix is a whole parameter, the
    ``index``-th.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    group: int = 0
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    part: Part | None = None

    @property
    def param(self) -> int:
        """The index of the parameter that holds the matrix."""
        return self.index if self.part is None else self.part.param

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return math.prod(self.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns, as Newton–Schulz sees them.

        Further dimensions count as columns; leading ones that a part has of length 1 do not count.
        """
        shape = self.shape
        while self.part is not None and self.part.single and len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
        return shape[0], math.prod(shape[1:])

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the parameter."""
        return tuple(axis for axis, _ in self.cuts)

    def cut(self, axis: str) -> Shard | None:
        """How one axis cuts the parameter, or None."""
        return dict(self.cuts).get(axis)

    def box(self, at: Coordinate) -> Box:
        """The box of the matrix that the parameter on this rank holds; empty where it holds nothing of it."""
        return self._held(at) if self.part is None else self._mine(at).seen_from(self._place())

    def slices(self, at: Coordinate) -> tuple[slice, ...]:
        """Where that box lies in the parameter as this rank holds it."""
        return self._mine(at).seen_from(self._held(at)).slices

    def _place(self) -> Box:
        offset = (0,) * len(self.shape) if self.part is None else self.part.offset
        return Box(offset, self.shape)

    def _held(self, at: Coordinate) -> Box:
        return held_box(self.shape if self.part is None else self.part.shape, self.cuts, at)

    def _mine(self, at: Coordinate) -> Box:
        return self._held(at).overlap(self._place())


Parts = Literal["stack", "flatten"] | int | tuple[int, ...] | None


def part_boxes(shape: tuple[int, ...], parts: Parts, transposed: bool = False) -> list[Box] | None:
    """The boxes of a parameter that are matrices of their own; None where the parameter is one matrix.

    ``"stack"``: leading dimensions count matrices (experts). ``"flatten"``: one matrix, dimensions after the
    first count as columns (convolutions). A number: that many rows each (heads). A tuple: rows of each
    (fused QKV, gated projections). Of a parameter stored ``transposed``, (in, out), numbers and tuples count
    columns.

    Raises:
        UsageError: the parameter cannot be split so.

    >>> [box.offset for box in part_boxes((6, 4), (2, 4))]
    [(0, 0), (2, 0)]
    >>> [box.offset for box in part_boxes((4, 6), (2, 4), transposed=True)]
    [(0, 0), (0, 2)]
    """
    if parts is None or parts == "flatten":
        return None
    if parts == "stack":
        return [
            Box((*place, 0, 0), (1,) * len(place) + shape[-2:]) for place in product(*map(range, shape[:-2]))
        ]
    dim, lines = (1, "columns") if transposed else (0, "rows")
    sizes = (parts,) * (shape[dim] // parts) if isinstance(parts, int) and parts > 0 else parts
    if not isinstance(sizes, tuple) or sum(sizes) != shape[dim] or min(sizes) < 1:
        raise UsageError(
            f"parts={parts!r} does not split the {shape[dim]} {lines} of a parameter of shape {shape}"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    before, after = (0,) * dim, (0,) * (len(shape) - dim - 1)
    return [
        Box((*before, start, *after), (*shape[:dim], size, *shape[dim + 1 :]))
        for start, size in zip(starts, sizes, strict=True)
    ]


def split_parts(whole: Matrix, parts: Parts, first: int, transposed: bool = False) -> list[Matrix]:
    """The matrices that a parameter holds, numbered from ``first`` on; ``whole.index`` is the parameter's.

    Raises:
        UsageError: the parameter cannot be split so.
        StrategyError: a cut goes through the dimensions that become columns together.
    """
    boxes = part_boxes(whole.shape, parts, transposed)
    if boxes is None:
        boxes = [Box((0,) * len(whole.shape), whole.shape)]
    names = [whole.name] if len(boxes) == 1 else [f"{whole.name}[part {i}]" for i in range(len(boxes))]
    flat = parts in (None, "flatten")
    through = [(axis, cut.dim) for axis, cut in whole.cuts if flat and cut.dim > 1]
    if through:
        raise StrategyError(
            f"{whole.name} is cut along dimension {through[0][1]} by {through[0][0]!r}: where dimensions 1 "
            "and on are columns together, only dimensions 0 and 1 can be cut"
        )
    return [
        replace(
            whole,
            index=first + i,
            name=name,
            shape=box.shape,
            part=None
            if flat and first == whole.index
            else Part(whole.index, whole.shape, box.offset, not flat),
        )
        for i, (name, box) in enumerate(zip(names, boxes, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class SummedGram:
    """A matrix that stays cut: what its shards' Gram matrices add up to, ``side`` × ``side``, is iterated on.

    Tensor parallelism cuts dimension ``cut`` of [rows, columns]; the other one is ``side`` long.
    """

    cut: int
    side: int

    @property
    def elements(self) -> int:
        """Elements of its upper triangle, which is what travels."""
        return self.side * (self.side + 1) // 2

    def sides_of(self, numel: int) -> tuple[int, int]:
        """Rows and columns of a shard of so many elements."""
        along = numel // self.side
        return (along, self.side) if self.cut == 0 else (self.side, along)


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A matrix in a bucket.

    ``offset`` and ``size`` are elements of the virtual buffer, the same at every tensor-parallel position:
    ``size`` is the largest piece that any of them holds. ``workers`` are the positions in the bucket's group
    that orthogonalize the matrix. ``route`` leads from what a worker has after the bucket's own route to the
    whole matrix. With ``gram`` there is no such route: the workers along tp keep their pieces and work on the
    matrix together.
    """

    matrix: Matrix
    offset: int
    size: int
    workers: range
    route: Route
    gram: SummedGram | None = None

    @property
    def cost(self) -> int:
        """Operations of a Newton–Schulz iteration, the average of five, at each rank that works on it."""
        if self.gram is None:
            return newton_schulz_cost(self.matrix.sides)
        return gram_cost(self.gram.side, self.size)


def held_box(shape: tuple[int, ...], cuts: tuple[Cut, ...], at: Coordinate) -> Box:
    """The box of a tensor of ``shape`` that a rank holds after cuts one within the other.

    >>> from .grid import Grid
    >>> at = Grid.of(dp=2, tp=2).at(3)
    >>> held_box((8, 4), (("tp", Shard(0)), ("dp", Shard(0))), at)
    Box(offset=(6, 0), shape=(2, 4))
    """
    return _cut_box(shape, cuts, tuple((at[axis], at.grid.size(axis)) for axis, _ in cuts))


@lru_cache(maxsize=4096)  # of thousands of ranks, most hold the same few boxes
def _cut_box(shape: tuple[int, ...], cuts: tuple[Cut, ...], places: tuple[tuple[int, int], ...]) -> Box:
    box = Box((0,) * len(shape), shape)
    for (_, shard), (position, parts) in zip(cuts, places, strict=True):
        box = shard_box(box.shape, shard, position, parts).shifted(box.offset)
    return box
