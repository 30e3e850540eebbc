"""Lesson 08 on real ranks: shards gathered by the reader's function, and updates within a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RankFailedError
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...worlds.build_mesh import build_mesh
from ..exercises.on_real_ranks import handed_over, ring_sent, run_or_reference, say_failure, watching
from ..inputs import measure
from ..my_muon.reference import gather_whole
from .cuts import SHAPE, gradient, matrices, my_piece

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


def probe() -> Tensor:
    """A matrix in which every entry encodes its place: row × 256 + column."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def run_gather(function: Gather, dp: int, tp: int, backend: str = "gloo") -> GatherRun:
    """``play_gather`` with the reader's function, or with the reference if it is a stub; prints a failure."""
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
    group, shift = tp_group(dp, tp), rank // tp * probe().numel()  # each tp group has entries of its own
    results = {dim: function(my_piece(probe(), dim, rank % tp, tp) + shift, dim, group) for dim in (1, 0)}
    return {dim: each - shift if isinstance(each, Tensor) else each for dim, each in results.items()}


def tp_group(dp: int, tp: int) -> dist.ProcessGroup:
    """The tp group of this rank. All ranks must call."""
    return build_mesh({"dp": dp, "tp": tp}).get_group("tp")


def say_trouble(error: RankFailedError, dp: int, tp: int) -> str:
    """The first failure, the reader's line of code, and a note if the gather was called without a group."""
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


Seconds = tuple[float, float, float]
"""Seconds on a rank: work on its piece alone; a gather, then work on the whole matrix; only the gather."""


def cost_of_both(rank: int, gather: Gather, dp: int, tp: int, steps: int) -> Seconds:
    """Time Newton–Schulz on this rank's piece, and on the whole after a gather. All ranks must call."""
    piece, group = my_piece(gradient().float(), 1, rank % tp, tp), tp_group(dp, tp)
    dist.barrier()
    alone, both = measure.fastest(steps, zeropower_via_newtonschulz, piece), []
    for _ in range(max(1, steps)):
        whole, only = measure.timed(partial(gather, piece, 1, group))
        _, rest = measure.timed(partial(zeropower_via_newtonschulz, whole))
        both.append((only + rest, only))
    return (alone, *min(both))


def say_cost(costs: Sequence[Seconds], tp: int) -> str:
    piece = SHAPE[0] * SHAPE[1] // tp
    sent = (tp - 1) * piece
    alone, gathered, only = (max(seconds) * 1e3 for seconds in zip(*costs, strict=True))
    return (
        f"entries a rank holds                 {piece:10,}\n"
        f"entries it sends in the gather       {sent:10,}   ({sent * 4:,} bytes in float32)\n"
        f"cores for the {len(costs)} ranks                {measure.cores():10}\n"
        f"Newton–Schulz, its shard alone       {alone:10.2f} ms\n"
        f"gather, then the whole               {gathered:10.2f} ms\n"
        f"of which the gather                  {only:10.2f} ms"
    )


Update = Callable[[Tensor, Any], Any]
JUDGED = ("real", "power law")
_REFUSED = (
    *("all_gather_into_tensor", "all_gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("broadcast", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "isend"),
    "batch_isend_irecv",
)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Note the bytes that this process sends in the block, call by call, counted as on a ring."""
    sent: list[int] = []

    def count(original: Callable[..., Any], *given: Any, group: Any = None, **named: Any) -> Any:
        tensor = handed_over(original, *given, **named)
        sent.append(ring_sent(original.__name__, tensor.nbytes, dist.get_world_size(group)))
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
    results: tuple[dict[str, tuple[Any, int]], ...]

    @property
    def sent(self) -> int:
        return max(count for mine in self.results for _, count in mine.values())


def budget(tp: int) -> int:
    """Bytes that a rank sends in an all_reduce of a 64 × 64 matrix in float32."""
    return ring_sent("all_reduce", SHAPE[0] ** 2 * 4, tp)


def say_budget(tp: int) -> str:
    gathered = (tp - 1) * SHAPE[0] * SHAPE[1] // tp * 4
    return f"a gather sends   {gathered:,} bytes a rank\nyour budget      {budget(tp):,.0f} bytes a rank"


def run_survival(function: Update, dp: int, tp: int, backend: str = "gloo") -> SurvivalRun:
    """Run ``function(shard, tp group)`` on real ranks, for each judged matrix in float32, cut by columns."""
    asked: dict[str, Any] = {"args": (function, dp, tp), "backend": backend, "output": "quiet"}
    return SurvivalRun(tp, tuple(launch(play_survival, dp * tp, **asked, timeout=10.0)))


def play_survival(rank: int, function: Update, dp: int, tp: int) -> dict[str, tuple[Any, int]]:
    """One rank's part. All ranks must call."""
    group, found = tp_group(dp, tp), {}
    for name in JUDGED:
        with counting() as sent:
            found[name] = function(my_piece(matrices()[name].float(), 1, rank % tp, tp), group), sum(sent)
    return found


def surviving_update(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's columns of the whole UVᵀ, (GGᵀ)^(-1/2) G. All ranks of the group must call."""
    gram = shard @ shard.T
    dist.all_reduce(gram, group=group)
    values, directions = torch.linalg.eigh(gram)
    return directions @ torch.diag(values.rsqrt()) @ directions.T @ shard
