"""Lesson 08 on real ranks: shards of a matrix gathered by the reader's function, and the gather's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RankFailedError
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...worlds.live import build_mesh, gather_objects
from ..exercises.on_real_ranks import run_or_reference, say_failure
from ..inputs import measure
from .cuts import SHAPE, gradient, my_piece

Gather = Callable[[Tensor, int, Any], Any]


@dataclass(frozen=True, slots=True)
class GatherRun:
    """The ranks' results of a gather, by rank and by the dimension that was cut."""

    dp: int
    tp: int
    results: tuple[dict[int, Any], ...]

    def each(self) -> Iterator[tuple[int, int, Any]]:
        """(rank, dim, result), beginning with the cut by columns."""
        return ((rank, dim, mine[dim]) for dim in (1, 0) for rank, mine in enumerate(self.results))


def gather_whole(piece: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The whole matrix from the pieces of a group's ranks. All of them must call."""
    return torch.cat(gather_objects(piece, group), dim=dim)


def probe() -> Tensor:
    """A matrix in which every entry encodes its place: row × 256 + column."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def run_gather(function: Gather, dp: int, tp: int, backend: str = "gloo") -> GatherRun:
    """As ``play_gather``, but with the reference if ``function`` is a stub; a failure is printed."""
    try:
        return run_or_reference(lambda each: play_gather(each, dp, tp, backend), function, gather_whole)
    except RankFailedError as error:
        print(say_trouble(error, dp, tp))
        return GatherRun(dp, tp, ({1: None, 0: None},) * (dp * tp))


def play_gather(function: Gather, dp: int, tp: int, backend: str) -> GatherRun:
    """Run ``function(piece, dim, tp group)`` on real ranks, for both cuts."""
    results = launch(play, dp * tp, args=(function, dp, tp), backend=backend, timeout=10.0)
    return GatherRun(dp, tp, tuple(results))


def play(rank: int, function: Gather, dp: int, tp: int) -> dict[int, Any]:
    """One rank's part: gather the probe for both cuts."""
    group = tp_group(dp, tp)
    return {dim: function(my_piece(probe(), dim, rank % tp, tp), dim, group) for dim in (1, 0)}


def tp_group(dp: int, tp: int) -> dist.ProcessGroup:
    """The tp group of this rank. All ranks must call."""
    return build_mesh({"dp": dp, "tp": tp}).get_group("tp")


def say_trouble(error: RankFailedError, dp: int, tp: int) -> str:
    """The first rank's failure and the reader's line, and the reason if the group was left out."""
    told = say_failure(error).split("\nThe other ranks:")[0]
    if dp == 1 or f"expected length {dp * tp}, got {tp}" not in str(error):
        return told
    who = f"all {dp * tp} ranks of the grid answer, not the {tp} of your tp group"
    return f"{told}\nWithout group=group {who}."


def first_wrong(result: Tensor) -> tuple[int, int, int | None] | None:
    """Row, column and value at the first wrong place; None if all entries are right."""
    wrong = (result != probe()).flatten()
    if not bool(wrong.any()):
        return None
    place = int(wrong.int().argmax())
    value = float(result.flatten()[place])
    inside = value.is_integer() and 0 <= value < probe().numel()
    return place // SHAPE[1], place % SHAPE[1], int(value) if inside else None


@dataclass(frozen=True, slots=True)
class GatherSeconds:
    """Seconds on a rank: for its piece alone, for a gather and the whole matrix, and for only that gather."""

    alone: float
    gathered: float
    gather_only: float


def cost_of_both(rank: int, gather: Gather, dp: int, tp: int, steps: int) -> GatherSeconds:
    """Time Newton–Schulz on this rank's piece, a gather, and both for the whole. All ranks must call."""
    piece, group = my_piece(gradient().float(), 1, rank % tp, tp), tp_group(dp, tp)
    dist.barrier()
    alone = measure.fastest(steps, zeropower_via_newtonschulz, piece)
    return GatherSeconds(alone, *min(_gathered_once(gather, piece, group) for _ in range(max(1, steps))))


def _gathered_once(gather: Gather, piece: Tensor, group: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds of a gather plus Newton–Schulz, and of the gather alone."""
    begin = time.perf_counter()
    whole = gather(piece, 1, group)
    arrived = time.perf_counter()
    zeropower_via_newtonschulz(whole)
    return time.perf_counter() - begin, arrived - begin


def say_cost(costs: Sequence[GatherSeconds], tp: int) -> str:
    """What a rank sends, and what the slowest rank took, in words."""
    piece = SHAPE[0] * SHAPE[1] // tp
    sent = (tp - 1) * piece
    alone, gathered, only = (
        max(getattr(cost, name) for cost in costs) * 1e3 for name in GatherSeconds.__slots__
    )
    return (
        f"entries a rank holds                 {piece:10,}\n"
        f"entries it sends in the gather       {sent:10,}   ({sent * 4:,} bytes in float32)\n"
        f"cores for the {len(costs)} ranks                {measure.cores():10}\n"
        f"Newton–Schulz, its shard alone       {alone:10.2f} ms\n"
        f"gather, then the whole               {gathered:10.2f} ms\n"
        f"of which the gather                  {only:10.2f} ms"
    )
