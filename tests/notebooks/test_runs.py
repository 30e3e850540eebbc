"""Notebooks run under papermill: without network, solved on another grid, and twice in one kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import nbformat
import pytest
from nbformat import NotebookNode

from scripts.notebooks import (
    ROOT,
    built_path,
    normalise,
    output_differences,
    read_text,
    run,
    solved,
    sources,
    unclean,
)

from ..exhaustive import left_out
from . import bare

pytestmark = pytest.mark.timeout(900)

VERDICTS = ("Right.", "Not yet.", "No answer yet.")
TWO_THREADS = """import torch
torch.set_num_threads(2)
for _ in range(3):
    torch.randn(768, 768) @ torch.randn(768, 768)
    torch.randn(1_000_000).exp().sum()
"""


def notebook_of(source: Path) -> NotebookNode:
    return read_text(source.read_text(encoding="utf-8"))


def twice(notebook: NotebookNode) -> NotebookNode:
    """A notebook with all cells, followed by all cells again."""
    again = nbformat.from_dict(notebook).cells
    for cell in again:
        cell.id += "-again"
        cell.metadata.tags = [tag for tag in cell.metadata.get("tags", []) if tag != "parameters"]
    return nbformat.from_dict({**notebook, "cells": [*notebook.cells, *again]})


@pytest.mark.parametrize("source", sources()[:1], ids=lambda path: path.stem[:2])
def test_twice_in_a_kernel_that_has_run_two_threads_it_gives_its_committed_outputs(source: Path) -> None:
    notebook = notebook_of(source)
    executed = run(twice(notebook), before=[TWO_THREADS])
    committed = nbformat.read(built_path(source), as_version=4)
    half = len(notebook.cells)
    assert unclean(normalise(executed)) == []
    for part in (executed.cells[:half], executed.cells[half:]):
        shown = normalise(nbformat.from_dict({**executed, "cells": part}))
        assert len(shown.cells) == len(committed.cells)
        assert output_differences(shown, committed) == []


def daily(source: Path) -> bool:
    """Whether tests without ``-m exhaustive`` run a lesson's solutions here; ``tests/learn`` also runs them
    on other grids.
    """
    return source.stem[:2] == "00"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, id=path.stem[:2], marks=[] if daily(path) else [pytest.mark.exhaustive])
        for path in sources()
    ],
)
def test_solved_on_another_grid_every_check_passes(source: Path) -> None:
    executed = run(solved(notebook_of(source)), {"dp": 3, "steps": 1, "widgets": False})
    verdicts = [
        output.data["text/plain"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result" and output.data["text/plain"].startswith(VERDICTS)
    ]
    assert verdicts
    assert all(verdict.startswith("Right.") for verdict in verdicts)


@pytest.mark.skipif(
    not bare.can_unshare(), reason="needs unshare and ip, and permission to make a network namespace"
)
def test_the_namespace_in_which_notebooks_run_has_no_network() -> None:
    refused = bare.run(
        [*bare.isolated(), "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 5)"]
    )
    assert "Network is unreachable" in refused.stderr


STEPS_ARE_TIMED = ("04", "05")  # these lessons print medians of times, which are not compared
CHECKER = """
import json, sys, traceback
from scripts.notebooks import check, sources
for line in sys.stdin:
    name, parameters = json.loads(line)
    try:
        problems = "; ".join(map(str, check(*sources([name]), execute=True, parameters=parameters)))
    except Exception:
        problems = traceback.format_exc()
    print(json.dumps(problems), flush=True)
"""


@pytest.fixture(scope="module")
def checker() -> Iterator[Popen[str]]:
    """A process without network that reads lessons' names, runs them, and answers with their problems."""
    command = [*bare.isolated(), "-c", CHECKER]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as process:
        yield process


@pytest.mark.parametrize(
    "source",
    [left_out(sources()[0], id="00"), *(pytest.param(path, id=path.stem[:2]) for path in sources()[1:])],
)  # the first is run twice above, and test_pack.py runs its self-contained copy without network
def test_it_gives_its_committed_outputs_without_network(source: Path, checker: Popen[str]) -> None:
    assert checker.stdin is not None
    assert checker.stdout is not None
    short = {"steps": 1} if source.stem[:2] in STEPS_ARE_TIMED else {}
    print(json.dumps([source.stem, short]), file=checker.stdin, flush=True)
    assert json.loads(checker.stdout.readline()) == ""
