"""Describes matrices to a plan: their shapes, how axes cut them, and where they lie in parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Literal

import torch
from torch import Tensor

from ..errors import StrategyError, UsageError
from .assign import gram_cost, newton_schulz_cost
from .grid import Coordinate
from .layout import Box, Route, Shard, shard_box

Cut = tuple[str, Shard]


@dataclass(frozen=True, slots=True)
class Runs:
    """The lines of a matrix, if they alternate with the lines of other matrices in the same parameter.

    The matrix has the first ``length`` of every ``stride`` lines. ``dim`` is the dimension along which the
    lines are numbered, so it says whether they are rows or columns.
    """

    dim: int
    length: int
    stride: int

    def line(self, index: int) -> int:
        """Return the position of the matrix's ``index``-th line, counted from the matrix's first line."""
        return index // self.length * self.stride + index % self.length

    def before(self, line: int) -> int:
        """Return how many lines of the matrix lie before ``line``, a position counted from its first line."""
        runs, rest = divmod(line, self.stride)
        return runs * self.length + min(rest, self.length)

    def within(self, first: int, count: int, shift: int) -> slice | Tensor:
        """Return an index that selects ``count`` lines of the matrix, beginning at line ``first``.

        ``shift`` is where the matrix's first line lies. The index is a slice if possible, so that indexing
        gives a view, and otherwise a list of the lines' numbers.
        """
        if not count:
            return slice(0, 0)
        start, last = self.line(first) + shift, self.line(first + count - 1) + shift
        if self.length == 1 or last - start == count - 1:
            return slice(start, last + 1, self.stride if self.length == 1 else 1)
        return _line_numbers(self, first, count) + shift


@lru_cache(maxsize=256)  # most layers have equal shapes, and every step of a single process needs this
def _line_numbers(runs: Runs, first: int, count: int) -> Tensor:
    return torch.tensor([runs.line(index) for index in range(first, first + count)])


Index = tuple[slice | Tensor, ...]
"""An index into a tensor: numbers for lines that alternate with others, slices for everything else."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a matrix lies in the parameter ``param``: at ``offset``. ``shape`` is the parameter's shape.

    ``single``: the parameter's leading dimensions number its matrices. Without ``runs``, the matrix is a box
    of the parameter.
    """

    param: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    single: bool = True
    runs: Runs | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix for Newton–Schulz to orthogonalize.

    ``shape`` is the shape of the whole matrix in its parameter, with four dimensions for a convolution.
    ``cuts`` says how axes cut the *parameter*, outermost first. An axis without a cut has a copy of the
    parameter on every rank. ``group`` is the number of the optimizer's parameter group. ``dtype`` is the
    parameter's dtype, and ``grad_dtype`` the gradient's. If the matrix is a whole parameter, ``part`` is
    None, and ``index`` is also the parameter's index.
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
        """The index of the parameter that contains the matrix."""
        return self.index if self.part is None else self.part.param

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of rows and columns for Newton–Schulz.

        All dimensions after the first count as columns. A part's leading dimensions of length 1 do not count.
        """
        shape = self.shape
        while self.part is not None and self.part.single and len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
        return shape[0], math.prod(shape[1:])

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.cuts)

    def cut(self, axis: str) -> Shard | None:
        """Return how an axis cuts the parameter; None if it does not."""
        return dict(self.cuts).get(axis)

    def box(self, at: Coordinate) -> Box:
        """Return the box of the matrix that lies in this rank's part of the parameter. It may be empty."""
        held = self._held(at)
        if self.part is None:
            return held
        place, runs = Box(self.part.offset, self.shape), self.part.runs
        if runs is None:
            return held.overlap(place).seen_from(place)
        lines = runs.line(self.shape[runs.dim] - 1) + 1  # this box includes lines of other matrices
        place = place.with_run(runs.dim, self.part.offset[runs.dim], lines)
        box = held.overlap(place).seen_from(place)
        first, stop = map(runs.before, _ends(box, runs.dim))
        return box.with_run(runs.dim, first, stop - first)

    def slices(self, at: Coordinate) -> Index:
        """Return the index of this rank's ``box`` in its part of the parameter."""
        held, box = self._held(at), self.box(at)
        if self.part is None:
            return box.seen_from(held).slices
        index, runs = box.shifted(self.part.offset).seen_from(held).slices, self.part.runs
        if runs is None:
            return index
        shift = self.part.offset[runs.dim] - held.offset[runs.dim]
        lines = runs.within(box.offset[runs.dim], box.shape[runs.dim], shift)
        return (*index[: runs.dim], lines, *index[runs.dim + 1 :])

    def in_parameter(self, box: Box) -> Iterator[Box]:
        """Yield the boxes of the parameter that form a box of the matrix, in the order of its elements."""
        if self.part is None or (runs := self.part.runs) is None:
            yield box if self.part is None else box.shifted(self.part.offset)
            return
        rows = product(*(range(*_ends(box, dim)) for dim in range(runs.dim)))
        first, stop = _ends(box, runs.dim)
        for place in rows:
            for begin in (first, *range(first - first % runs.length + runs.length, stop, runs.length)):
                count = min(stop, begin - begin % runs.length + runs.length) - begin
                offset = (*place, runs.line(begin), *box.offset[runs.dim + 1 :])
                shape = (*(1 for _ in place), count, *box.shape[runs.dim + 1 :])
                yield Box(offset, shape).shifted(self.part.offset)

    def _held(self, at: Coordinate) -> Box:
        return held_box(self.shape if self.part is None else self.part.shape, self.cuts, at)


Parts = Literal["stack", "flatten"] | int | tuple[int | str, ...] | None
"""The layout of the matrices in a parameter; see ``part_boxes``."""

Place = tuple[Box, Runs | None]
"""Where a matrix lies in a parameter: its offset and shape, and its ``Runs`` if its lines alternate."""


def part_boxes(shape: tuple[int, ...], parts: Parts, transposed: bool = False) -> list[Place] | None:
    """Return where the matrices of a parameter lie; None if the parameter is one matrix.

    - ``(2, 4)``: the first 2 rows are one matrix, the next 4 another (fused q, k and v; gate and up).
    - ``("interleaved", 2, 4)``: runs of 2 and 4 rows alternate. All runs of 2 form one matrix, and all runs
      of 4 another (q, k and v head by head; with 1 and 1, gate and up row by row).
    - ``("heads", 2, 4)``: runs of 2 and 4 rows alternate, and each run is a matrix. ``2`` is short for
      ``("heads", 2)``.
    - ``"stack"``: leading dimensions number the matrices (experts).
    - ``("stack", …)``: a stack whose matrices are split as the rest of the tuple says.
    - ``"flatten"``: one matrix, in which dimensions after the first count as columns (convolutions).

    If a parameter is stored ``transposed``, as (in, out), the numbers count columns.

    Raises:
        UsageError: the parameter cannot be split this way.

    >>> [box.offset for box, _ in part_boxes((6, 4), (2, 4))]
    [(0, 0), (2, 0)]
    >>> [box.offset for box, _ in part_boxes((4, 6), (2, 4), transposed=True)]
    [(0, 0), (0, 2)]
    >>> part_boxes((6, 4), ("interleaved", 1, 2))[1]
    (Box(offset=(1, 0), shape=(4, 4)), Runs(dim=0, length=2, stride=3))
    """
    if parts is None or parts == "flatten":
        return None
    words = parts if isinstance(parts, tuple) else ("heads", parts) if isinstance(parts, int) else (parts,)
    lead = len(shape) - 2 if words[:1] == ("stack",) else 0
    dim = lead + 1 if transposed else lead
    inside = _lines_of(words[1:] if words[:1] == ("stack",) else words, shape[dim])
    if inside is None:
        lines = "columns" if transposed else "rows"
        raise UsageError(
            f"parts={parts!r} does not split the {shape[dim]} {lines} of a parameter of shape {shape}"
        )
    rows_and_columns = (0,) * (len(shape) - lead)
    wholes = (
        Box((*place, *rows_and_columns), (1,) * lead + shape[lead:])
        for place in product(*map(range, shape[:lead]))
    )
    return [
        (whole.with_run(dim, start, count), None if run == count else Runs(dim, run, stride))
        for whole in wholes
        for start, count, run, stride in inside
    ]


def _lines_of(words: tuple[int | str, ...], length: int) -> list[tuple[int, int, int, int]] | None:
    """Return each matrix's first line, line count, run length and stride; None if ``words`` do not fit."""
    kind, *sizes = words if words and isinstance(words[0], str) else ("split", *(words or (length,)))
    numbers = [size for size in sizes if isinstance(size, int) and size > 0]
    stride = sum(numbers)
    if kind not in ("split", "heads", "interleaved") or len(numbers) < len(sizes) or not numbers:
        return None
    times = 1 if kind == "split" else length // stride
    if times * stride != length:
        return None
    if kind == "heads":
        numbers, times = numbers * times, 1
    starts = accumulate(numbers, initial=0)
    return [(start, times * size, size, stride) for start, size in zip(starts, numbers, strict=False)]


def split_parts(whole: Matrix, parts: Parts, first: int, transposed: bool = False) -> list[Matrix]:
    """Return the matrices in a parameter, numbered from ``first`` on.

    ``whole`` is the parameter as one matrix, and ``whole.index`` the parameter's index.

    Raises:
        UsageError: the parameter cannot be split this way.
        StrategyError: a cut goes through a dimension that is merged into the columns.
    """
    places = part_boxes(whole.shape, parts, transposed)
    if places is None:
        places = [(Box.whole(whole.shape), None)]
    flat = parts in (None, "flatten")
    through = [(axis, cut.dim) for axis, cut in whole.cuts if flat and cut.dim > 1]
    if through:
        raise StrategyError(
            f"{whole.name} is cut along dimension {through[0][1]} by {through[0][0]!r}: its dimensions from "
            "1 on are merged into the columns, so only dimensions 0 and 1 can be cut"
        )
    return [
        replace(
            whole,
            index=first + i,
            name=_part_name(whole.name, i, len(places), runs),
            shape=box.shape,
            part=None
            if flat and first == whole.index
            else Part(whole.index, whole.shape, box.offset, not flat, runs),
        )
        for i, (box, runs) in enumerate(places)
    ]


def _part_name(name: str, index: int, parts: int, runs: Runs | None) -> str:
    """Name a matrix. Ranks compare the names to check that they split parameters in the same way."""
    if runs is not None:
        return f"{name}[part {index}, {runs.length} of every {runs.stride}]"
    return name if parts == 1 else f"{name}[part {index}]"


def _ends(box: Box, dim: int) -> tuple[int, int]:
    return box.offset[dim], box.offset[dim] + box.shape[dim]


@dataclass(frozen=True, slots=True)
class SummedGram:
    """A matrix that stays cut, because the iteration needs only the sum of its shards' Gram matrices.

    Tensor parallelism cuts dimension ``cut`` of [rows, columns]. The other dimension has length ``side``, so
    the Gram matrices are [side, side].
    """

    cut: int
    side: int

    @property
    def elements(self) -> int:
        """The number of elements in the upper triangle; only these travel."""
        return self.side * (self.side + 1) // 2


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A matrix in a bucket.

    ``offset`` and ``size`` count elements of the virtual buffer. Both are the same at every tensor-parallel
    position, because ``size`` is the size of the largest piece. ``workers`` are the positions, in the
    bucket's group, of the ranks that orthogonalize the matrix. After the bucket's own route, ``route`` leads
    from a worker's piece to the whole matrix. If ``gram`` is given, ``route`` is empty: the tp ranks keep
    their pieces and share the work.
    """

    matrix: Matrix
    offset: int
    size: int
    workers: range
    route: Route
    gram: SummedGram | None = None

    @property
    def cost(self) -> int:
        """Operations per Newton–Schulz iteration, averaged over five iterations, on each worker."""
        if self.gram is None:
            return newton_schulz_cost(self.matrix.sides)
        return gram_cost(self.gram.side, self.size)


def held_box(shape: tuple[int, ...], cuts: tuple[Cut, ...], at: Coordinate) -> Box:
    """Return the box of a tensor of ``shape`` that a rank holds after nested cuts, outermost first.

    >>> from .grid import Grid
    >>> at = Grid.of(dp=2, tp=2).at(3)
    >>> held_box((8, 4), (("tp", Shard(0)), ("dp", Shard(0))), at)
    Box(offset=(6, 0), shape=(2, 4))
    """
    return _cut_box(shape, cuts, tuple((at[axis], at.grid.size(axis)) for axis, _ in cuts))


@lru_cache(maxsize=4096)  # even with thousands of ranks, most hold the same few boxes
def _cut_box(shape: tuple[int, ...], cuts: tuple[Cut, ...], places: tuple[tuple[int, int], ...]) -> Box:
    box = Box.whole(shape)
    for (_, shard), (position, parts) in zip(cuts, places, strict=True):
        box = shard_box(box.shape, shard, position, parts).shifted(box.offset)
    return box
