"""Times contenders that take turns within each round, so that other load slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from muon_tutorial.evidence.tables import TableRow, median_and_spread
from muon_tutorial.step.step import PlanStep
from muon_tutorial.worlds.live import LiveWorld

Key = TypeVar("Key")


def take_turns(steps: Mapping[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """One rank's seconds of each step, by round, after a round to warm up. All ranks of a group call this."""
    seconds: dict[Key, list[float]] = {one: [] for one in steps}
    for number in range(rounds + 1):
        for one, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            took = timed(step)
            seconds[one] += [took] if number else []
    return seconds


def walk(world: LiveWorld, step: PlanStep) -> None:
    world.run(step.walk())


def timed(run: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds from a call until it returns or, on a GPU, until the GPU has finished its work."""
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each round's seconds on the rank that is slowest in it."""
    return [max(turn) for turn in zip(*by_rank, strict=True)]


def ratios_by_round(these: Sequence[float], those: Sequence[float]) -> tuple[float, float, float]:
    """Take each round's ratio; return the median and the quartiles of these ratios."""
    return median_and_spread([a / b for a, b in zip(these, those, strict=True)])


def in_milliseconds(seconds: Sequence[float]) -> TableRow:
    """Columns of a table: the median and the quartiles over rounds."""
    names = ("ms", "quarter below", "quarter above")
    return {name: round(1e3 * one, 1) for name, one in zip(names, median_and_spread(seconds), strict=True)}
