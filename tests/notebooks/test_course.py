"""The course as a whole: what a reader writes, its stated minutes, and hints before its exercises."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from muon_tutorial.learn.course import series
from scripts.notebooks import read_text, sources
from tests.notebooks import lesson_form

LEAST_WRITTEN = 300
TEXTS = {path.stem[:2]: read_text(path.read_text(encoding="utf-8")) for path in sources()}


def test_the_reader_writes_enough() -> None:
    """The lines of the solutions that are not in the stubs."""
    lines: dict[str, list[str]] = {"stub": [], "solution": []}
    for cell in (cell for text in TEXTS.values() for cell in text["cells"]):
        for kind in lines:
            if lesson_form.has(cell, kind):
                source = "\n".join(re.findall(r"```python\n(.*?)\n```", cell["source"], re.DOTALL))
                lines[kind] += lesson_form.code_lines_of(source if kind == "solution" else cell["source"])
    stubs, solutions = (Counter(line.strip() for line in each) for each in lines.values())
    assert (solutions - stubs).total() >= LEAST_WRITTEN


@pytest.mark.parametrize("lesson", series.LESSONS, ids=lambda lesson: lesson.number)
def test_stated_minutes_are_reading_and_required_exercises(lesson: series.Lesson) -> None:
    text = TEXTS[lesson.number]
    took = lesson_form.reading_minutes(text) + lesson_form.exercise_minutes(text)
    assert 0.8 * took <= lesson.minutes <= 1.2 * took
    assert lesson.optional == lesson_form.exercise_minutes(text, "optional")


@pytest.mark.parametrize("number", TEXTS)
def test_a_medium_or_hard_exercise_has_a_folded_hint_before_its_stub(number: str) -> None:
    hints = ""
    for cell in TEXTS[number].cells:
        if cell.cell_type == "markdown" and not lesson_form.has(cell, "solution"):
            hints = cell.source
        if lesson_form.has(cell, "stub"):
            assert "<summary>Hint</summary>" in hints or re.search(r"^\*Easy ·", hints, re.MULTILINE), (
                cell.source
            )
            hints = ""


def test_words_and_lines_are_counted_outside_folds_headings_tables_and_comments() -> None:
    text = read_text(
        "# %% [markdown]\n# # 99 · Title\n#\n# Two of [four ranks](06.ipynb) wait.\n#\n"
        "# <details><summary>More</summary>\n#\n# None.\n#\n# </details>\n#\n# | a | 1 |\n# |---|---|\n\n"
        '# %% tags=["setup"] jupyter={"source_hidden": true}\nimport hidden\n\n'
        "# %%\n# a comment is no code\nshown = 1\n\nalso = 2\n"
    )
    assert lesson_form.visible_words(text) == len(["Two", "of", "four", "ranks", "wait.", "a", "1"])
    assert lesson_form.visible_code_lines(text) == 2
