"""Every recipe does what its host promises, with Muon in AdamW's place.

One run trains for two epochs and saves after each; a second one, in new processes, goes on from the first
epoch's checkpoint. What the optimizer saw in them is held to a plain loop in one process, on the same global
batches.

Sums come in another order there. Newton–Schulz rounds its input to bf16, so that a last bit of a gradient
can become a bf16 step of the update. How much that may be is measured, not guessed: ``control`` is the plain
loop with micro-batches of half the size, twice as many. Only the order of the sums changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .recipes import (
    ALL,
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
    skip_unless_installed,
    state_distance,
)
from .watch.watching import FAULTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(2400)]

HALVES = ("--batch", "4", "--accumulate", "4")
MARGIN = 3
"""How many times the control's distance a host may be away: the worst matrix is another one each time."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One process, and how far from it another order of the same sums leads."""

    notes: Notes
    muon: float
    adamw: float
    state: float


class References(dict[tuple[str, ...], Reference]):
    """One process's runs, each made when it is first asked for."""

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


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


@dataclass(frozen=True, slots=True)
class Trained:
    """The two runs of a recipe, every rank's notes."""

    straight: list[Notes]
    resumed: list[Notes]


def train(name: str, folder: Path, *arguments: str) -> Trained:
    """Run a recipe from the start, then once more from its first checkpoint."""
    straight = run(name, folder / "straight", *arguments)
    resume = ("--resume", str(checkpoint(folder / "straight")))
    return Trained(straight, run(name, folder / "resumed", *arguments, *resume))


def check_equal(straight: list[Notes], reference: Reference) -> None:
    """Every rank ends where one process ends, within the noise of another order of sums."""
    for notes in straight:
        assert notes.parameters.keys() == reference.notes.parameters.keys()
        assert distance(notes, reference.notes, of_muon=True) <= MARGIN * reference.muon
        assert distance(notes, reference.notes, of_muon=False) <= MARGIN * reference.adamw
        assert state_distance(notes, reference.notes) <= MARGIN * reference.state


def check_accumulated(straight: list[Notes], reference: Reference) -> None:
    """Before clipping, the first step's gradient is the mean over all micro-batches and all ranks."""
    first = reference.notes.steps[0]["norm_before_clipping"]
    for notes in straight:
        assert len(notes.steps) == EPOCHS * STEPS
        assert notes.steps[0]["norm_before_clipping"] == pytest.approx(first, rel=1e-5)


def check_clipped(straight: list[Notes], reference: Reference, *, inside: bool = False) -> None:
    """Clipping had something to do at every step, and the optimizer got what it left.

    An optimizer that averages by itself clips ``inside``, out of sight: its moments tell, in ``check_equal``.
    """
    for notes in straight:
        before = notes.series("norm_before_clipping")
        assert min(before) > 2 * MAX_NORM
        assert before == pytest.approx(reference.notes.series("norm_before_clipping"), rel=1e-3)
        assert inside or notes.series("norm") == pytest.approx([MAX_NORM] * EPOCHS * STEPS, rel=1e-4)


def check_scheduled(straight: list[Notes], reference: Reference) -> None:
    """All groups took the schedule's learning rates, to the bit."""
    for notes in straight:
        assert notes.series("lrs") == reference.notes.series("lrs")
        assert len(set(map(tuple, notes.series("lrs")))) == EPOCHS * STEPS


def check_resumed(straight: list[Notes], resumed: list[Notes]) -> None:
    """The second half in new processes is the first run's second half, bit by bit."""
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


SOMETIMES = [
    pytest.param(name, marks=[] if recipe.daily else pytest.mark.exhaustive) for name, recipe in ALL.items()
]


@pytest.mark.parametrize("name", SOMETIMES)
def test_a_recipe_trains_like_one_process_and_resumes_to_the_bit(
    name: str, tmp_path: Path, references: References
) -> None:
    skip_unless_installed(name)
    trained = train(name, tmp_path)
    reference = references[(ALL[name].alone,)]
    assert {(notes.optimizer, notes.ranks) for notes in trained.straight} == {
        ("MuonWithAdamW", ALL[name].ranks)
    }
    check_accumulated(trained.straight, reference)
    check_clipped(trained.straight, reference, inside=name == "zero1")
    check_scheduled(trained.straight, reference)
    check_equal(trained.straight, reference)
    check_resumed(trained.straight, trained.resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_a_recipe_trains_in_bf16_and_resumes_to_the_bit(
    name: str, tmp_path: Path, references: References
) -> None:
    skip_unless_installed(name)
    trained = train(name, tmp_path, "--bf16")
    reference = references[(ALL[name].alone,)]
    check_bf16(trained.straight, reference)
    check_scheduled(trained.straight, reference)
    check_resumed(trained.straight, trained.resumed)


def code_lines(name: str) -> list[str]:
    """A recipe's lines without its docstring."""
    return re.sub(r'""".*?"""', "", (RECIPES / f"{name}.py").read_text(), flags=re.DOTALL).splitlines()


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_is_short_and_marks_the_few_lines_that_muon_needs(name: str) -> None:
    marked = [line for line in code_lines(name) if line.endswith("  # Muon")]
    assert len((RECIPES / f"{name}.py").read_text().splitlines()) <= 60
    assert 2 <= len(marked) <= 4
    assert [line for line in code_lines(name) if "muon" in line.lower() and line not in marked] == []


def test_every_recipe_is_in_the_table() -> None:
    assert {path.stem for path in RECIPES.glob("*.py")} == {*ALL, "tiny", "tiny_tp"}


RESUME_FAULTS = (
    "momentum lost",
    "first moment lost",
    "second moment lost",
    "step count lost",
    "schedule begun anew",
)


@pytest.fixture(scope="module")
def straight_ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Notes], Path]:
    folder = tmp_path_factory.mktemp("ddp")
    return run("ddp", folder), folder


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(RESUME_FAULTS[0]),
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in RESUME_FAULTS[1:]),
    ],
)
def test_the_check_of_resuming_notices(
    fault: str, straight_ddp: tuple[list[Notes], Path], tmp_path: Path
) -> None:
    straight, folder = straight_ddp
    resumed = run("ddp", tmp_path, "--resume", str(checkpoint(folder)), fault=fault)
    with pytest.raises(AssertionError):
        check_resumed(straight, resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("nothing clipped", (check_clipped, check_equal)),
        ("nothing averaged", (check_accumulated, check_clipped, check_equal)),
        ("micro-batches summed", (check_accumulated, check_clipped)),
    ],
)
def test_the_checks_of_training_notice(
    fault: str, checks: tuple, tmp_path: Path, references: References
) -> None:
    straight = run("ddp", tmp_path, fault=fault)
    for check in checks:
        with pytest.raises(AssertionError):
            check(straight, references[("plain",)])


def test_every_fault_is_tried() -> None:
    assert {*RESUME_FAULTS, "nothing clipped", "nothing averaged", "micro-batches summed"} == {*FAULTS}
