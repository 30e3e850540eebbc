"""Steps that are both recorded and predicted, for two strategies and two windows on one grid.

Real ranks and the timed world walk the same plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import UsageError
from ..evidence.predict import step_over_ones
from ..launching.launch import launch
from ..plan.grid import Grid
from ..plan.layout import Shard
from ..plan.matrix import Matrix
from ..plan.strategies import Builder, Plan, owner, zero1
from ..worlds.build_mesh import build_mesh
from ..worlds.live import LiveWorld
from .machine import Machine
from .step_recorder import RankNotes, StepRecorder, record_walk, recorded_timeline
from .timed_world import TimedRun, TimedWorld
from .timeline import StepTimeline, predicted_timeline

CASES = tuple((strategy, window) for strategy in ("zero1", "owner") for window in (1, 3))
"""Strategies with their windows."""
WARMUP = 1
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True)
class TimelineTask:
    """The task: some steps of ``count`` matrices of ``side`` × ``side`` on a grid of ``dp`` ranks."""

    dp: int = 4
    count: int = 12
    side: int = 384
    steps: int = 5

    def plan(self, strategy: str) -> Plan:
        """The plan of a strategy. ``owner`` expects that each matrix is cut over dp, as with FSDP2.

        Buckets have two matrices or, with ``owner``, one for each rank.
        """
        cuts = (("dp", Shard(0)),) if strategy == "owner" else ()
        matrices = [Matrix(i, f"m{i}", (self.side, self.side), cuts) for i in range(self.count)]
        builders: dict[str, Builder] = {"zero1": partial(zero1, cut="bucket"), "owner": owner}
        limit = self.side**2 * (2 if strategy == "owner" else 2 * 4)  # one matrix in bf16, or two in fp32
        return builders[strategy](matrices, Grid.of(dp=self.dp), round_bytes=limit)


def record_cases(task: TimelineTask) -> list[list[StepTimeline]]:
    """The steps of each case, recorded on real ranks. Each round takes one step of every case."""
    by_rank = launch(_record_on_rank, task.dp, args=(task,), timeout=120.0, output="quiet")
    by_case = (zip(*(notes[case] for notes in by_rank), strict=True) for case in range(len(CASES)))
    return [[recorded_timeline(notes) for notes in steps] for steps in by_case]


def _record_on_rank(rank: int, task: TimelineTask) -> list[list[RankNotes]]:
    torch.set_num_threads(1)
    world, cpu = LiveWorld(build_mesh({"dp": task.dp})), torch.device("cpu")
    cases = [step_over_ones(task.plan(strategy), world.at, cpu, window) for strategy, window in CASES]
    rounds = [
        [record_walk(world, step.walk(), StepRecorder(rank)) for step in cases]
        for _ in range(WARMUP + task.steps)
    ]
    return [list(case) for case in zip(*rounds[WARMUP:], strict=True)]


def predict_case(task: TimelineTask, machine: Machine, strategy: str, window: int) -> StepTimeline:
    return predict_step(task.plan(strategy), machine, window)


def predict_step(plan: Plan, machine: Machine, window: int) -> StepTimeline:
    return predicted_timeline(walk_ranks(plan, machine, window))


def walk_ranks(plan: Plan, machine: Machine, window: int = 1, **settings: Any) -> TimedRun:
    """Walk a plan's step on all ranks of a timed world. ``settings`` are arguments of the optimizer."""
    places = (plan.grid.at(rank) for rank in plan.grid.ranks)
    steps = [step_over_ones(plan, at, torch.device("meta"), window, **settings) for at in places]
    return TimedWorld(plan.grid, machine).run([step.walk() for step in steps])


def bytes_of(rate: str) -> float:
    """Bytes per second of a rate in the notation of Linux's ``tc``.

    Raises:
        UsageError: the rate has another form.

    >>> bytes_of("200mbit")
    25000000.0
    """
    for unit, bits in _UNITS.items():
        if rate.endswith(unit) and rate.removesuffix(unit).replace(".", "", 1).isdigit():
            return float(rate.removesuffix(unit)) * bits / 8
    raise UsageError(f"a rate is a number and a unit, such as 200mbit or 1gbit; got {rate!r}")
