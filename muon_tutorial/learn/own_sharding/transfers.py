"""The bytes that each rank sends to every other rank in any collective, observed from outside.

A collective is counted by its definition: in a gather, each rank sends its piece to the root; in a broadcast,
the root sends the whole to every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from ...evidence.memory import CountingMode


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that one rank sends to another. Ranks are global."""

    sender: int
    receiver: int
    nbytes: int


@dataclass(eq=False)
class TransferNotes(CountingMode):
    """In its block, records what this rank sends, and counts all calls, even if they only receive."""

    sent: list[Transfer] = field(default_factory=list)
    calls: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor turns func into operations on pieces; they come here, too
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in _QUIET:
            self.calls += 1
            self.sent += _sent(func._opname, args)
        return func(*args, **(kwargs or {}))


_QUIET = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")


def _sent(operator: str, args: Sequence[Any]) -> list[Transfer]:
    boxed = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
    name: Any = next((value for value in reversed(args) if isinstance(value, str)), None)
    group = _resolve_process_group(name) if boxed is None else dist.ProcessGroup.unbox(boxed)
    me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    sizes = _SIZES.get(operator.removesuffix("_").lstrip("_"), _to_all)(args, ranks.index(me), len(ranks))
    pairs = zip(ranks, sizes, strict=True)
    return [Transfer(me, rank, nbytes) for rank, nbytes in pairs if rank != me and nbytes]


def _bytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))


def _to_root(args: Sequence[Any], position: int, ranks: int) -> Iterable[int]:
    mine = _bytes(args[1] if isinstance(args[1], list) else args[0])
    return [mine * (rank == args[3]) for rank in range(ranks)]


def _in_rows(whole: Tensor, splits: Sequence[int], ranks: int) -> Iterable[int]:
    row = _bytes(whole) // max(1, len(whole))
    return [rows * row for rows in splits] if splits else [_bytes(whole) // ranks] * ranks


_Sizes = Callable[[Sequence[Any], int, int], Iterable[int]]
_SIZES: dict[str, _Sizes] = {
    "gather": _to_root,
    "reduce": _to_root,
    "broadcast": lambda args, position, ranks: [_bytes(args[0]) * (position == args[2])] * ranks,
    "scatter": lambda args, position, ranks: map(_bytes, args[1][0]) if position == args[3] else [0] * ranks,
    "send": lambda args, position, ranks: [_bytes(args[0]) * (rank == args[2]) for rank in range(ranks)],
    "recv": lambda args, position, ranks: [0] * ranks,
    "recv_any_source": lambda args, position, ranks: [0] * ranks,
    "alltoall_base": lambda args, position, ranks: _in_rows(args[1], args[4], ranks),
    "alltoall": lambda args, position, ranks: map(_bytes, args[1]),
    "all_to_all_single": lambda args, position, ranks: _in_rows(args[0], args[2], ranks),
}
"""Bytes for each rank of the group. An operator that is not listed sends its whole tensor to every rank."""


def _to_all(args: Sequence[Any], position: int, ranks: int) -> Iterable[int]:
    """The bytes that go to every rank: the second argument's, or the first's if the second is no tensor."""
    return [_bytes(args[1] if isinstance(args[1], (Tensor, list)) else args[0])] * ranks
