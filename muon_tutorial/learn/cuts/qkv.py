"""Lesson 07: q, k and v stacked in one weight, and what happens to their heads when tp cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import Shard

HEADS, HEAD_DIM, WIDTH = 4, 3, 8
PARTS = ("q", "k", "v")
RowsOf = Callable[[int, int], list[int]]


@dataclass(frozen=True, slots=True)
class FusedRows:
    """A fused weight: its heads, the rows per head, and the numbers of the rows at each tp coordinate."""

    heads: int
    size: int
    held: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return 3 * self.heads * self.size

    def holders(self, part: int, head: int) -> list[int]:
        """The tp coordinate of each row of one head of q (0), k (1) or v (2); -1 if a row is missing."""
        start = (part * self.heads + head) * self.size
        return [self.holder(row) for row in range(start, start + self.size)]

    def holder(self, row: int) -> int:
        """The first tp coordinate that holds a row; -1 if none does."""
        return next((tp_rank for tp_rank, rows in enumerate(self.held) if row in rows), -1)

    def ranks_of(self, head: int) -> list[int]:
        return sorted({holder for part in range(3) for holder in self.holders(part, head)})

    def torn(self) -> list[int]:
        return [head for head in range(self.heads) if len(self.ranks_of(head)) > 1]

    def name(self, row: int) -> str:
        part, row = divmod(row, self.heads * self.size)
        return f"row {row} of {PARTS[part]}"


def rows_as_one(tp_rank: int, tp: int) -> list[int]:
    """The rows of one tp coordinate if the fused weight is cut like any other weight."""
    start, length = Shard(0).run(3 * HEADS * HEAD_DIM, tp_rank, tp)
    return list(range(start, start + length))


def rows_of_each(tp_rank: int, tp: int) -> list[int]:
    """The rows of one tp coordinate if q, k and v are each cut."""
    third = HEADS * HEAD_DIM
    start, length = Shard(0).run(third, tp_rank, tp)
    return [part * third + row for part in range(3) for row in range(start, start + length)]


def cut_fused(rows_of: RowsOf, tp: int) -> FusedRows:
    return FusedRows(HEADS, HEAD_DIM, tuple(tuple(rows_of(part, tp)) for part in range(tp)))


def count_torn(tp: int) -> int:
    return len(cut_fused(rows_of_each, tp).torn())


def fused_weight(seed: int) -> Tensor:
    """A fused weight of random numbers, (3 · HEADS · HEAD_DIM, WIDTH)."""
    return torch.randn(3 * HEADS * HEAD_DIM, WIDTH, generator=torch.Generator().manual_seed(seed))


def shard_qkv(W: Tensor, heads: int, tp_rank: int, tp: int) -> Tensor:
    """The reference: one tp coordinate's whole heads of q, of k and of v, stacked."""
    mine = torch.arange(heads).tensor_split(tp)[tp_rank]
    by_head = W.reshape(3, heads, -1, W.shape[1])  # q, k and v × heads × rows × in
    return by_head[:, mine].reshape(-1, W.shape[1])


def join_qkv(pieces: Sequence[Tensor], heads: int) -> Tensor:
    """The inverse of ``shard_qkv``: the whole weight from the pieces of all tp coordinates, in order."""
    parts = [piece.tensor_split(3) for piece in pieces]
    return torch.cat([part[number] for number in range(3) for part in parts])
