"""The reference has the public surface and its rooms, word for word."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import muon_tutorial
from scripts.files import ROOT

from .reading import parsed

LEFT_OUT = {"learn", "cli", "__main__"}


@pytest.fixture(scope="module")
def folder(site: Path) -> Path:
    return site / "reference"


def plain(text: str) -> str:
    """A text without its markup and line breaks."""
    return " ".join(text.replace("`", "").replace("*", "").split())


def test_every_public_name_is_there_with_its_docstring(folder: Path) -> None:
    surface = parsed(folder / "muon_tutorial.html")
    for name in muon_tutorial.__all__:
        said = plain(surface.find(id=name).find(class_="docstring").get_text(" ", strip=True))
        value = getattr(muon_tutorial, name)
        written = plain((inspect.getdoc(value) or "").partition("\n\n")[0]) if callable(value) else ""
        assert re.sub(r"\W", "", said).startswith(re.sub(r"\W", "", written)), name
        assert said, name


def test_arguments_are_a_list_and_examples_keep_their_prompts(folder: Path) -> None:
    muon = parsed(folder / "muon_tutorial.html").find(id="Muon").find(class_="docstring")
    listed = [item.get_text() for item in muon.find_all("li")]
    assert any(item.startswith("parts: ") and "(d, d, d)" in item for item in listed)
    assert ">>> muon.step()" in muon.find("pre").get_text()
    assert "``" not in muon.get_text()


def test_every_module_of_every_room_has_its_page(folder: Path) -> None:
    package = ROOT / "muon_tutorial"
    sources = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py")]
    shown = [path for path in sources if not LEFT_OUT & set(path.parts)]
    names = {"/".join(["muon_tutorial", *path.parts]).removesuffix("/__init__") for path in shown}
    assert {str(page.relative_to(folder)) for page in folder.rglob("*.html")} == {
        "index.html",
        *[f"{name}.html" for name in names],
    }


def test_a_room_leads_to_its_modules_and_the_surface_to_its_rooms(folder: Path) -> None:
    room = parsed(folder / "muon_tutorial" / "plan.html")
    assert room.select_one("main li a[href='plan/grid.html']").find_parent("li").get_text() == (
        "grid: ranks in named axes"
    )
    rooms = [link["href"] for link in parsed(folder / "muon_tutorial.html").select("nav a")]
    assert {"../index.html", "muon_tutorial/plan.html", "muon_tutorial/errors.html"} <= set(rooms)
