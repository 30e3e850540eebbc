"""Only those cells of a notebook run that a widget needs."""

from __future__ import annotations

import inspect

import pytest
from nbformat import NotebookNode

from scripts.notebooks import read_text
from scripts.shells import cells_for, displayed, widget_cells

TEXT = """
# %% tags=["setup"]
%pip install nothing

# %% tags=["parameters"]
rows: int = 2
widgets: bool = True

# %%
import math as m
from collections import Counter

# %%
raise RuntimeError("this cell is needed by nobody")

# %%
def area(rows):
    return m.prod((rows, 10))

# %%
table = {}

# %%
table["area"] = area(rows)
print("said")

# %%
size = table["area"]
size, widgets
"""


@pytest.fixture
def notebook() -> NotebookNode:
    return read_text(TEXT)


def test_a_cell_that_reads_the_switch_displays_a_widget_and_cells_that_give_it_no_name_are_left_out(
    notebook: NotebookNode,
) -> None:
    assert [cell.id for cell in widget_cells(notebook)] == ["07-top"]
    needed = [cell.id for cell in cells_for(notebook, notebook.cells[-1])]
    assert needed == ["01-top", "02-top", "04-top", "05-top", "06-top", "07-top"]


def test_what_it_displays_follows_the_parameters_and_prints_nothing(
    notebook: NotebookNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert displayed(notebook, notebook.cells[-2:]) == [None, (20, True)]
    assert displayed(notebook, notebook.cells[-1:], {"rows": 5, "widgets": False}) == [(50, False)]
    assert capsys.readouterr().out == ""


def test_a_cell_that_adds_to_a_name_needs_the_cell_that_made_it() -> None:
    text = TEXT.replace('table["area"] = area(rows)', "table |= {'area': area(rows)}")
    assert displayed(read_text(text), read_text(text).cells[-1:]) == [(20, True)]


@pytest.mark.parametrize("source", ["answer = (", "%matplotlib inline", "!ls"])
def test_a_half_written_answer_and_a_magic_are_left_out(notebook: NotebookNode, source: str) -> None:
    notebook.cells[3].source = source
    assert [cell.id for cell in widget_cells(notebook)] == ["07-top"]
    assert displayed(notebook, notebook.cells[-1:]) == [(20, True)]


def test_its_functions_show_their_own_lines() -> None:
    text = TEXT.replace("size, widgets", "area, widgets")
    [(area, _)] = displayed(read_text(text), read_text(text).cells[-1:])
    assert inspect.getsource(area).startswith("def area(rows):")
