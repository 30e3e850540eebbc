"""Every lesson has the common form, its committed notebook equals its text, and the course is complete."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from muon_tutorial.learn.course import series
from scripts.notebook_guards import declared_parameters
from scripts.notebooks import built_path, check, read_text, solved, sources
from tests.notebooks import lesson_form


@pytest.fixture(params=sources(), ids=lambda path: path.stem[:2])
def source(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def committed(source: Path) -> NotebookNode:
    return nbformat.read(built_path(source), as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def test_the_committed_notebook_is_its_text_clean_and_valid(source: Path, committed: NotebookNode) -> None:
    assert check(source) == []
    nbformat.validate(committed)
    outputs = [output for cell in code(committed) for output in cell.outputs]
    assert [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"] == []


def test_it_opens_with_what_a_reader_needs(committed: NotebookNode) -> None:
    opening = "\n".join(cell.source for cell in committed.cells[:3] if cell.cell_type == "markdown")
    for promise in (r"minutes?\.", r"you can", r"\*You need", r"\*Previous:", r"\*Next:", r"\*In Colab:"):
        assert re.search(promise, opening, re.IGNORECASE), promise


ASKS_BEFORE_IT_SHOWS = {"02", "05", "07", "08", "10", "11", "12", "13", "14", "15", "16"}


def test_after_recap_and_quiz_it_ends_with_its_climax_and_hands_over(
    source: Path, committed: NotebookNode
) -> None:
    [quiz] = [place for place, cell in enumerate(committed.cells) if "**Quiz.**" in cell.source]
    assert "## Recap" in committed.cells[quiz].source
    last = committed.cells[-1]
    assert last.cell_type == "markdown"
    hand_over, _, read_on = last.source.rpartition("\n\n")
    assert read_on == series.read_on(series.lesson(source.stem[:2]))
    assert ("**What you can do now.**" if source.stem.startswith("16") else "lesson") in hand_over
    after = [lesson_form.has(cell, "solution") for cell in committed.cells[quiz:]].index(True) + 1
    end = committed.cells[quiz + after : -1]
    exercises = lesson_form.HEADER.findall("\n".join(cell.source for cell in end))
    assert source.stem[:2] not in ASKS_BEFORE_IT_SHOWS or exercises
    if source.stem < "09":
        shown = [cell for cell in end if cell.cell_type == "code"][-1]
        assert shown.outputs
        assert re.fullmatch(r"[^.?!]*\bnext lesson\b[^.?!]*\.", hand_over)
    if source.stem >= "09":
        section, *climax = end
        assert section.source.startswith("## ")
        assert any(cell.get("outputs") for cell in climax)
    if "09" <= source.stem < "16":
        assert re.fullmatch(r"[^.?!]*\b(next|last) lesson asks\b[^.?!]*[.?]", hand_over)


def test_parameters_follow_the_set_up_one_annotated_assignment_a_line(committed: NotebookNode) -> None:
    setup, cell = code(committed)[:2]
    assert tagged(committed, "setup") == [setup]
    assert tagged(committed, "parameters") == [cell]
    assert len(declared_parameters(committed)) == len(cell.source.splitlines())
    assert {"dp", "tp", "seed", "widgets"} <= set(declared_parameters(committed))


def test_it_begins_with_question_and_picture_and_gives_nothing_away(
    source: Path, committed: NotebookNode, site: Path
) -> None:
    number = source.stem[:2]
    assert tagged(committed, "hero")
    page = (site / f"{source.stem}.html").read_text(encoding="utf-8")
    lesson_form.assert_has_this_form(committed, series.lesson(number).name, "*Previous:*")
    lesson_form.assert_gives_nothing_away(committed, lesson_form.answers_of(number), page)


def test_cells_are_short(committed: NotebookNode) -> None:
    lengths = [len(cell.source.splitlines()) for cell in code(committed)]
    assert statistics.median(lengths) <= 5
    for cell in (*code(committed), *code(solved(committed))):
        most = 25 if lesson_form.has(cell, "hard") else 15
        assert len(cell.source.splitlines()) <= most


def test_prose_names_no_number_that_a_parameter_sets(committed: NotebookNode) -> None:
    text = " ".join(cell.source for cell in committed.cells if cell.cell_type == "markdown")
    counted = r"\b(two|three|four|six|eight|\d+) (ranks|processes|copies|columns|rows|pieces)\b"
    assert re.findall(counted, text, re.IGNORECASE) == []


LEAST_WRITTEN = 400


@cache
def text_of(number: str) -> NotebookNode:
    """A lesson's text as a notebook. Callers must not write to it."""
    [path] = sources([number])
    return read_text(path.read_text(encoding="utf-8"))


def test_the_reader_writes_enough() -> None:
    """The reader's part of a solution is the lines that its stub lacks."""
    lines: dict[str, list[str]] = {"stub": [], "solution": []}
    for cell in (cell for each in series.LESSONS for cell in text_of(each.number)["cells"]):
        for kind in lines:
            if lesson_form.has(cell, kind):
                source = "\n".join(re.findall(r"```python\n(.*?)\n```", cell["source"], re.DOTALL))
                lines[kind] += lesson_form.code_lines_of(source if kind == "solution" else cell["source"])
    stubs, solutions = (Counter(line.strip() for line in each) for each in lines.values())
    assert (solutions - stubs).total() >= LEAST_WRITTEN


@pytest.mark.parametrize("lesson", series.LESSONS, ids=lambda lesson: lesson.number)
def test_stated_minutes_are_reading_and_required_exercises(lesson: series.Lesson) -> None:
    text = text_of(lesson.number)
    took = lesson_form.reading_minutes(text) + lesson_form.exercise_minutes(text)
    assert 0.8 * took <= lesson.minutes <= 1.2 * took
    assert lesson.optional == lesson_form.exercise_minutes(text, "optional")


@pytest.mark.parametrize("lesson", series.LESSONS, ids=lambda lesson: lesson.number)
def test_a_medium_or_hard_exercise_has_a_folded_hint_before_its_stub(lesson: series.Lesson) -> None:
    hints = ""
    for cell in text_of(lesson.number).cells:
        if cell.cell_type == "markdown" and not lesson_form.has(cell, "solution"):
            hints = cell.source
        if lesson_form.has(cell, "stub"):
            assert "<summary>Hint</summary>" in hints or re.search(r"^\*Easy ·", hints, re.MULTILINE), (
                cell.source
            )
            hints = ""
