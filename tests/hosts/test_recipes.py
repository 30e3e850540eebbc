"""Every recipe does what its host promises, with Muon instead of AdamW.

One run trains for two epochs and saves after each; a second one, in new processes, goes on from the first
epoch's checkpoint. The optimizer's inputs are compared with the inputs of a plain loop in one process, on the
same global batches. ``recipes`` has the bounds. ``python -m tests.hosts.table`` runs and writes the whole
table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..exhaustive import left_out
from . import recipes
from .recipes import ALL, RECIPES, run_alone

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


# Only a new version of the host can break a recipe under its own launcher. So usual runs try only Trainer,
# in forked processes; tests/optimizer and tests/configs check what recipes rely on, and FSDP2's checkpoints.
@pytest.mark.parametrize(("name", "forks"), [("trainer", 2), *(left_out(name, 0) for name in ALL)])
def test_a_recipe_is_like_one_process_and_resumes(name: str, forks: int, tmp_path: Path, alone: Path) -> None:
    recipes.skip_unless_installed(name)
    straight, resumed = recipes.train(name, tmp_path, forks=forks)
    for notes in straight:
        assert (notes.optimizer, notes.ranks) == ("MuonWithAdamW", ALL[name].ranks)
    recipes.check_placed(straight, sharded=ALL[name].sharded)
    for check in recipes.checks(name, straight, resumed, run_alone(ALL[name].alone, alone)).values():
        check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_a_recipe_resumes_to_the_bit_in_bf16(name: str, tmp_path: Path, alone: Path) -> None:
    recipes.skip_unless_installed(name)
    straight, resumed = recipes.train(name, tmp_path, "--bf16")
    reference = run_alone(ALL[name].alone, alone)
    recipes.check_bf16(straight, reference)
    recipes.check_scheduled(straight, reference)
    recipes.check_resumed(straight, resumed)


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
