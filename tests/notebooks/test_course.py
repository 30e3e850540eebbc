"""The course as a whole: the amount that a reader writes, and the count of words and lines."""

from __future__ import annotations

import re

import pytest

from muon_tutorial.learn.course import series
from scripts.notebooks import read_text, sources
from tests.notebooks import lesson_form

LEAST_WRITTEN = 300
TEXTS = {path.stem[:2]: read_text(path.read_text(encoding="utf-8")) for path in sources()}


def test_the_reader_writes_enough() -> None:
    posed = [each for text in TEXTS.values() for each in lesson_form.exercises(text)]
    assert sum(len(each.written) for each in posed) >= LEAST_WRITTEN


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


TEXT = """
# %% [markdown]
# # 99 · Who waits?
#
# Two of [four ranks](06_the_grid.ipynb) wait: which?
#
# <details><summary>More</summary>
#
# None of this.
#
# </details>

# %% tags=["setup"] jupyter={"source_hidden": true}
import hidden

# %%
# a comment is no code
shown = 1

also = 2

# %% [markdown]
# ## A heading
#
# | a | b |
# |---|---|
# | 1 | 2 |
#
# ```
# no prose
# ```
#
# *Hard · 9 minutes · optional · par 3 lines*

# %% tags=["stub", "hard"]
def mine(x):
    y = ...
    return y

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# def mine(x):
#     # twice
#     y = x + x
#
#     y = y + 0
#     return y
# ```
#
# </details>
"""


def test_words_lines_and_what_is_written_are_counted_as_it_is_said() -> None:
    text = read_text(TEXT)
    words = ["Two", "of", "four", "ranks", "wait:", "which?", "a", "b", "1", "2"]
    assert lesson_form.visible_words(text) == len(words)
    assert lesson_form.visible_code_lines(text) == 2 + 3
    [posed] = lesson_form.exercises(text)
    assert posed.difficulty == "Hard"
    assert posed.written == ["y = x + x", "y = y + 0"]
