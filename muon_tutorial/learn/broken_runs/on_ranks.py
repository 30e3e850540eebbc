"""Lesson 15 on real ranks: a run of the loop with its mistakes in it, and what every rank wrote down.

A rank that waits in vain reports whom it waited for, and in which line, instead of failing.
``oracle`` is the same training in one process, without a single call.
"""

from __future__ import annotations

import functools
import json
import random
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...plan.grid import Grid
from ..inputs import measure
from .broken import ALL, HANGS, Fault, class_of
from .training_rank import (
    BATCHES,
    DECAY,
    LR,
    MEMORY,
    RUNGS,
    SHAPES,
    STEPS,
    Notebook,
    batch,
    check_grid,
    initial_weights,
    loss_and_gradients,
    rescale,
)

PATIENCE = 3.0
"""Seconds that a rank waits for another before it gives up; a frozen run costs as much."""
LETTERS = {
    "A": ("another seed",),
    "B": ("skipped call",),
    "C": ("shard's shape",),
    "D": ("order of calls",),
    "E": ("no bug",),
    "F": ("stale momentum",),
    "G": ("order of parameters", "not averaged"),
}
"""What is wrong with each anonymous run. Do not look here before you have found it."""

Rungs = Mapping[tuple[int, str], Mapping[str, Tensor | None]]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank sends back: its notes, and where it waited in vain: the error, the line, and when."""

    notes: Notebook
    stuck: str = ""
    lines: tuple[str, ...] = ()
    at: float = 0.0
    flight: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run of the loop, as all ranks wrote it down, beside the oracle."""

    dp: int
    tp: int
    seed: int
    reports: tuple[RankReport, ...]
    name: str = "the run"

    @property
    def grid(self) -> Grid:
        """The grid of the run."""
        return Grid.of(dp=self.dp, tp=self.tp)

    @property
    def hangs(self) -> bool:
        """Whether a rank waited in vain."""
        return any(report.stuck for report in self.reports)

    def expected(self, rank: int) -> Rungs:
        """What a rank should have written down: the oracle's results, the rows that it holds."""
        at = self.grid.at(rank)
        owned = [name for number, name in enumerate(SHAPES) if number % self.dp == at["dp"]]
        found: dict[tuple[int, str], dict[str, Tensor]] = {}
        for (step, rung, place), results in oracle(self.dp, self.seed).items():
            if place in (ALL, at["dp"]):
                names = owned if rung == "update" else results
                found[step, rung] = {name: results[name].chunk(self.tp)[at["tp"]] for name in names}
        return found

    def __repr__(self) -> str:
        return f"TrainingRun({self.name}: {self.dp} × {self.tp} ranks)"


@functools.cache
def oracle(dp: int, seed: int, steps: int = STEPS) -> dict[tuple[int, str, int], dict[str, Tensor]]:
    """Every result of a sound run, by step, rung and dp position (-1: the same on all), in one process.

    No rank, no group, no call: what cannot hang or disagree with itself can be held against those that can.
    """
    with measure.one_thread():
        weights = initial_weights(seed)
        memory = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        found = {(0, "start", ALL): weights}
        for step in range(1, steps + 1):
            own = [_gradients(weights, seed, step, place) for place in range(dp)]
            found |= {(step, "gradient", place): each for place, each in enumerate(own)}
            mean = {name: torch.stack([each[name] for each in own]).sum(0) / dp for name in weights}
            memory = {name: MEMORY * memory[name] + (1 - MEMORY) * mean[name] for name in weights}
            mixed = {name: (1 - MEMORY) * mean[name] + MEMORY * memory[name] for name in weights}
            update = {
                name: zeropower_via_newtonschulz(each).float() * rescale(each.shape)
                for name, each in mixed.items()
            }
            weights = {name: weights[name] * (1 - LR * DECAY) - LR * update[name] for name in weights}
            rungs = zip(RUNGS[2:], (mean, memory, mixed, update, weights), strict=True)
            found |= {(step, rung, ALL): results for rung, results in rungs}
    return found


def _gradients(weights: Mapping[str, Tensor], seed: int, step: int, place: int) -> dict[str, Tensor]:
    return loss_and_gradients(weights, [batch(seed, step, place, number) for number in range(BATCHES)])[1]


def run_with(
    *faults: Fault, dp: int, tp: int, seed: int = 0, backend: str = "gloo", name: str = "the run"
) -> TrainingRun:
    """Train on real ranks with these mistakes in the loop; ranks that wait in vain give up after a while."""
    check_grid(dp, tp)
    reports = launch(train, dp * tp, args=(dp, tp, seed, faults), backend=backend, timeout=PATIENCE)
    return TrainingRun(dp, tp, seed, tuple(reports), name)


def train(rank: int, dp: int, tp: int, seed: int, faults: tuple[Fault, ...]) -> RankReport:
    """One rank's part. A wait in vain is reported; any other error is the caller's."""
    mine = class_of(faults)(rank, dp, tp, seed, faults)
    try:
        mine.train(STEPS)
    except RuntimeError as error:
        if not mine.notes.calls or mine.notes.calls[-1].stop is not None:
            raise
        return RankReport(mine.notes, str(error).splitlines()[0], own_lines(error), time.time(), flight())
    return RankReport(mine.notes, flight=flight())


def own_lines(error: BaseException) -> tuple[str, ...]:
    """Where in this lesson's loop an error came from, the outermost call first: "step.py:12 in load: …"."""
    here = Path(__file__).parent.name
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).parent.name == here
    ]
    return tuple(f"{Path(each.filename).name}, in {each.name}: {each.line}" for each in frames[1:])


def flight() -> tuple[Mapping[str, Any], ...]:
    """What PyTorch's flight recorder has of this process; nothing where it is off or missing."""
    try:
        dump: Any = torch._C._distributed_c10d
        text = dump._dump_fr_trace_json(True, False)
        return tuple(json.loads(text)["entries"])
    except Exception:  # a private function: whatever it does elsewhere, the lesson goes on without it
        return ()


def faults_of(letter: str, dp: int, tp: int, seed: int) -> tuple[Fault, ...]:
    """The mistakes of an anonymous run: its kinds are fixed, their ranks and steps follow from the seed."""
    kinds = LETTERS[letter]
    chosen = random.Random(f"{letter} {dp} {tp} {seed}")
    rank = chosen.randrange(dp * tp)
    if kinds == ("stale momentum",):  # of a rank that owns matrices
        rank = Grid.of(dp=dp, tp=tp).rank({"dp": rank // tp % min(dp, len(SHAPES)), "tp": rank % tp})
    everywhere = {"shard's shape": 1, "not averaged": 2}
    return tuple(
        Fault(kind, ALL, everywhere[kind]) if kind in everywhere else Fault(kind, rank, _first_step(kind))
        for kind in kinds
    )


def _first_step(kind: str) -> int:
    return {"another seed": 0, "order of parameters": 1, "no bug": 2}.get(kind, 2)


def hero_faults() -> tuple[Fault, ...]:
    """What is wrong with the run of the first picture."""
    return (Fault("leaves early", 2, 3),)


__all__ = ["HANGS", "LETTERS", "TrainingRun", "run_with"]
