"""The map for newcomers: its picture is drawn from today's imports, and every file it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import floors

ROOT = Path(__file__).resolve().parent.parent


def test_the_picture_shows_todays_imports() -> None:
    assert floors.PICTURE.read_text(encoding="utf-8") == floors.draw(), "run python scripts/floors.py"


def test_every_file_it_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:muon_tutorial|tests|scripts|notebooks|docs)/[\w./]*)`", text))
    assert len(named) > 20
    assert [path for path in sorted(named) if "NN" not in path and not (ROOT / path).exists()] == []
