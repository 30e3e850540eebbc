"""Checks of a recipe, by its optimizer's inputs and its final state.

Several ranks sum in another order than one process. Newton–Schulz rounds its input to bf16, so the last bit
of a gradient can become a bf16 step of the update. That effect is measured, not guessed: the control is the
plain loop with twice as many micro-batches of half the size, in which only the order of the sums changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .recipes import (
    EPOCHS,
    MAX_NORM,
    RECIPES,
    STEPS,
    Notes,
    alone,
    checkpoint,
    differences,
    distance,
    run,
    state_distance,
)

HALVES = ("--batch", "4", "--accumulate", "4")
MARGIN = 3
"""A host's largest allowed distance over the control's: the worst matrix is a different one each time."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One process's run, and its distance from the control, which adds the same numbers in another order."""

    notes: Notes
    muon: float
    adamw: float
    state: float


class References(dict[tuple[str, ...], Reference]):
    """One process's runs, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, key: tuple[str, ...]) -> Reference:
        name, *arguments = key
        folder = self.folder / "-".join(key)
        notes = alone(name, folder / "whole", *arguments)
        control = alone(name, folder / "halves", *arguments, *HALVES)
        self[key] = Reference(
            notes,
            distance(control, notes, of_muon=True),
            distance(control, notes, of_muon=False),
            state_distance(control, notes),
        )
        return self[key]


@dataclass(frozen=True, slots=True)
class Trained:
    """The two runs of a recipe, with every rank's notes."""

    straight: list[Notes]
    resumed: list[Notes]


def train(name: str, folder: Path, *arguments: str) -> Trained:
    """Run a recipe from the start, then once more from its first checkpoint."""
    straight = run(name, folder / "straight", *arguments)
    resume = ("--resume", str(checkpoint(folder / "straight")))
    return Trained(straight, run(name, folder / "resumed", *arguments, *resume))


def check_equal(straight: list[Notes], reference: Reference) -> None:
    """Every rank ends like one process, within the noise of another order of sums."""
    for notes in straight:
        assert notes.parameters.keys() == reference.notes.parameters.keys()
        assert distance(notes, reference.notes, of_muon=True) <= MARGIN * reference.muon
        assert distance(notes, reference.notes, of_muon=False) <= MARGIN * reference.adamw
        assert state_distance(notes, reference.notes) <= MARGIN * reference.state


def check_placed(notes: list[Notes], sharded: bool) -> None:
    """If the host shards, every parameter is a DTensor that is cut; otherwise none is.

    A host may silently fall back to DDP, for example, and then every other check would pass.
    """
    for one in notes:
        assert {"Shard" in placements for placements in one.placements.values()} == {sharded}


def check_accumulated(straight: list[Notes], reference: Reference) -> None:
    """Before clipping, the first step's gradient is the mean over all micro-batches and all ranks."""
    first = reference.notes.steps[0]["norm_before_clipping"]
    for notes in straight:
        assert len(notes.steps) == EPOCHS * STEPS
        assert notes.steps[0]["norm_before_clipping"] == pytest.approx(first, rel=1e-5)


def check_clipped(straight: list[Notes], reference: Reference, *, inside: bool = False) -> None:
    """Clipping changed the gradients at every step, and the optimizer got the clipped ones.

    An optimizer that averages by itself clips ``inside``, unseen; then ``check_equal`` checks the moments.
    """
    for notes in straight:
        before = notes.series("norm_before_clipping")
        assert min(before) > 2 * MAX_NORM
        assert before == pytest.approx(reference.notes.series("norm_before_clipping"), rel=1e-3)
        assert inside or notes.series("norm") == pytest.approx([MAX_NORM] * EPOCHS * STEPS, rel=1e-4)


def check_scheduled(straight: list[Notes], reference: Reference) -> None:
    """All groups used exactly the schedule's learning rates."""
    for notes in straight:
        assert notes.series("lrs") == reference.notes.series("lrs")
        assert len(set(map(tuple, notes.series("lrs")))) == EPOCHS * STEPS


def check_resumed(straight: list[Notes], resumed: list[Notes]) -> None:
    """The second half in new processes equals the first run's second half, bit by bit."""
    for notes, whole in zip(resumed, straight, strict=True):
        assert len(notes.steps) == STEPS
        assert differences(notes, whole) == []


def check_bf16(straight: list[Notes], reference: Reference) -> None:
    """The gradients show that the model was computed in bf16; the optimizer kept its fp32."""
    exact = reference.notes.steps[0]["norm_before_clipping"]
    for notes in straight:
        error = abs(notes.steps[0]["norm_before_clipping"] / exact - 1)
        assert 1e-5 < error < 0.05
        kept = [*notes.parameters.values(), *(t for entry in notes.state.values() for t in entry.values())]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
        assert distance(notes, reference.notes, of_muon=True) < 0.5


def code_lines(name: str) -> list[str]:
    """A recipe's lines without its docstring."""
    return re.sub(r'""".*?"""', "", (RECIPES / f"{name}.py").read_text(), flags=re.DOTALL).splitlines()


def marked_lines(name: str) -> list[str]:
    """The lines marked with ``# Muon``."""
    return [line for line in code_lines(name) if line.endswith("  # Muon")]
