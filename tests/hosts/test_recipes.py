"""Every recipe does what its host promises, with Muon instead of AdamW.

One run trains for two epochs and saves after each; a second one, in new processes, goes on from the first
epoch's checkpoint. The optimizer's inputs are compared with those of a plain loop in one process on the same
global batches; ``checks`` has the bounds. ``python -m tests.hosts.table`` runs and writes the whole table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .checks import (
    Reference,
    References,
    check_accumulated,
    check_bf16,
    check_clipped,
    check_equal,
    check_placed,
    check_resumed,
    check_scheduled,
    code_lines,
    marked_lines,
    train,
)
from .recipes import ALL, EPOCHS, MAX_NORM, RECIPES, STEPS, Notes, skip_unless_installed

pytestmark = [pytest.mark.live, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


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
    check_placed(trained.straight, sharded=ALL[name].sharded)
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


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_is_short_and_marks_the_few_lines_that_muon_needs(name: str) -> None:
    marked = marked_lines(name)
    assert len((RECIPES / f"{name}.py").read_text().splitlines()) <= 60
    assert 2 <= len(marked) <= 4
    assert [line for line in code_lines(name) if "muon" in line.lower() and line not in marked] == []


def test_every_recipe_is_tried() -> None:
    assert {path.stem for path in RECIPES.glob("*.py")} == {*ALL, "tiny", "tiny_tp"}


def test_the_table_kept_has_a_good_row_for_every_recipe() -> None:
    text = (Path(__file__).parent / "hosts_table.md").read_text(encoding="utf-8")
    kept, _, _ = text.partition("## Other hosts")
    rows = [line.split(" | ") for line in kept.splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == [*ALL]
    assert [row[2] for row in rows] == ["shards" if it.sharded else "whole" for it in ALL.values()]
    assert [int(row[3]) for row in rows] == [len(marked_lines(name)) for name in ALL]
    assert "NO" not in kept


def noted(steps: int = EPOCHS * STEPS, norm: float = MAX_NORM, before: float = 1.0) -> Notes:
    """Notes of a run, which pass every check unless an argument is given."""
    taken = [{"norm_before_clipping": before, "norm": norm, "lrs": [0.1 * step]} for step in range(steps)]
    parameters, state = {"w": torch.ones(3)}, {"w": {"momentum_buffer": torch.ones(3)}}
    return Notes("MuonWithAdamW", 1, {"w": torch.zeros(3)}, taken[-steps:], parameters, state, {})


@pytest.mark.parametrize("changed", ["parameters", "state", "steps"])
def test_the_check_of_resuming_notices_one_element(changed: str) -> None:
    """It notices one element of a parameter or of an optimizer's state, and a schedule that began anew."""
    whole, half = noted(), noted()
    del half.steps[:STEPS]
    check_resumed([whole], [half])
    if changed == "steps":
        half.steps[:] = whole.steps[:STEPS]
    else:
        (half.parameters["w"] if changed == "parameters" else half.state["w"]["momentum_buffer"])[1] = 2.0
    with pytest.raises(AssertionError):
        check_resumed([whole], [half])


def test_the_checks_of_training_notice() -> None:
    """They notice gradients that were not clipped or not averaged, and other parameters or momentum."""
    right, reference = noted(), Reference(noted(), 1e-3, 1e-3, 1e-3)
    away = noted()
    away.parameters["w"][1], away.state["w"]["momentum_buffer"][1] = 1.1, 1.1
    for check, wrong in (
        (check_clipped, noted(norm=1.0)),
        (check_clipped, noted(before=2.0)),
        (check_accumulated, noted(before=2.0)),
        (check_equal, away),
    ):
        check([right], reference)
        with pytest.raises(AssertionError):
            check([wrong], reference)
