"""The hard exercise of lesson 08: each rank's columns of the whole UVᵀ, within a budget of bytes.

Inside ``counting``, ``dist.all_reduce`` and ``dist.all_gather`` count what a rank sends on a ring; other
collectives are refused, so that all bytes are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...launching.launch import launch
from ..exercises.on_real_ranks import watching
from .cuts import SHAPE, matrices, my_piece
from .on_ranks import tp_group

Update = Callable[[Tensor, Any], Any]
JUDGED = ("real", "power law")
_REFUSED = (
    *("all_gather_into_tensor", "all_gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("broadcast", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "isend"),
    "batch_isend_irecv",
)


@dataclass(slots=True)
class SentBytes:
    """Bytes that this rank has sent, counted as on a ring."""

    count: float = 0.0


@contextmanager
def counting() -> Iterator[SentBytes]:
    """Count what this process sends inside."""
    sent = SentBytes()

    def count(original: Callable[..., Any], *given: Any, group: Any = None, **named: Any) -> Any:
        name, ranks = original.__name__, dist.get_world_size(group)
        place, times = {"all_reduce": (0, 2 * (ranks - 1) / ranks), "all_gather": (1, ranks - 1)}[name]
        if len(given) <= place:
            raise ValueError(f"give dist.{name} its tensors without their names, then group=group")
        sent.count += given[place].nbytes * times
        return original(*given, group=group, **named)

    def refuse(original: Callable[..., Any], *given: Any, **named: Any) -> None:
        what = f"dist.{original.__name__} is not counted here"
        raise ValueError(f"{what}: use dist.all_reduce or dist.all_gather")

    with watching(count, "all_reduce", "all_gather"), watching(refuse, *_REFUSED):
        yield sent


@dataclass(frozen=True, slots=True)
class SurvivalRun:
    """By rank and matrix: the function's result, and the bytes that the rank sent in the call."""

    tp: int
    results: tuple[dict[str, tuple[Any, float]], ...]

    @property
    def sent(self) -> float:
        """The bytes that the busiest rank sent for one matrix."""
        return max(count for mine in self.results for _, count in mine.values())


def budget(tp: int) -> float:
    """Bytes that a rank sends in an all_reduce of a 64 × 64 matrix in float32."""
    return 2 * (tp - 1) / tp * SHAPE[0] ** 2 * 4


def say_budget(tp: int) -> str:
    """The bytes that a gather of the whole costs a rank, and the budget."""
    gathered = (tp - 1) * SHAPE[0] * SHAPE[1] // tp * 4
    return f"a gather sends   {gathered:,} bytes a rank\nyour budget      {budget(tp):,.0f} bytes a rank"


def run_survival(function: Update, dp: int, tp: int, backend: str = "gloo") -> SurvivalRun:
    """Run ``function(shard, tp group)`` on real ranks, for each judged matrix in float32, cut by columns."""
    results = launch(
        play_survival, dp * tp, args=(function, dp, tp), backend=backend, output="quiet", timeout=10.0
    )
    return SurvivalRun(tp, tuple(results))


def play_survival(rank: int, function: Update, dp: int, tp: int) -> dict[str, tuple[Any, float]]:
    """One rank's part. All ranks must call."""
    group, found = tp_group(dp, tp), {}
    for name in JUDGED:
        shard = my_piece(matrices()[name].float(), 1, rank % tp, tp)
        with counting() as sent:
            found[name] = function(shard, group), sent.count
    return found


def surviving_update(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's columns of the whole UVᵀ, (GGᵀ)^(-1/2) G. All ranks of the group must call."""
    gram = shard @ shard.T
    dist.all_reduce(gram, group=group)
    values, directions = torch.linalg.eigh(gram)
    return directions @ torch.diag(values.rsqrt()) @ directions.T @ shard
