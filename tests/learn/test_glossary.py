"""The glossary has the lessons' words, each from the lesson that sets it in bold, and shows them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import glossary, series
from scripts.notebooks import FOLDER, read_text

from ..notebooks.reading import bold_terms

TEXTS = {
    lesson.number: (FOLDER / "src" / f"{lesson.stem}.py").read_text(encoding="utf-8")
    for lesson in series.LESSONS
}


def bold_of(number: str) -> list[str]:
    """The terms that a lesson introduces in bold, in small letters."""
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


def test_the_page_is_what_the_glossary_says_and_its_links_lead_to_notebooks() -> None:
    assert (FOLDER / "GLOSSARY.md").read_text(encoding="utf-8") == glossary.page(), "run scripts/series.py"
    linked = set(re.findall(r"\]\(([^)]+)\)", glossary.page()))
    assert linked == {lesson.file for lesson in series.LESSONS}
    assert all((FOLDER / file).exists() for file in linked)


@pytest.mark.parametrize(
    ("asked", "entry"),
    [
        *((form, "hop (lesson 09): One change") for form in ("hop", "Hops", "HOP")),
        *((form, "U, S, Vt: The SVD") for form in ("Vt", " Vt")),
        ("s", "s: One singular value."),
        (" rank ", "rank"),
        ("Dp ", "dp"),
    ],
)
def test_a_word_or_symbol_is_found_in_any_of_its_forms(asked: str, entry: str) -> None:
    assert repr(glossary.look_up(asked)).startswith(entry)


def test_without_a_word_all_are_shown_as_tables_and_one_word_is_one_table() -> None:
    shown = glossary.look_up()._repr_markdown_()
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(rows) == len(glossary.TERMS) + len(glossary.SYMBOLS) + 2
    assert shown.index("| Adam |") < shown.index("| rank |") < shown.index("| `G` |")
    assert glossary.look_up("rank")._repr_markdown_().count("|---|---|---|") == 2
    assert glossary.look_up("ring")._repr_markdown_().count("|---|---|---|") == 1


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        ("bukket", "did you mean 'bucket'"),
        ("§", "shows all words"),
        *((near, "did you mean 'rank'") for near in ("RANKS", "Rnak", " ranks")),
    ],
)
def test_an_unknown_word_is_refused_with_advice(asked: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        glossary.look_up(asked)
