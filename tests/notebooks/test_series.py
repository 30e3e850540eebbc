"""The order of the lessons, in one place: links, set-up cells, minutes, the README's table."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import series
from scripts.notebooks import FOLDER, sources
from scripts.series import SETUP, main, setup, wanted, with_series

MINUTES = {
    "five": 5,
    "ten": 10,
    "fifteen": 15,
    "twenty": 20,
    "twenty-five": 25,
    "thirty": 30,
    "thirty-five": 35,
    "forty": 40,
    "forty-five": 45,
    "fifty": 50,
    "sixty": 60,
    "sixty-five": 65,
    "seventy": 70,
}


@pytest.fixture(params=series.LESSONS, ids=lambda lesson: lesson.number)
def lesson(request: pytest.FixtureRequest) -> series.Lesson:
    return request.param


@pytest.fixture
def opening(lesson: series.Lesson) -> str:
    """The title and the logistics: in one cell, or in two with a picture between them."""
    first, hero, logistics = nbformat.read(FOLDER / lesson.file, as_version=4).cells[:3]
    return f"{first.source}\n\n{logistics.source}" if "hero" in hero.metadata.tags else first.source


def test_every_lesson_is_in_the_series_after_those_that_it_needs() -> None:
    assert [source.stem for source in sources()] == [lesson.stem for lesson in series.LESSONS]
    assert all(lesson.stem.startswith(lesson.number + "_") for lesson in series.LESSONS)
    for place, each in enumerate(series.LESSONS):
        assert set(each.after) <= {earlier.number for earlier in series.LESSONS[:place]}


def test_what_the_series_decides_stands_where_it_belongs() -> None:
    stale = [path.name for path, text in wanted().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run scripts/series.py, and build the notebooks whose texts change"


def test_its_heading_its_minutes_and_its_needs_are_the_seriess(lesson: series.Lesson, opening: str) -> None:
    [minutes] = re.findall(r"\*\*([\w-]+) minutes?\.\*\*", opening)
    assert opening.startswith(f"# {lesson.name}\n")
    assert MINUTES[minutes.lower()] == lesson.minutes
    [needs] = re.findall(r"^\*You need\*.*?(?=\n\n)", opening, re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r"(?<=lesson )\d\d", " ".join(needs.lower().split()))) == sorted(lesson.after)


def test_its_links_lead_to_its_neighbours_and_to_files(lesson: series.Lesson, opening: str) -> None:
    linked = [target for target in re.findall(r"\]\(([^)]+)\)", opening) if "://" not in target]
    near = [each.file for each in series.neighbours(lesson) if each is not None]
    assert series.navigation(lesson) in opening
    assert linked == [*near, "GLOSSARY.md"]
    assert [target for target in linked if not (FOLDER / target).exists()] == []


@pytest.mark.parametrize("path", series.PATHS, ids=lambda path: path.name)
def test_a_path_has_what_its_lessons_need_or_says_so(path: series.CoursePath) -> None:
    needed = {before for number in path.numbers for before in series.lesson(number).after}
    assert list(path.numbers) == sorted(path.numbers)
    assert {before for before in needed - set(path.numbers) if before not in path.note} == set()


def text_of(lesson: series.Lesson) -> str:
    return (FOLDER / "src" / f"{lesson.stem}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("lost", ["# %% tags=", "*Previous:*"])
def test_a_text_without_a_place_for_them_is_refused_and_not_robbed(lost: str) -> None:
    each = series.lesson("05")
    with pytest.raises(UsageError, match="lesson 05 has no list of links"):
        with_series(text_of(each).replace(lost, "lost"), each)


def test_a_readme_without_a_part_for_it_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in (None, "no such part"):
        if text is not None:
            (tmp_path / "README.md").write_text(text)
        monkeypatch.setattr("scripts.series.README", tmp_path / "README.md")
        monkeypatch.setattr("scripts.series.write_whole", pytest.fail)
        assert main([]) == 2
        assert "README.md is missing, or has no part" in capsys.readouterr().err


def test_without_a_repository_no_text_has_a_link_that_opens_a_lesson_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "REPOSITORY", "")
    for each in series.LESSONS:
        assert series.hosted_links(each) == {}
        assert "://" not in series.navigation(each)
        assert "*In Binder:*" not in series.navigation(each)
    assert setup() == SETUP


def test_with_a_repository_a_text_leads_to_colab_and_binder_and_its_set_up_finds_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = series.lesson("05")
    text = text_of(each)
    monkeypatch.setattr(series, "REPOSITORY", "ada/muon")
    once = with_series(text, each)
    assert with_series(once, each) == once
    joined = " ".join(once.replace("\n# ", "\n").split())
    assert f"(https://colab.research.google.com/github/ada/muon/blob/main/notebooks/{each.file})" in joined
    assert f"(https://mybinder.org/v2/gh/ada/muon/main?labpath=notebooks%2F{each.file})" in joined
    assert joined.count("*In Colab:*") == joined.count("*In Binder:*") == 1
    compile(setup(), "set-up", "exec")
    assert "https://github.com/ada/muon/archive/refs/heads/main.zip" in once
    assert "raise ModuleNotFoundError" not in once
    monkeypatch.setattr(series, "REPOSITORY", "")
    assert with_series(once, each) == with_series(text, each)


def test_a_copy_needs_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    without = series.navigation_of_copy(series.lesson("05"))
    monkeypatch.setattr(series, "REPOSITORY", "ada/muon")
    assert series.navigation_of_copy(series.lesson("05")) == without
