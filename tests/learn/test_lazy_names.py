"""A lesson has the names that its notebook uses; what ranks run imports nothing that draws."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muon_tutorial.learn import lesson03
from scripts.notebooks import sources


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem[:2])
def test_a_lesson_has_every_name_that_its_notebook_uses(source: Path) -> None:
    lesson = importlib.import_module(f"muon_tutorial.learn.lesson{source.stem[:2]}")
    used = set(re.findall(r"\blesson\.([a-z_A-Z]\w*)", source.read_text(encoding="utf-8")))
    assert used
    assert [name for name in used if not hasattr(lesson, name)] == []


def test_names_are_listed_and_a_wrong_one_is_refused() -> None:
    assert {"ring_all_gather", "run_gather", "check_ring", "picture_of_gather"} <= set(dir(lesson03))
    with pytest.raises(AttributeError, match="lesson03' has no attribute 'fasted'"):
        lesson03.fasted


def test_files_that_ranks_run_import_nothing_that_draws() -> None:
    code = (
        "import sys, muon_tutorial.learn as learn, importlib\n"
        "for number in (0, 3, 4, 5, 6, 7, 8, 9):\n"
        "    importlib.import_module(f'muon_tutorial.learn.lesson0{number}').on_ranks\n"
        "print(sorted({'matplotlib', 'ipywidgets'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
