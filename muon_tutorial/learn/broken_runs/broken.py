"""The patients of lesson 15: copies of the loop's file, each with a mistake that people really make."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

from .loop import Loop
from .on_ranks import TrainingRun, oracle, run_file
from .training_rank import STEPS, batches_of, check_grid, loss_and_gradients

Lines = tuple[str, str]
"""Sound lines of the file, and the lines that replace them."""


@dataclass(frozen=True, slots=True)
class Patient:
    """A mistake, or two that hide each other: the planted lines, and the story told after the repair."""

    planted: tuple[Lines, ...]
    story: str


_SKIPS = """\
        if self.loss < {low}:  # it knows this batch by heart, so there is nothing to average
            self.mean = {{name: torch.zeros_like(piece) for name, piece in self.mine.items()}}
            return
"""
_LOGS = """\
        if self.loss > {high}:  # alarming, so log it at once
            self.log()
"""
_AVERAGE = "        order = list(self.gradients)\n"
_SORTS = "        order = sorted(self.gradients, key=lambda name: -self.gradients[name].norm())\n"
_GRADIENT = '        self.keep("gradient", self.gradients)\n'
_SHARE = "        for name, update in self.updates.items():\n"
_RESTARTED = """\
        if self.rank == 1 and self.step == 2:  # this node was restarted, with an older configuration
            self.lr = self.lr / 2
"""

PATIENTS = {
    "hang": Patient(
        (("range(1, steps + 1)", "range(1, steps + 1 - (self.rank == 2))"),),
        "Rank 2's data ends a step before the others', so it leaves the loop, and its groups wait for it.",
    ),
    "lie": Patient(
        ((_SHARE, _RESTARTED + _SHARE),),
        "Rank 1 applies the right update at the wrong rate, and shares the result with its dp group.",
    ),
    "A": Patient(
        (("return self.seed\n", "return self.seed + self.rank\n"),),
        "Data wants a seed for each rank, weights want one for all. Owners shared their rows: copies agree.",
    ),
    "B": Patient(
        ((_AVERAGE, _SKIPS + _AVERAGE),),
        "A call must not depend on a rank's own numbers: one rank skipped the call, so its group waited.",
    ),
    "C": Patient(
        (("rescale(SHAPES[name])", "rescale(tuple(self.mine[name].shape))"),),
        "The factor follows from the whole matrix's shape, and tp has left this rank only some of its rows.",
    ),
    "D": Patient(
        ((_GRADIENT, _GRADIENT + _LOGS),),
        "All ranks must make the same calls in the same order, and this one was alarmed by its own loss.",
    ),
    "E": Patient(
        (("in range(BATCHES)", "in reversed(range(BATCHES))"),),
        "The same batches are added up in another order, so last bits differ. Nothing has to be repaired.",
    ),
    "F": Patient(
        ((".mul_(MEMORY).add_(", ".mul(MEMORY).add("),),
        "Without the underscores, the new momentum is computed and thrown away.",
    ),
    "G": Patient(
        (
            (
                _AVERAGE,
                _SORTS,
            ),
            ("group_src=place", "group_src=0"),
        ),
        "Each rank sorted by its own norms. That hid a second mistake: place 0 shared every matrix.",
    ),
}
LETTERS = tuple(letter for letter in PATIENTS if len(letter) == 1)


def file_of(name: str, dp: int, tp: int, seed: int) -> str:
    """The loop's file with a patient's mistake in it."""
    text, (low, high) = inspect.getsource(Loop), _thresholds(dp, seed)
    for sound, broken in PATIENTS[name].planted:
        assert text.count(sound) == 1, sound
        text = text.replace(sound, broken.format(low=low, high=high) if "{" in broken else broken)
    return text


@functools.cache
def _thresholds(dp: int, seed: int) -> tuple[float, float]:
    """A low and a high threshold; only one dp position's loss passes each, and only in one step."""
    found = oracle(dp, seed)
    weights = [found[0, "start", -1], *(found[step, "share", -1] for step in range(1, STEPS))]
    losses = sorted(
        loss_and_gradients(whole, batches_of(seed, step, place))[0]
        for step, whole in enumerate(weights, 1)
        for place in range(dp)
    )
    return round((losses[0] + losses[1]) / 2, 6), round((losses[-1] + losses[-2]) / 2, 6)


def run_patient(name: str, dp: int, tp: int, seed: int = 0, backend: str = "gloo") -> TrainingRun:
    """A patient's run on real ranks."""
    check_grid(dp, tp)
    said = {"hang": "the hanging run", "lie": "the lying run"}.get(name, f"run {name}")
    return run_file(file_of(name, dp, tp, seed), dp, tp, seed, backend, said)
