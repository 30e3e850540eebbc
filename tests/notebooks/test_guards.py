"""Each guard catches its case, in a real kernel whose runner reported no error."""

from __future__ import annotations

import asyncio
from queue import Empty

import pytest
from jupyter_client.channels import AsyncZMQSocketChannel

from scripts import notebooks
from scripts.notebook_guards import (
    Problem,
    declared_parameters,
    find_problems,
    undeclared_parameters,
)
from scripts.notebooks import NotebookProblemsError, execute, read_text, run

pytestmark = pytest.mark.timeout(600)  # a kernel starts, on a machine that may be busy

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
    """The guards' problems for a notebook with every fault, which papermill runs without an error."""
    return find_problems(execute(read_text(FAULTY)))


@pytest.mark.slow
@pytest.mark.live
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
