"""Adjusts the learning rate to a matrix's shape, decays the matrix or a part of it, and adds the update.

This file knows no optimizer, no rank and no process group. The single-process optimizer and every strategy
call its functions. Elementwise operations give a part the same bits as the whole matrix, with one exception.
On CPUs, ``param.add_(update, alpha=…)`` in bfloat16 rounds once in a vector register, after a fused
multiply-add, but twice in a scalar loop, after the product and after the sum. Which elements go through the
scalar loop depends on the whole matrix, so ``ShardRange`` says where a part lies in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UsageError

ADJUST_LR_FNS = (None, "original", "match_rms_adamw")

# A multiple of every CPU's vector length. Only the last `numel % _BLOCK` elements can lie outside a vector.
_BLOCK = 4096
# TensorIterator splits longer loops among threads, at places that are not multiples of a vector.
_SERIAL = 32768


def adjusted_lr(lr: float | Tensor, adjust_lr_fn: str | None, full_shape: Sequence[int]) -> float | Tensor:
    """Scale the learning rate by the shape of the full matrix; never pass a shard's shape.

    ``None`` and ``"original"``: ``lr·sqrt(max(1, rows/columns))`` (Keller Jordan). ``"match_rms_adamw"``:
    ``lr·0.2·sqrt(max(rows, columns))`` (Moonshot, arXiv 2502.16982).

    >>> adjusted_lr(0.1, "original", (8, 2)), adjusted_lr(0.1, "original", (2, 8))
    (0.2, 0.1)
    """
    rows, columns = full_shape[:2]
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjust_lr_fn in ADJUST_LR_FNS:
        return lr * math.sqrt(max(1, rows / max(1, columns)))
    raise UsageError(f"adjust_lr_fn must be one of {ADJUST_LR_FNS}, got {adjust_lr_fn!r}")


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A part of a matrix: elements ``start`` to ``stop - 1`` of a box of the matrix, counted row by row.

    Tensor parallelism cuts a matrix into boxes (``offset``, ``shape``). Data parallelism cuts a box into
    intervals (``start``, ``stop``).

    >>> ShardRange((4, 6), offset=(0, 3), shape=(4, 3), start=2, stop=5).positions().tolist()
    [5, 9, 10]
    """

    full_shape: tuple[int, int]
    offset: tuple[int, int]
    shape: tuple[int, int]
    start: int
    stop: int

    def __post_init__(self) -> None:
        sides = zip(self.offset, self.shape, self.full_shape, strict=True)
        fits = all(0 <= offset <= offset + length <= full for offset, length, full in sides)
        if not fits or not 0 <= self.start <= self.stop <= math.prod(self.shape):
            raise UsageError(f"no such range: {self}")

    @classmethod
    def whole(cls, full_shape: Sequence[int]) -> ShardRange:
        rows, columns = full_shape
        return cls((rows, columns), (0, 0), (rows, columns), 0, rows * columns)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def positions(self, start: int = 0) -> Tensor:
        """Return the flat index, in the whole matrix, of every element of the part from ``start`` on."""
        inside = torch.arange(self.start + start, self.stop)
        width = max(1, self.shape[1])
        rows, columns = inside // width + self.offset[0], inside % width + self.offset[1]
        return rows * self.full_shape[1] + columns


def decay_and_add(
    param: Tensor,
    update: Tensor,
    lr: float | Tensor,
    adjusted: float | Tensor,
    weight_decay: float,
    shard: ShardRange | None = None,
    by_rows: bool = False,
) -> None:
    """Decay a matrix by the raw learning rate, then step against the update by the adjusted rate.

    If ``shard`` is given, ``param`` and ``update`` hold a part of a matrix, contiguous and in order, in any
    shape. If the whole matrix is contiguous, the part gets the same bits as in one call on the whole matrix
    with one thread. The whole update must have the memory layout of torch's Newton–Schulz, (column-major for
    a tall matrix) or, with ``by_rows``, the row-major layout of recipes. With more threads, torch splits a
    bfloat16 matrix of more than 32,768 elements at other places, so other elements go through the scalar
    loop.

    Raises:
        UsageError: the parameter, the update and the range differ in size.

    >>> import torch
    >>> param = torch.ones(1, 2)
    >>> decay_and_add(param, torch.ones(1, 2), lr=0.5, adjusted=0.25, weight_decay=0.5)
    >>> param
    tensor([[0.5000, 0.5000]])
    >>> param = torch.ones(2, dtype=torch.bfloat16)
    >>> shard = ShardRange((2, 2), offset=(0, 0), shape=(2, 2), start=1, stop=3)
    >>> decay_and_add(param, torch.ones(2), 0.5, 0.25, 0.5, shard)
    >>> param
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    if shard is not None and not param.numel() == update.numel() == shard.numel:
        raise UsageError(
            f"the range and its tensors differ in size: {shard}, {tuple(param.shape)}, {tuple(update.shape)}"
        )
    param.mul_(1 - lr * weight_decay)
    by_position = param.device.type == "cpu" and param.dtype == update.dtype == torch.bfloat16
    if shard is None or not by_position:
        _add(param, update.reshape(param.shape), adjusted)
    elif shard.full_shape[0] > shard.full_shape[1] > 1 and not by_rows:
        # torch adds a tall matrix's column-major update in the scalar loop. A stride forces this loop here.
        strided = update.new_empty(update.numel(), 2)[:, 0].copy_(update.reshape(-1))
        _add(param.view(-1), strided, adjusted)
    else:
        _add_by_position(param.view(-1), update.reshape(-1), adjusted, shard)


def _add(param: Tensor, update: Tensor, adjusted: float | Tensor) -> None:
    param.add_(update, alpha=-adjusted)  # type: ignore[arg-type]  # a one-element tensor works too


def _add_by_position(param: Tensor, update: Tensor, adjusted: float | Tensor, shard: ShardRange) -> None:
    """Add a part's update, with the same bits as a step over the whole matrix, where only the last, partial
    block goes through the scalar loop.
    """
    blocks, tail = divmod(math.prod(shard.full_shape), _BLOCK)
    places = shard.positions(max(0, shard.numel - _BLOCK)) - blocks * _BLOCK
    places = places[places >= 0]  # only elements in the last, partial block
    body = shard.numel - len(places)
    full = body // _BLOCK * _BLOCK
    for some, its_update in zip(param[:full].split(_SERIAL), update[:full].split(_SERIAL), strict=True):
        _add(some, its_update, adjusted)
    _add_within(param[full:body], update[full:body], adjusted, torch.arange(body - full), _BLOCK)
    _add_within(param[body:], update[body:], adjusted, places, tail)


def _add_within(param: Tensor, update: Tensor, adjusted: float | Tensor, places: Tensor, size: int) -> None:
    """Copy the elements to ``places`` in a scratch buffer of ``size`` elements, add there, and copy back."""
    if not len(places):
        return
    scratch, its_update = param.new_zeros(size), update.new_zeros(size)
    scratch[places], its_update[places] = param, update
    _add(scratch, its_update, adjusted)
    param.copy_(scratch[places])
