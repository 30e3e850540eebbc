"""Lesson 11: the reference's three functions for ``Shard(0)``, at once or later, and its config for HSDP.

The way out is one ``all_to_all_single`` with split sizes, zero among them; the way back is the same call with
the two lists of sizes exchanged. Light to import: every rank does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...plan.layout import Shard

State = dict[str, Any]


def rows_of(rows: int, ranks: int) -> list[int]:
    """How many rows each rank holds of a matrix that ``Shard(0)`` cuts.

    >>> rows_of(8, 4)
    [2, 2, 2, 2]
    """
    return list(Shard(0).lengths(rows, ranks))


def assign(params: Sequence[Tensor], state: State) -> dict[int, int]:
    """Deal the parameters out in turn to the ranks of ``state["group"]``, by their global numbers."""
    ranks = dist.get_process_group_ranks(state["group"])
    return {index: ranks[index % len(ranks)] for index in range(len(params))}


def splits(owner: int, state: State) -> tuple[list[int], list[int]]:
    """How many elements this rank sends to each rank of its group, and takes from each, on the way out."""
    ranks = dist.get_process_group_ranks(state["group"])
    rows, columns = state["shapes"][state["param_idx"]]
    send = [math.prod(state["local_shape"]) * (rank == owner) for rank in ranks]
    take = [length * columns * (dist.get_rank() == owner) for length in rows_of(rows, len(ranks))]
    return send, take


def gather(momentum_buffer: Tensor, dst_rank: int, state: State) -> Tensor | None:
    """The whole matrix on its owner, None elsewhere. All ranks of the group must call."""
    send, take = splits(dst_rank, state)
    whole = momentum_buffer.new_empty(sum(take))
    dist.all_to_all_single(whole, momentum_buffer.flatten(), take, send, group=state["group"])
    return whole.view(state["shapes"][state["param_idx"]]) if dist.get_rank() == dst_rank else None


def redistribute(update: Tensor | None, src_rank: int, state: State) -> Tensor:
    """This rank's rows of the update. All ranks of the group must call."""
    take, send = splits(src_rank, state)
    mine = torch.empty(sum(take), dtype=torch.bfloat16)
    flat = mine.new_empty(0) if update is None else update.flatten()
    dist.all_to_all_single(mine, flat, take, send, group=state["group"])
    return mine.view(state["local_shape"])


@dataclass(frozen=True, slots=True)
class LaterTensor:
    """A tensor that is still on its way. ``wait`` returns it in its shape, or None where there is none."""

    work: Any
    tensor: Tensor
    shape: tuple[int, ...] | None

    def wait(self) -> Tensor | None:
        """Wait until it has come."""
        self.work.wait()
        return None if self.shape is None else self.tensor.view(self.shape)


def gather_later(momentum_buffer: Tensor, dst_rank: int, state: State) -> LaterTensor:
    """As ``gather``, and returns at once."""
    send, take = splits(dst_rank, state)
    whole = momentum_buffer.new_empty(sum(take))
    flat = momentum_buffer.flatten()
    work = dist.all_to_all_single(whole, flat, take, send, group=state["group"], async_op=True)
    shape = state["shapes"][state["param_idx"]] if dist.get_rank() == dst_rank else None
    return LaterTensor(work, whole, shape)


def redistribute_later(update: Tensor | None, src_rank: int, state: State) -> LaterTensor:
    """As ``redistribute``, and returns at once."""
    take, send = splits(src_rank, state)
    mine = torch.empty(sum(take), dtype=torch.bfloat16)
    flat = mine.new_empty(0) if update is None else update.flatten()
    work = dist.all_to_all_single(mine, flat, take, send, group=state["group"], async_op=True)
    return LaterTensor(work, mine, state["local_shape"])


@dataclass(frozen=True, slots=True)
class ThreeFunctions:
    """What a reader writes; the reference's, unless given."""

    assign: Callable[..., Any] = assign
    gather: Callable[..., Any] = gather
    redistribute: Callable[..., Any] = redistribute
