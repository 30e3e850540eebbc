"""The documents for newcomers: a picture of the current imports, files that exist, and a short front page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import floors

ROOT = Path(__file__).resolve().parent.parent


def test_the_picture_shows_todays_imports() -> None:
    assert floors.PICTURE.read_text(encoding="utf-8") == floors.draw(), "run python scripts/floors.py"


DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def test_every_file_that_the_map_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:muon_tutorial|tests|scripts|notebooks|docs)/[\w./]*)`", text))
    assert len(named) > 20
    assert [path for path in sorted(named) if "NN" not in path and not (ROOT / path).exists()] == []


def test_the_map_has_a_line_for_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = [path.parent for path in (ROOT / "muon_tutorial").glob("*/__init__.py")]
    assert [room.name for room in rooms if f"| `muon_tutorial/{room.name}/`" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_what_a_command_names_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (document.parent / link).exists()] == []
    named = re.findall(r"^(?:pytest|python|bash) ((?:scripts|tests)/\S+)", text, re.MULTILINE)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_front_page_is_short_and_every_page_is_linked() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180
    linked = {
        (document.parent / link.split("#")[0]).resolve()
        for document in DOCUMENTS
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    }
    assert [page.name for page in DOCUMENTS if page.parent == ROOT / "docs" and page not in linked] == []
