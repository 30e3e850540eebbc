"""The site is complete: one command makes its folder, and its links, reference and workflow are right."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import muon_tutorial
from muon_tutorial.learn.course import series
from scripts import essay, website
from scripts.files import POLICY, ROOT
from scripts.pack import is_untouched

from .reading import assert_keeps_to_itself, parsed

WORKFLOW = ROOT / ".github" / "workflows" / "site.yml"
COMMAND = "python scripts/website.py --out dist/site"


def links(tree: Any) -> set[str]:
    """The targets of a page: of its links, of its preview picture, and of a redirect."""
    at_once = [meta["content"] for meta in tree.find_all("meta", attrs={"http-equiv": "refresh"})]
    shown = tree.find_all("meta", attrs={"property": "og:image"})
    return {
        *(picture["content"] for picture in shown),
        *(link["href"] for link in tree.find_all("a", href=True)),
        *(content.rpartition("url=")[2] for content in at_once),
    }


def test_links_lead_to_places_on_the_site_all_files_are_reached_and_no_page_asks_for_anything(
    site: Path,
) -> None:
    reached, places, waiting = set(), set(), [site / "index.html"]
    ids: dict[Path, set[str]] = {}
    while waiting:
        page = waiting.pop()
        assert page.is_file(), page
        if page in reached:
            continue
        reached.add(page)
        if page.suffix != ".html":
            continue
        tree = parsed(page)
        if page.name != essay.NAME:  # the essay has a script, and tests of its own
            assert_keeps_to_itself(page, tree)
        ids[page] = {tag["id"] for tag in tree.find_all(id=True)}
        for to, _, place in (to.partition("#") for to in links(tree) if not re.match(r"\w+:", to)):
            assert not to.startswith("/")
            target = Path(os.path.normpath(page.parent / unquote(to))) if to else page
            assert target.is_relative_to(site)
            waiting.append(target)
            places |= {(target, place)} if place and target.name != essay.NAME else set()
    assert {path for path in site.rglob("*") if path.is_file()} == reached
    assert [(page, place) for page, place in places if place not in ids[page]] == []
    assert "default-src 'none'" in POLICY
    assert "script" not in POLICY


@pytest.mark.parametrize("lesson", series.LESSONS, ids=lambda lesson: lesson.number)
def test_each_page_offers_its_own_copy(site: Path, lesson: series.Lesson) -> None:
    assert f"{website.COPIES}/{lesson.file}" in links(parsed(site / f"{lesson.stem}.html"))
    assert is_untouched(site / website.COPIES / lesson.file)


def test_a_site_with_somebodys_work_among_its_copies_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / website.COPIES / series.LESSONS[0].file
    mine.parent.mkdir()
    mine.write_text("my notes")
    assert website.main(["--still", "--out", str(tmp_path)]) == 2
    assert "may hold edits" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == [website.COPIES, mine.name]


def test_the_workflow_runs_that_command_and_takes_official_actions_alone() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    steps = {name: job["steps"] for name, job in workflow["jobs"].items()}
    used = [step["uses"] for each in steps.values() for step in each if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", each) for each in used)
    assert COMMAND in [step.get("run") for step in steps["build"]]
    [upload] = [step for step in steps["build"] if "upload-pages-artifact" in step.get("uses", "")]
    assert COMMAND.endswith(upload["with"]["path"])
    assert [step["uses"].partition("@")[0] for step in steps["deploy"]] == ["actions/deploy-pages"]


def test_only_the_job_that_publishes_may_write() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in workflow["jobs"]["build"]
    assert workflow["jobs"]["deploy"]["permissions"] == {"pages": "write", "id-token": "write"}


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
        "grid: Ranks arranged in named axes"
    )
    rooms = [link["href"] for link in parsed(folder / "muon_tutorial.html").select("nav a")]
    assert {"../index.html", "muon_tutorial/plan.html", "muon_tutorial/errors.html"} <= set(rooms)
