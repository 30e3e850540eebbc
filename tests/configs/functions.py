"""A user's own three functions for parameters cut along dimension 0, and versions with handles or bugs.

``state["shards"]`` says whether ranks hold equal runs of rows; otherwise every rank holds all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from muon_tutorial.callbacks.config import DistributedConfig

State = dict[str, Any]


def config(shards: bool, later: str = "") -> DistributedConfig:
    """A config of the plain functions or, with ``later="_later"``, of the functions with handles."""
    gather, redistribute = (globals()[name + later] for name in ("gather", "redistribute"))
    return DistributedConfig(in_turn, gather, redistribute, {"shards": shards})


def in_turn(params: list[Tensor], state: State) -> dict[int, int]:
    return {index: index % dist.get_world_size() for index in range(len(params))}


def gather(momentum: Tensor, dst_rank: int, state: State) -> Tensor | None:
    """Gather the rows on ``dst_rank``, and wait for them."""
    if not state["shards"]:
        return momentum if dist.get_rank() == dst_rank else None
    pieces = pieces_at(dst_rank, momentum)
    dist.gather(momentum, pieces, dst=dst_rank)
    return None if pieces is None else torch.cat(pieces)


def redistribute(update: Tensor | None, src_rank: int, state: State) -> Tensor:
    """Return the update's rows to all ranks, and wait. ``state`` has the shape of a rank's part."""
    mine = torch.empty(state["local_shape"], dtype=torch.bfloat16)
    if state["shards"]:
        dist.scatter(mine, None if update is None else chunks(update), src=src_rank)
    else:
        mine = mine if update is None else update
        dist.broadcast(mine, src=src_rank)
    return mine


def pieces_at(dst_rank: int, momentum: Tensor) -> list[Tensor] | None:
    """Buffers for every rank's piece, on the rank that gathers them."""
    at_home = dist.get_rank() == dst_rank
    return [torch.empty_like(momentum) for _ in range(dist.get_world_size())] if at_home else None


def chunks(update: Tensor) -> list[Tensor]:
    return [chunk.contiguous() for chunk in update.chunk(dist.get_world_size())]


@dataclass
class Handle:
    """The result of ``async_op=True``, with its tensor."""

    work: dist.Work | None
    pieces: list[Tensor] | None

    def wait(self) -> Tensor | None:
        if self.work is not None:
            self.work.wait()
        return None if self.pieces is None else torch.cat(self.pieces)


def gather_later(momentum: Tensor, dst_rank: int, state: State) -> Handle:
    pieces = pieces_at(dst_rank, momentum)
    return Handle(dist.gather(momentum, pieces, dst=dst_rank, async_op=True), pieces)


def redistribute_later(update: Tensor | None, src_rank: int, state: State) -> Handle:
    mine = torch.empty(state["local_shape"], dtype=torch.bfloat16)
    parts = None if update is None else chunks(update)
    return Handle(dist.scatter(mine, parts, src=src_rank, async_op=True), [mine])


def altered(name: str, alter: Callable[..., Any]) -> Callable[[Any, int, State], Any]:
    """One of the functions above with a bug: ``alter`` gets its result, its argument and the state."""
    return lambda given, rank, state: alter(globals()[name](given, rank, state), given, state)


def wrapped(tensor: Tensor | None, state: State) -> Tensor | None:
    return None if tensor is None else DTensor.from_local(tensor, state["mesh"], [Shard(0)], run_check=False)


# Each bug, and what the error must say about it.
BROKEN: Mapping[str, tuple[str, Callable[..., Any], str]] = {
    "wrong shape": ("gather", lambda full, *_: None if full is None else full[0], "cannot hold this rank's"),
    "nothing": ("gather", lambda *_: None, "must return the full plain tensor on its owner, got None"),
    "everywhere": ("gather", lambda _, momentum, state: momentum, "must return None on every rank except 0"),
    "work": ("gather_later", lambda handle, *_: handle.work, "a bare Work"),
    "wrapped": (
        "gather",
        lambda full, _, state: wrapped(full, state),
        "must return the full plain tensor on its owner, got a DTensor",
    ),
    "raises": ("gather", lambda _, momentum, state: state["tp_group"], "raised KeyError: 'tp_group'"),
    "no update": ("redistribute", lambda *_: None, "this rank's part of the update, shape (4, 5); got None"),
    "whole update": ("redistribute", lambda _, update, state: update, "this rank's part of the update"),
    "update's work": ("redistribute_later", lambda handle, *_: handle.work, "a bare Work"),
    "update wrapped": ("redistribute", lambda mine, _, state: wrapped(mine, state), "got a DTensor with"),
}


def assign_raises_on_one(params: list[Tensor], state: State) -> dict[int, int]:
    if dist.get_rank() == 1:
        raise RuntimeError("no such host")
    return in_turn(params, state)


def all_to(rank: int, params: list[Tensor]) -> dict[int, int]:
    return dict.fromkeys(range(len(params)), rank)


WRONG_ASSIGNMENTS: Mapping[str, tuple[Callable[[list[Tensor], State], Any], str, str]] = {
    "nothing": (lambda params, state: None, "ConfigError", "must return a dict"),
    "too few": (lambda params, state: {0: 0}, "ConfigError", "missing: [1, 2]"),
    "out of range": (
        lambda params, state: all_to(dist.get_world_size(), params),
        "ConfigError",
        "gives parameter 0 to rank 2; its ranks are [0, 1]",
    ),
    "a rank disagrees": (
        lambda params, state: all_to(int(dist.get_rank() == 1), params),
        "PlanMismatchError",
        "to rank 1",
    ),
    "a rank raises": (assign_raises_on_one, "ConfigError, PlanMismatchError", "no such host"),
}
