"""Every recipe does what its host promises, with Muon instead of AdamW.

One run trains for two epochs and saves after each; a second one, in new processes, goes on from the first
epoch's checkpoint. The optimizer's inputs are compared with the inputs of a plain loop in one process, on the
same global batches. ``recipes`` has the bounds. ``python -m tests.hosts.table`` runs and writes the whole
table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..exhaustive import left_out
from . import recipes
from .recipes import ALL, EPOCHS, MAX_NORM, RECIPES, STEPS, Notes, Reference, References

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("alone"))


# Only a new version of the host can break a recipe under its own launcher. So usual runs try only Trainer,
# in forked processes; tests/optimizer and tests/configs check what recipes rely on, and FSDP2's checkpoints.
@pytest.mark.parametrize(("name", "forks"), [("trainer", 2), *(left_out(name, 0) for name in ALL)])
def test_a_recipe_trains_like_one_process_and_resumes_to_the_bit(
    name: str, forks: int, tmp_path: Path, references: References
) -> None:
    recipes.skip_unless_installed(name)
    trained = recipes.train(name, tmp_path, forks=forks)
    reference = references[ALL[name].alone]
    assert {(notes.optimizer, notes.ranks) for notes in trained.straight} == {
        ("MuonWithAdamW", ALL[name].ranks)
    }
    recipes.check_placed(trained.straight, sharded=ALL[name].sharded)
    recipes.check_accumulated(trained.straight, reference)
    recipes.check_clipped(trained.straight, reference, inside=name == "zero1")
    recipes.check_scheduled(trained.straight, reference)
    recipes.check_equal(trained.straight, reference)
    recipes.check_resumed(trained.straight, trained.resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_a_recipe_trains_in_bf16_and_resumes_to_the_bit(
    name: str, tmp_path: Path, references: References
) -> None:
    recipes.skip_unless_installed(name)
    trained = recipes.train(name, tmp_path, "--bf16")
    reference = references[ALL[name].alone]
    recipes.check_bf16(trained.straight, reference)
    recipes.check_scheduled(trained.straight, reference)
    recipes.check_resumed(trained.straight, trained.resumed)


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_is_short_and_marks_the_few_lines_that_muon_needs(name: str) -> None:
    marked = recipes.marked_lines(name)
    assert len((RECIPES / f"{name}.py").read_text().splitlines()) <= 60
    assert 2 <= len(marked) <= 4
    assert [line for line in recipes.code_lines(name) if "muon" in line.lower() and line not in marked] == []


def test_every_recipe_is_tried() -> None:
    assert {path.stem for path in RECIPES.glob("*.py")} == {*ALL, "tiny", "tiny_tp"}


def test_the_table_kept_has_a_good_row_for_every_recipe() -> None:
    text = (Path(__file__).parent / "hosts_table.md").read_text(encoding="utf-8")
    kept, _, _ = text.partition("## Other hosts")
    rows = [line.split(" | ") for line in kept.splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == [*ALL]
    assert [row[2] for row in rows] == ["shards" if it.sharded else "whole" for it in ALL.values()]
    assert [int(row[3]) for row in rows] == [len(recipes.marked_lines(name)) for name in ALL]
    assert "NO" not in kept


def noted(steps: int = EPOCHS * STEPS, norm: float = MAX_NORM, before: float = 1.0) -> Notes:
    """Notes of a run, which pass every check unless an argument is given."""
    taken = [{"norm_before_clipping": before, "norm": norm, "lrs": [0.1 * step]} for step in range(steps)]
    parameters, state = {"w": torch.ones(3)}, {"w": {"momentum_buffer": torch.ones(3)}}
    return Notes("MuonWithAdamW", 1, {"w": torch.zeros(3)}, taken[-steps:], parameters, state, {})


@pytest.mark.parametrize("changed", ["parameters", "state", "steps"])
def test_the_check_of_resuming_notices_one_element(changed: str) -> None:
    """It notices one wrong element of a parameter or of a state, and a schedule that began again."""
    whole, half = noted(), noted()
    del half.steps[:STEPS]
    recipes.check_resumed([whole], [half])
    if changed == "steps":
        half.steps[:] = whole.steps[:STEPS]
    else:
        (half.parameters["w"] if changed == "parameters" else half.state["w"]["momentum_buffer"])[1] = 2.0
    with pytest.raises(AssertionError):
        recipes.check_resumed([whole], [half])


def test_the_checks_of_training_notice() -> None:
    """The checks notice gradients that were not clipped or not averaged, and wrong parameters or momentum."""
    right, reference = noted(), Reference(noted(), 1e-3, 1e-3, 1e-3)
    away = noted()
    away.parameters["w"][1], away.state["w"]["momentum_buffer"][1] = 1.1, 1.1
    for check, wrong in (
        (recipes.check_clipped, noted(norm=1.0)),
        (recipes.check_clipped, noted(before=2.0)),
        (recipes.check_accumulated, noted(before=2.0)),
        (recipes.check_equal, away),
    ):
        check([right], reference)
        with pytest.raises(AssertionError):
            check([wrong], reference)
