"""The form of a lesson that begins with its question: planted faults are found, and a sound one passes."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import NotebookNode

from scripts.notebooks import read_text
from scripts.pages import _export
from tests.notebooks.lesson_form import exercise_minutes, form_problems, seen, spoilers

TEXT = """
# %% [markdown]
# # 99 · Who waits?
#
# Four ranks stand still. Which one is to blame?

# %% tags=["setup", "hero"] jupyter={"source_hidden": true}
hero()

# %% [markdown]
# <details><summary>About this lesson</summary>
#
# **Ten minutes.** *Previous:* none.
#
# </details>

# %% tags=["parameters"] jupyter={"source_hidden": true}
dp: int = 2

# %% jupyter={"source_hidden": true}
import torch

# %% [markdown]
# ## Predict
#
# How many?
#
# *Easy · 2 minutes · required*

# %% tags=["stub", "predict"]
messages = ...

# %% tags=["answer"]
compare({"messages": messages}, run)

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# messages = 7
# ```
#
# </details>

# %% [markdown]
# Each of the 7 messages brings a piece.
#
# *Hard · 15 minutes · optional · par 9 lines*

# %% tags=["stub"]
def mine(): ...
"""
ANSWERS = {"messages": [r"\b7\b"]}


def built(text: str = TEXT) -> NotebookNode:
    """The notebook of a text, as after a run."""
    notebook = read_text(text)
    show(notebook, 1, '<img alt="ranks that wait" src="data:image/svg+xml;base64,">')
    show(notebook, next(n for n, cell in enumerate(notebook.cells) if "compare" in cell.source), "<td>7</td>")
    return notebook


def show(notebook: NotebookNode, place: int, page: str) -> None:
    notebook.cells[place].outputs = [nbformat.v4.new_output("display_data", {"text/html": page})]


def said(problems: list) -> str:
    return "; ".join(map(str, problems))


def test_a_sound_lesson_has_no_problems_in_its_notebook_or_on_its_page() -> None:
    notebook = built()
    assert form_problems(notebook, "99 · Who waits?", "*Previous:*") == []
    assert spoilers(notebook, ANSWERS) == []
    assert spoilers(notebook, ANSWERS, _export(built(), [])) == []
    assert exercise_minutes(notebook) == 2


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("# 99 · Who", "# 98 · Who", "does not begin with"),
        ("waits?\n#\n# Four ranks stand still. Which one is to blame?", "waits.", "title and a question"),
        ("still. Which", "still. One hangs. Which", "more than two sentences"),
        ("still.", f"still {'and still ' * 30}.", "more than 60 words"),
        ('"setup", "hero"] jupyter={"source_hidden": true}', '"setup", "hero"]', "second cell is not"),
        ("</details>\n\n# %% tags", "</details>\n# More.\n\n# %% tags", "fold the logistics"),
        ("*Previous:*", "*Before:*", "fold the logistics"),
        ("\n# %% jupyter={\"source_hidden\": true}", "\n# %%", "imports are not hidden"),
        ("# *Easy · 2 minutes · required*", "# Easy.", "has no header"),
        ("par 9 lines", "par good", "has no header"),
    ],
)  # fmt: skip
def test_each_departure_from_the_form_is_found(before: str, after: str, says: str) -> None:
    assert before in TEXT
    notebook = built(TEXT.replace(before, after, 1))
    assert says in said(form_problems(notebook, "99 · Who waits?", "*Previous:*"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("How many?", "How many? It is 7."),
        ("messages = ...", "messages = ...  # 7"),
        ('compare({"messages": messages}, run)', 'compare({"messages": messages}, 7)'),
    ],
)
def test_an_answer_in_prose_or_code_is_found_in_notebook_and_page(before: str, after: str) -> None:
    notebook = built(TEXT.replace(before, after, 1))
    assert "'7'" in said(spoilers(notebook, ANSWERS))
    assert "'7'" in said(spoilers(notebook, ANSWERS, _export(nbformat.from_dict(notebook), [])))


def test_an_answer_in_an_early_output_or_a_lost_fold_and_a_declaration_that_hides_one_are_found() -> None:
    notebook = built()
    show(notebook, 4, "<p>There are <b>7</b>.</p>")
    assert "'7'" in said(spoilers(notebook, ANSWERS))
    show(notebook, 1, "no picture")
    next(cell for cell in notebook.cells if "compare" in cell.source).metadata.pop("jupyter")
    found = said(form_problems(notebook, "99 · Who waits?", "*Previous:*"))
    assert "shows no picture" in found
    assert "outputs are not folded" in found
    page = _export(built(), []).replace('<details class="answer">', "<div>")
    assert "folds 0 answers" in said(spoilers(built(), ANSWERS, page))
    assert "not declared what would answer 'messages'" in said(spoilers(built(), {}))
    assert "the declaration is empty" in said(spoilers(built(), {"messages": [r"\b8\b"]}))
    assert "asks for 'bytes'" in said(spoilers(built(), {**ANSWERS, "bytes": ["9"]}))


def test_what_is_folded_or_a_style_is_not_seen_and_code_is_read_whole() -> None:
    page = "<style>q</style><code><span>a</span><span>.b</span></code><details><img alt='c'>d</details>"
    assert seen(page).split() == ["a.b"]
