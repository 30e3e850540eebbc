"""The course as a whole: how much is read for each line of code, and how much a reader writes."""

from __future__ import annotations

import pytest

from muon_tutorial.learn.course import lesson_form
from scripts.notebooks import read_text, sources

WORDY: tuple[str, ...] = ()
"""Lessons with more than ``MOST`` words of prose a line of code. The list may only lose numbers, to the last.

Until then, what is asked of the course as a whole is not asked.
"""
MOST, MOST_ON_AVERAGE = 15, 12.5
"""Words of visible prose for each line of visible code: of a lesson, and of all lessons together."""
LEAST_WRITTEN, HARD_LINES = 150, 25
TEXTS = {path.stem[:2]: read_text(path.read_text(encoding="utf-8")) for path in sources()}
whole_course = pytest.mark.skipif(bool(WORDY), reason=f"lessons {', '.join(WORDY)} are still to be rewritten")


@pytest.mark.parametrize("number", TEXTS)
def test_a_lesson_has_few_words_for_each_line_of_code_or_is_listed_as_wordy(number: str) -> None:
    words = lesson_form.visible_words(TEXTS[number])
    lines = lesson_form.visible_code_lines(TEXTS[number])
    assert words > 100
    assert (words > MOST * lines) is (number in WORDY), f"{words} words, {lines} lines of code"


def test_no_lesson_is_listed_that_is_not_there() -> None:
    assert set(WORDY) <= set(TEXTS)


@whole_course
def test_the_course_has_few_words_for_each_line_of_code() -> None:
    words = sum(map(lesson_form.visible_words, TEXTS.values()))
    assert words <= MOST_ON_AVERAGE * sum(map(lesson_form.visible_code_lines, TEXTS.values()))


@whole_course
def test_the_reader_writes_enough() -> None:
    posed = [each for text in TEXTS.values() for each in lesson_form.exercises(text)]
    assert sum(len(each.written) for each in posed) >= LEAST_WRITTEN


@pytest.mark.parametrize("number", TEXTS)
def test_hard_solutions_fit_a_screen(number: str) -> None:
    hard = [each for each in lesson_form.exercises(TEXTS[number]) if each.difficulty == "Hard"]
    assert all(len(lesson_form.code_lines_of(each.solution)) <= HARD_LINES for each in hard)


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
