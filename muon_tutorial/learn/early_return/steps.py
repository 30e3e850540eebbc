"""Lesson 12: the package's own step in the timed world, by link and window, and recorded steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ... import Grid, Matrix, Plan, zero1
from ...evidence.memory import PeakMemory
from ...evidence.predict import step_over_ones
from ...timing.machine import Link, Machine, find_machine, machine_from
from ...timing.timeline import Recording, StepTimeline, read_recording
from ...timing.timeline_cases import TimelineTask, predict_case, predict_step
from ...worlds.shadow import walk_alone

LOOPBACK = "loopback"
RATES = {"20 Mbit/s": 2.5e6, "200 Mbit/s": 2.5e7, "1 Gbit/s": 1.25e8}
LINKS = (*RATES, LOOPBACK)
MOST = 6
SIDE = 256


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A predicted step: its timeline, and the peak of the bytes that rank 0 allocates in it."""

    timeline: StepTimeline
    peak: int

    @property
    def milliseconds(self) -> float:
        return 1000 * self.timeline.seconds


def plan_of(ranks: int, buckets: int = MOST, side: int = SIDE) -> Plan:
    """``zero1``, with one matrix for each rank in every bucket."""
    matrices = [Matrix(i, f"m{i}", (side, side)) for i in range(buckets * ranks)]
    return zero1(matrices, Grid.of(dp=ranks), cut="bucket", round_bytes=4 * ranks * side**2)


def machine_of(link: str) -> Machine:
    """A laptop's processor for each rank, and a network card; on loopback, one core computes and sends."""
    laptop = find_machine("laptop")
    if link == LOOPBACK:
        return replace(laptop, cores=1)
    card = Link(RATES[link], 1e-4)
    return replace(laptop, inside=card, cores=None, algorithm="ring", byte=0.0, message=0.0)


def predict(link: str, window: int) -> PredictedStep:
    """The timed world's prediction for a step of two ranks."""
    plan, machine = plan_of(2), machine_of(link)
    step = step_over_ones(plan, plan.grid.at(0), torch.device("meta"), window)
    with PeakMemory() as memory:
        walk_alone(step.walk(), lambda request: None)
    return PredictedStep(predict_step(plan, machine, window), memory.peak)


def recorded() -> Recording:
    """Real steps on a bare loopback and on one with limited bandwidth."""
    return read_recording(Path(__file__).parents[1] / "inputs" / "recorded" / "timelines.json")


def say_about(recording: Recording) -> str:
    return "\n".join(f"{name + ':':<9} {value}" for name, value in recording.about.items())


def predict_recorded(recording: Recording) -> dict[tuple[str, int, str], StepTimeline]:
    """The timed world's prediction for each recorded step, with the machine's numbers from the recording."""
    task, machine = TimelineTask(**recording.task), machine_from(recording.machine)
    found = {}
    for step in recording.steps:
        there = machine if step.rate is None else machine.on_bus(step.rate)
        key = (step.strategy, step.window, step.link)
        found[key] = predict_case(task, there, step.strategy, step.window)
    return found


def say_gains(recording: Recording, with_window_3: Callable[[float, float, int], float]) -> str:
    """A table. Window 1: rank 0's work and waits, and the step. Window 3: the step and two predictions."""
    expected = predict_recorded(recording)
    lines = [f"{'window':<18}{1:>7}{1:>7}{1:>8}{3:>8}{3:>8}{3:>14}"]
    lines += [
        f"{'milliseconds':<18}{'works':>7}{'waits':>7}{'step':>8}{'step':>8}{'yours':>8}{'timed world':>14}"
    ]
    for one in recording.steps:
        if one.window == 1:
            works, waits = works_and_waits(one.timeline)
            steps = (recording.step(one.strategy, window, one.link).seconds for window in (1, 3))
            took = "".join(f"{1000 * statistics.median(seconds):>8.0f}" for seconds in steps)
            yours = with_window_3(works, waits, recording.task["count"])
            timed = 1000 * expected[one.strategy, 3, one.link].seconds
            where = f"{one.strategy}, {one.link}"
            lines.append(f"{where:<18}{works:>7.0f}{waits:>7.0f}{took}{yours:>8.0f}{timed:>14.0f}")
    return "\n".join(lines)


def works_and_waits(timeline: StepTimeline) -> tuple[float, float]:
    """How many milliseconds rank 0 works, and how many it waits."""
    works = timeline.total("product", 0) + timeline.total("copy", 0)
    return 1000 * works, 1000 * timeline.total("wait", 0)
