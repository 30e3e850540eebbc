"""Texts become committed notebooks, a widget's cells are found, and guards catch what a runner lets pass."""

from __future__ import annotations

import asyncio
import inspect
from queue import Empty
from typing import Any

import nbformat
import pytest
from jupyter_client.channels import AsyncZMQSocketChannel
from nbformat import NotebookNode

from scripts import notebooks
from scripts.notebook_guards import Problem, declared_parameters, find_problems, undeclared_parameters
from scripts.notebooks import (
    METADATA,
    VIEW,
    NotebookProblemsError,
    differences,
    execute,
    normalise,
    output_differences,
    read_text,
    run,
    solved,
    unclean,
)
from scripts.shells import cells_for, displayed, widget_cells

TEXT = """
# %% [markdown]
# # A title: with *signs*!

# %% tags=["stub"]
answer = ...

# %% [markdown] tags=["solution"]
# <details><summary>Solution</summary>
#
# ```python
# answer = 4
# ```
#
# </details>

# %% [markdown]
# ## Next

# %%
answer
"""


def executed(*outputs: NotebookNode) -> NotebookNode:
    """The notebook of ``TEXT`` as a runner leaves it, with ``outputs`` in its last cell."""
    notebook = read_text(TEXT)
    notebook.metadata.papermill = {"start_time": "now"}
    notebook.metadata.widgets = {"state": {}}
    notebook.metadata.language_info = {"name": "python", "version": "3.99"}
    for number, cell in enumerate(notebook.cells):
        cell.metadata.papermill = {"duration": number}
        if cell.cell_type == "code":
            cell.execution_count = 7 + number
    notebook.cells[-1].outputs = list(outputs)
    return notebook


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return nbformat.v4.new_output("stream", name=name, text=text)


def display(**data: Any) -> NotebookNode:
    return nbformat.v4.new_output("execute_result", {"text/plain": "x", **data}, execution_count=9)


def test_solved_fills_the_stub_with_the_folded_solution_and_refuses_a_stub_without_one() -> None:
    filled = solved(read_text(TEXT))
    assert filled.cells[1].source == "answer = 4"
    assert read_text(TEXT).cells[1].source == "answer = ..."
    with pytest.raises(NotebookProblemsError, match="1 stubs but 0 solutions"):
        solved(read_text(TEXT.replace('tags=["solution"]', "")))


def test_normalise_leaves_what_a_second_run_would_write_again() -> None:
    view: dict[str, Any] = {VIEW: {"model_id": "random"}, "text/html": "<b>"}
    one = executed(stream("a"), stream("b"), stream("c", "stderr"), display(**view))
    two = executed(stream("ab"), stream("c", "stderr"), display(**{**view, VIEW: {"model_id": "other"}}))
    two.metadata.papermill = {"start_time": "later"}
    two.cells.insert(1, nbformat.v4.new_code_cell("a = 1", metadata={"tags": ["injected-parameters"]}))
    assert normalise(one) == normalise(two)
    assert normalise(one).metadata == METADATA
    assert [cell.execution_count for cell in normalise(one).cells if cell.cell_type == "code"] == [1, 2]
    assert VIEW not in str(normalise(one))
    nbformat.validate(normalise(one))


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("answer\n", "answer + 1\n", "differ"),
        ("## Next", "## Then", "differ"),
        ('tags=["stub"]', 'tags=["stub", "volatile"]', "differ"),
        ("answer\n", "answer\n\n# %%\n1\n", "6 cells"),
    ],
)
def test_drift_between_text_and_notebook_is_found(before: str, after: str, complaint: str) -> None:
    committed = normalise(executed())
    assert differences(read_text(TEXT), committed) == []
    found = differences(read_text(TEXT.replace(before, after)), committed)
    assert complaint in found[0].what


def test_outputs_are_compared_but_for_volatile_cells() -> None:
    one, two = normalise(executed(stream("1 s"))), normalise(executed(stream("2 s")))
    assert [problem.cell for problem in output_differences(one, two)] == ["04-next"]
    for notebook in (one, two):
        notebook.cells[-1].metadata.tags = ["volatile"]
    assert output_differences(one, two) == []


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (stream("see /home/me/file.py"), "an absolute path"),
        (stream("<thing at 0x7f3a5c>"), "a memory address"),
        (stream("UserWarning: old", "stderr"), "a warning"),
        (display(**{"text/html": '<img src="data:x">'}), "without alt text"),
        (display(**{"text/html": '<img alt="" src="data:x">'}), "without alt text"),
        (display(**{"image/svg+xml": "<svg/>"}), "bare SVG"),
        (display(**{"text/html": "<svg></svg>"}), "bare SVG"),
        (display(**{"text/html": '<img alt="x" width="3" src="data:image/svg+xml;base64,PHN2Zz4=">'}), None),
        (stream("1/2 of it\n"), None),
    ],
)
def test_what_must_not_be_committed_is_found_and_no_more(output: NotebookNode, complaint: str | None) -> None:
    found = unclean(normalise(executed(output)))
    assert any(complaint in problem.what for problem in found) if complaint else found == []


WIDGET_TEXT = """
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
    return read_text(WIDGET_TEXT)


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
    text = WIDGET_TEXT.replace('table["area"] = area(rows)', "table |= {'area': area(rows)}")
    assert displayed(read_text(text), read_text(text).cells[-1:]) == [(20, True)]


@pytest.mark.parametrize("source", ["answer = (", "%matplotlib inline", "!ls"])
def test_a_half_written_answer_and_a_magic_are_left_out(notebook: NotebookNode, source: str) -> None:
    notebook.cells[3].source = source
    assert [cell.id for cell in widget_cells(notebook)] == ["07-top"]
    assert displayed(notebook, notebook.cells[-1:]) == [(20, True)]


def test_its_functions_show_their_own_lines() -> None:
    text = WIDGET_TEXT.replace("size, widgets", "area, widgets")
    [(area, _)] = displayed(read_text(text), read_text(text).cells[-1:])
    assert inspect.getsource(area).startswith("def area(rows):")


FAULTY = """
# %% tags=["parameters"]
dp: int = 2

# %% [markdown]
# # shell
# %%
!python -c "raise SystemExit(3)"

# %% [markdown]
# # unchecked
# %%
import subprocess, sys
done = subprocess.run([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL)

# %% [markdown]
# # process
# %%
import multiprocessing, os
child = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
child.start()
child.join()

# %% [markdown]
# # callback
# %%
import ipywidgets
output, knob = ipywidgets.Output(), ipywidgets.IntSlider()
@output.capture()
def turn(change):
    raise ValueError("the callback broke")
knob.observe(turn, names="value")
knob.value = 1

# %% [markdown]
# # drawing
# %%
from muon_tutorial.learn.pictures.picture import blank, finish
from muon_tutorial.learn.widgets.shell import Shell, slider
def draw(size):
    return finish(blank(100 // (3 - size), 10)[0], "card", "a card")
shell = Shell(draw, size=slider("size", last=3))
shell.controls["size"].value = 3

# %% [markdown]
# # real ranks
# %%
from muon_tutorial import launch
def number(rank):
    return rank
assert launch(number, 2) == [0, 1]

# %% [markdown]
# # pretended ranks
# %%
launch = lambda fn, count: [fn(rank) for rank in range(count)]
assert launch(number, 2) == [0, 1]

# %% [markdown]
# # promised ranks
# %% tags=["ranks"]
skipped = True

# %% [markdown]
# # meant
# %% tags=["child-may-fail"]
allowed = subprocess.run([sys.executable, "-c", "raise SystemExit(4)"])

# %% [markdown]
# # noise
# %%
import warnings
warnings.warn("something is old")
"""

CAUGHT = {
    "-shell": ["exit code 3"],
    "-unchecked": ["exit code -6"],
    "-process": ["exit code 5"],
    "-real-ranks": [],
    "-pretended-ranks": ["none ran"],
    "-promised-ranks": ["none ran"],
    "-meant": [],
    "-noise": ["something is old"],
    "widget state": ["ValueError: the callback broke", "ZeroDivisionError"],
}


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    """What the guards find in a notebook with every fault. Papermill runs this notebook without an error."""
    return find_problems(execute(read_text(FAULTY)))


@pytest.mark.timeout(600)  # a kernel starts, on a machine that may be busy
@pytest.mark.parametrize("cell", CAUGHT)
def test_a_fault_that_papermill_passes_is_caught_and_nothing_else(problems: list[Problem], cell: str) -> None:
    said = [problem.what for problem in problems if problem.cell.endswith(cell)]
    assert len(said) == len(CAUGHT[cell])
    assert all(part in what for part, what in zip(CAUGHT[cell], said, strict=True))


def test_an_undeclared_or_unannotated_parameter_is_refused_before_anything_runs() -> None:
    notebook = read_text(FAULTY)
    assert declared_parameters(notebook) == ["dp"]
    assert undeclared_parameters(notebook, ["dp"]) == []
    with pytest.raises(NotebookProblemsError, match="no parameter 'dpp'; declared: dp"):
        run(notebook, {"dpp": 3})
    assert declared_parameters(read_text('# %% tags=["parameters"]\na, b = 1, 2\nc: int = 3\n')) == ["c"]


def test_a_reply_that_nothing_wakes_up_for_is_found_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float | None] = []

    async def get_msg(_: object, timeout: float | None = None) -> dict[str, str]:
        looks.append(timeout)
        if len(looks) < 3:
            raise Empty
        return {"msg_type": "execute_reply"}

    monkeypatch.setattr(notebooks, "_GET_MSG", get_msg)
    channel = AsyncZMQSocketChannel.__new__(AsyncZMQSocketChannel)
    assert asyncio.run(notebooks._get_msg_looking_again(channel, 300)) == {"msg_type": "execute_reply"}
    assert looks == [1.0, 1.0, 1.0]
    looks.clear()
    with pytest.raises(Empty):
        asyncio.run(notebooks._get_msg_looking_again(channel, 0))
    assert len(looks) == 1
