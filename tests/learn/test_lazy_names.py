"""A lesson has the names that its notebook uses; code for ranks imports nothing that draws."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muon_tutorial import learn
from muon_tutorial.learn import collectives
from muon_tutorial.learn.course import series
from scripts.notebooks import sources


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem[:2])
def test_a_lesson_has_every_name_that_its_notebook_uses(source: Path) -> None:
    lesson = importlib.import_module(f"muon_tutorial.learn.{series.lesson(source.stem[:2]).package}")
    used = set(re.findall(r"\blesson\.([a-z_A-Z]\w*)", source.read_text(encoding="utf-8")))
    assert used
    assert [name for name in used if not hasattr(lesson, name)] == []


def test_names_are_listed_and_a_wrong_one_is_refused() -> None:
    assert {"ring_all_gather", "run_gather", "check_ring", "explore_sum"} <= set(dir(collectives))
    with pytest.raises(AttributeError, match="collectives' has no attribute 'fasted'"):
        collectives.fasted


def test_files_that_ranks_run_import_nothing_that_draws() -> None:
    folder = Path(learn.__file__).parent
    packages = [it.package for it in series.LESSONS if (folder / it.package / "on_ranks.py").exists()]
    assert len(packages) > 7
    code = (
        "import sys, muon_tutorial.learn as learn, importlib\n"
        f"for name in {packages}:\n"
        "    importlib.import_module(f'muon_tutorial.learn.{name}').on_ranks\n"
        "print(sorted({'matplotlib', 'ipywidgets'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
