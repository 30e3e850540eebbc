"""Lesson 15: trains on real ranks with a loop given as text, and in one process to compare with."""

from __future__ import annotations

import functools
import json
import linecache
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...plan.grid import Grid
from ..inputs import measure
from . import loop, training_rank
from .training_rank import DECAY, LR, MEMORY, RUNGS, SHAPES, STEPS, Matrices, Notebook, rescale

PATIENCE = 3.0
"""How many seconds a rank waits for another before it gives up. A run that hangs takes this long."""
FILE = "loop.py"
"""The file's name in a stack."""

ALL = -1
Rungs = Mapping[tuple[int, str], Matrices]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's notes; if the rank waited too long, also its error, its stack and the time."""

    notes: Notebook
    stuck: str = ""
    stack: str = ""
    at: float = 0.0
    flight: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run of the loop: all ranks' reports, and the oracle's results to compare with."""

    grid: Grid
    seed: int
    reports: tuple[RankReport, ...]
    name: str = "the run"

    @property
    def hangs(self) -> bool:
        """Whether a rank gave up waiting."""
        return any(report.stuck for report in self.reports)

    def expected(self, rank: int) -> Rungs:
        """The results that a rank should have: the oracle's, cut to the rows that it holds."""
        at, (dp, tp) = self.grid.at(rank), self.grid.sizes
        owned = [name for number, name in enumerate(SHAPES) if number % dp == at["dp"]]
        found: dict[tuple[int, str], dict[str, Tensor]] = {}
        for (step, rung, place), results in oracle(dp, self.seed).items():
            if place in (ALL, at["dp"]):
                names = owned if rung == "update" else results
                found[step, rung] = {name: results[name].chunk(tp)[at["tp"]] for name in names}
        return found

    def __repr__(self) -> str:
        return f"TrainingRun({self.name}: {self.grid})"


@functools.cache
def oracle(dp: int, seed: int) -> dict[tuple[int, str, int], dict[str, Tensor]]:
    """Every result of a sound run in one process, by step, rung and dp position (-1 if all have the same)."""
    with measure.one_thread():
        weights = training_rank.initial_weights(seed)
        memory = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        found = {(0, "start", ALL): weights}
        for step in range(1, STEPS + 1):
            batches = [training_rank.batches_of(seed, step, place) for place in range(dp)]
            own = [training_rank.loss_and_gradients(weights, each)[1] for each in batches]
            found |= {(step, "gradient", place): each for place, each in enumerate(own)}
            mean = {name: torch.stack([each[name] for each in own]).sum(0) / dp for name in weights}
            memory = {name: MEMORY * memory[name] + (1 - MEMORY) * mean[name] for name in weights}
            mixed = {name: (1 - MEMORY) * mean[name] + MEMORY * memory[name] for name in weights}
            update = {n: zeropower_via_newtonschulz(m).float() * rescale(m.shape) for n, m in mixed.items()}
            weights = {name: weights[name] * (1 - LR * DECAY) - LR * update[name] for name in weights}
            rungs = zip(RUNGS[2:], (mean, memory, mixed, update, weights), strict=True)
            found |= {(step, rung, ALL): results for rung, results in rungs}
    return found


def run_file(text: str, dp: int, tp: int, seed: int, backend: str, name: str) -> TrainingRun:
    """Train on real ranks with the loop in ``text``; ranks that wait too long give up."""
    reports = launch(train, dp * tp, args=(dp, tp, seed, text), backend=backend, timeout=PATIENCE)
    return TrainingRun(Grid.of(dp=dp, tp=tp), seed, tuple(reports), name)


def train(rank: int, dp: int, tp: int, seed: int, text: str) -> RankReport:
    """One rank's part. A wait that times out is reported; any other error is raised."""
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    names = dict(vars(loop))
    exec(compile(text, FILE, "exec"), names)
    mine = names["Loop"](rank, dp, tp, seed)
    try:
        mine.train(STEPS)
    except RuntimeError as error:
        if not mine.notes.calls or mine.notes.calls[-1].stop is not None:
            raise
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == FILE]
        stack = "".join(traceback.format_list(frames))  # the innermost call last, as Python prints it
        return RankReport(mine.notes, str(error).splitlines()[0], stack, time.time(), flight())
    return RankReport(mine.notes, flight=flight())


def flight() -> tuple[Mapping[str, Any], ...]:
    """This process's entries in PyTorch's flight recorder; empty if the recorder is off or missing."""
    try:
        dump: Any = torch._C._distributed_c10d
        return tuple(json.loads(dump._dump_fr_trace_json(True, False))["entries"])
    except Exception:  # a private function: if it fails, the lesson goes on without it
        return ()
