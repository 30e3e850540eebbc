"""The order of the lessons and their words, in one place: links, set-up cells, minutes, README, glossary."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import glossary, series
from scripts.notebooks import FOLDER, read_text, sources
from scripts.series import SETUP, main, setup, wanted, with_series

from .reading import bold_terms

TEXTS = {
    lesson.number: (FOLDER / "src" / f"{lesson.stem}.py").read_text(encoding="utf-8")
    for lesson in series.LESSONS
}
NUMBERS = (
    "five ten fifteen twenty twenty-five thirty thirty-five forty forty-five fifty fifty-five sixty"
    " sixty-five seventy seventy-five eighty eighty-five ninety"
)
MINUTES = dict(zip(NUMBERS.split(), range(5, 95, 5), strict=True))


@pytest.fixture(params=series.LESSONS, ids=lambda lesson: lesson.number)
def lesson(request: pytest.FixtureRequest) -> series.Lesson:
    return request.param


@pytest.fixture
def opening(lesson: series.Lesson) -> str:
    """The title and the logistics, between which a picture stands."""
    first, _, logistics = nbformat.read(FOLDER / lesson.file, as_version=4).cells[:3]
    return f"{first.source}\n\n{logistics.source}"


def test_every_lesson_is_in_the_series_after_those_that_it_needs() -> None:
    assert [source.stem for source in sources()] == [lesson.stem for lesson in series.LESSONS]
    assert all(lesson.stem.startswith(lesson.number + "_") for lesson in series.LESSONS)
    for place, each in enumerate(series.LESSONS):
        assert set(each.after) <= {earlier.number for earlier in series.LESSONS[:place]}


def test_what_the_series_decides_stands_where_it_belongs() -> None:
    stale = [path.name for path, text in wanted().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run scripts/series.py, and build the notebooks whose texts change"


def test_the_page_about_reading_says_why_to_read_what_a_lesson_names(lesson: series.Lesson) -> None:
    page = (FOLDER.parent / "docs" / "reading.md").read_text(encoding="utf-8")
    [item] = re.findall(rf"^- \*\*{lesson.number}\.\*\*.*?(?=^- |\Z)", page, re.MULTILINE | re.DOTALL)
    [address] = re.findall(r"\((https://\S+)\)$", series.READING[lesson.number])
    assert f"({address})" in item


def test_its_heading_its_minutes_and_its_needs_are_the_seriess(lesson: series.Lesson, opening: str) -> None:
    [minutes] = re.findall(r"\*\*([\w-]+) minutes?\.\*\*", opening)
    assert opening.startswith(f"# {lesson.name}\n")
    assert MINUTES[minutes.lower()] == lesson.minutes
    [needs] = re.findall(r"^\*You need\*.*?(?=\n\n)", opening, re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r"(?<=lesson )\d\d", " ".join(needs.lower().split()))) == sorted(lesson.after)


@pytest.mark.parametrize("path", series.PATHS, ids=lambda path: path.name)
def test_a_path_has_what_its_lessons_need_or_says_so(path: series.CoursePath) -> None:
    needed = {before for number in path.numbers for before in series.lesson(number).after}
    assert list(path.numbers) == sorted(path.numbers)
    assert {before for before in needed - set(path.numbers) if before not in path.note} == set()


def test_the_last_path_has_all_lessons() -> None:
    assert list(series.PATHS[-1].numbers) == [each.number for each in series.LESSONS]


@pytest.mark.parametrize("lost", ["# %% tags=", "*Previous:*"])
def test_a_text_without_a_place_for_them_is_refused_and_not_robbed(lost: str) -> None:
    each = series.lesson("05")
    with pytest.raises(UsageError, match="lesson 05 has no list of links"):
        with_series(TEXTS[each.number].replace(lost, "lost"), each)


def test_a_readme_without_a_part_for_it_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in (None, "no such part"):
        if text is not None:
            (tmp_path / "README.md").write_text(text)
        monkeypatch.setattr("scripts.series.README", tmp_path / "README.md")
        monkeypatch.setattr("scripts.files.write_whole", pytest.fail)
        assert main() == 2
        assert "README.md is missing, or has no part" in capsys.readouterr().err


def test_without_a_repository_no_text_has_a_link_that_opens_a_lesson_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "REPOSITORY", "")
    for each in series.LESSONS:
        assert series.hosted_links(each) == {}
        assert "open this lesson" not in series.navigation(each)
        assert "*In Binder:*" not in series.navigation(each)
    assert setup() == SETUP


def test_with_a_repository_a_text_leads_to_colab_and_binder_and_its_set_up_finds_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = series.lesson("05")
    text = TEXTS[each.number]
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


def bold_of(number: str) -> list[str]:
    """The terms that a lesson introduces in bold, in lower case."""
    return [term.casefold() for term in bold_terms(read_text(TEXTS[number]))]


@pytest.mark.parametrize("number", TEXTS)
def test_what_a_lesson_sets_in_bold_is_what_the_glossary_has_from_it(number: str) -> None:
    entries = [(term.bold or term.word).casefold() for term in glossary.TERMS if term.lesson == number]
    assert sorted(entries) == sorted(bold_of(number))


def test_no_word_is_brought_in_twice() -> None:
    words = Counter(term.word.casefold() for term in glossary.TERMS)
    in_bold = Counter(term for number in TEXTS for term in bold_of(number))
    assert [word for word, count in (words + Counter()).items() if count > 1] == []
    assert [word for word, count in in_bold.items() if count > 1] == []


def test_a_symbol_stands_in_the_lessons_that_are_named() -> None:
    for symbol in glossary.SYMBOLS:
        for sign in symbol.sign.removesuffix(", …").split(", "):
            for number in symbol.lessons:
                assert re.search(rf"(?<!\w){re.escape(sign)}(?!\w)", TEXTS[number]), (sign, number)


def test_a_meaning_is_a_sentence_that_fits_a_table() -> None:
    meanings = [term.meaning for term in glossary.TERMS]
    for meaning in [*meanings, *(symbol.meaning for symbol in glossary.SYMBOLS)]:
        assert re.fullmatch(r"[^|]+\.", meaning), meaning
        assert len(meaning.split()) <= 20, meaning


@pytest.mark.parametrize(
    ("asked", "entry"),
    [
        *((form, "generator (lesson 09): A") for form in ("generator", " GENERATOR ")),
        ("Vt", "U, S, Vt: The SVD"),
        ("Dp", "\ndp (lesson 00): "),
        ("", "\nU, S, Vt: "),
        ("bukket", "The glossary has no 'bukket'."),
    ],
)
def test_a_word_or_symbol_is_found_by_any_part_of_it(
    asked: str, entry: str, capsys: pytest.CaptureFixture
) -> None:
    glossary.look_up(asked)
    assert entry in f"\n{capsys.readouterr().out}"
