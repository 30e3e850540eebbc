"""What a rank holds, as plain data: boxes of a matrix, equal parts, words, letters for equal contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from ...plan.bucket import matrix_boxes
from ...plan.layout import Box
from ...plan.strategies import Plan

Boxes = tuple[Box, ...]
"""The boxes of a matrix that one rank holds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a matrix, and the rank that keeps or computed it, which gives it its colour."""

    box: Box
    keeper: int


def weight_holdings(plan: Plan, matrix: int = 0) -> list[Boxes]:
    """What each rank holds of a parameter between steps: tp cuts it, dp copies it."""
    [whole] = (e.matrix for bucket in plan.buckets for e in bucket.entries if e.matrix.index == matrix)
    return [(whole.box(plan.grid.at(rank)),) for rank in plan.grid.ranks]


def momentum_holdings(plan: Plan, matrix: int = 0) -> list[Boxes]:
    """What each rank keeps of a matrix's momentum: under ``zero1``, its slice of the flat buffer."""
    held = []
    for at in map(plan.grid.at, plan.grid.ranks):
        shards = (shard for bucket in plan.buckets for shard in bucket.stored_shards(at))
        mine = next(shard for shard in shards if shard.entry.matrix.index == matrix)
        held.append(matrix_boxes(mine, at))
    return held


def name_contents(tensors: Sequence[Tensor]) -> list[str]:
    """A letter for each tensor, in order of first appearance; tensors with the same bytes share a letter."""
    seen: dict[tuple[Any, bytes], int] = {}
    keys = [(tensor.shape, tensor.detach().contiguous().numpy().tobytes()) for tensor in tensors]
    numbers = (divmod(seen.setdefault(key, len(seen)), 26) for key in keys)
    return [chr(ord("A") + place) + (str(lap + 1) if lap else "") for lap, place in numbers]


def patches(numbers: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int, int]]:
    """Rectangles of equal numbers that cover a matrix: number, first row, first column, rows, columns."""
    found, top = [], 0
    for row, same in groupby(numbers):
        rows, left = len(list(same)), 0
        for number, run in groupby(row):
            columns = len(list(run))
            found.append((number, top, left, rows, columns))
            left += columns
        top += rows
    return found


def say_held(boxes: Boxes, shape: tuple[int, int]) -> str:
    """What a rank holds, in words: rows and columns."""
    return " and ".join(_say_box(box, shape) for box in boxes if box.numel) or "nothing"


def _say_box(box: Box, shape: tuple[int, int]) -> str:
    if box.shape == shape:
        return "the whole matrix"
    said = []
    for word, start, length, whole in zip(("row", "column"), box.offset, box.shape, shape, strict=True):
        run = f"{word}s {start} to {start + length - 1}" if length > 1 else f"{word} {start}"
        said.append(f"all {word}s" if length == whole else run)
    return ", ".join(said)
