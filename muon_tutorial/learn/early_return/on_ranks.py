"""Lesson 12 on real ranks: a call that returns early, a reader's loop, and the package's step, recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...evidence.predict import step_over_ones
from ...launching.launch import launch
from ...plan.strategies import Plan
from ...timing.step_recorder import RankNotes, StepRecorder, record_walk, recorded_timeline
from ...timing.timeline import StepTimeline, middle
from ...worlds.live import LiveWorld, build_mesh
from .loops import Loop, RealMatrices, first_wrong, guarded

ROWS = 64


@dataclass(frozen=True, slots=True)
class LoopOnRanks:
    """A loop's run on real ranks: the first wrong turn of each rank, and the timeline."""

    wrong: tuple[int | None, ...]
    timeline: StepTimeline

    def __str__(self) -> str:
        if all(turn is None for turn in self.wrong):
            return f"the bits of one process on all {len(self.wrong)} ranks"
        told = (f"rank {r} from turn {turn} on" for r, turn in enumerate(self.wrong) if turn is not None)
        return f"other bits: {', '.join(told)}"


def run_loop(
    loop: Loop, ranks: int, seed: int, window: int, count: int = 6, backend: str = "gloo"
) -> LoopOnRanks:
    """Run a loop on real ranks, over real matrices, and compare with one process."""
    found = launch(_run_loop, ranks, args=(loop, seed, window, count), backend=backend, output="quiet")
    return LoopOnRanks(tuple(wrong for wrong, _ in found), recorded_timeline([notes for _, notes in found]))


def _run_loop(rank: int, loop: Loop, seed: int, window: int, count: int) -> tuple[int | None, RankNotes]:
    ranks = dist.get_world_size()
    world, recorder = LiveWorld(build_mesh({"dp": ranks})), StepRecorder(rank)
    for _ in range(2):  # the first run only makes the connections
        held = RealMatrices(rank, ranks, seed, rows=ROWS, noting=recorder.product)
        record_walk(world, guarded(loop, count, held.gather, held.work, window), recorder)
    return first_wrong(held, count), recorder.notes[-1]


def record_steps(plan: Plan, windows: Sequence[int], steps: int, backend: str = "gloo") -> list[StepTimeline]:
    """The median of ``steps`` steps of the package's Muon for each window, on real ranks of this machine."""
    args = (plan, tuple(windows), steps)
    found = launch(_record_steps, plan.grid.world_size, args=args, backend=backend, output="quiet")
    by_window = (zip(*(notes[each] for notes in found), strict=True) for each in range(len(windows)))
    return [middle([recorded_timeline(notes) for notes in taken]) for taken in by_window]


def _record_steps(rank: int, plan: Plan, windows: Sequence[int], steps: int) -> list[list[RankNotes]]:
    torch.set_num_threads(1)
    world, recorder = LiveWorld(build_mesh({"dp": plan.grid.world_size})), StepRecorder(rank)
    each = [step_over_ones(plan, world.at, torch.device("cpu"), window) for window in windows]
    # in turns, so that a machine that gets slower does not slow down one window alone
    taken = [[record_walk(world, step.step(), recorder) for step in each] for _ in range(1 + steps)]
    return [list(notes) for notes in zip(*taken[1:], strict=True)]


def say_stopwatch(told: Sequence[tuple[float, float]]) -> str:
    lines = [f"{'rank':<6}{'the call, ms':>14}{'the wait, ms':>14}"]
    for rank, (call, wait) in enumerate(told):
        lines.append(f"{rank:<6}{1000 * call:>14.2f}{1000 * wait:>14.2f}")
    return "\n".join(lines)
