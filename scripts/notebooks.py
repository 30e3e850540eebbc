"""Builds notebooks from texts, checks that text and notebook agree, and runs notebooks with guards.

    python scripts/notebooks.py build [00 …]          text → executed, guarded, normalised .ipynb
    python scripts/notebooks.py check [00 …]          does each .ipynb say what its text says?
    python scripts/notebooks.py check --run [00 …]    … and does a fresh run still give its outputs?
    python scripts/notebooks.py run 00 -p dp 3        one run with other parameters; writes nothing

``notebooks/src/*.py`` (py:percent) is the source and is never written here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import jupytext
import nbformat
import papermill
from jupyter_client.channels import AsyncZMQSocketChannel
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.files import FOLDER, ROOT
from scripts.notebook_guards import EVIDENCE, Problem, find_problems, tags_of, undeclared_parameters

VIEW = "application/vnd.jupyter.widget-view+json"
GUARDS = str(ROOT / "scripts" / "notebook_guards.py")
WATCH = f"import runpy; runpy.run_path({GUARDS!r})['watch'](get_ipython());"
_PYTHON = {
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "pygments_lexer": "ipython3",
}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": _PYTHON,
}
KEPT = ("tags", "jupyter")
CELL_LIMIT = 300  # seconds for a cell, enough even on a very busy machine


class NotebookProblemsError(RuntimeError):
    """The guards found problems in a run."""


def sources(prefixes: Sequence[str] = ()) -> list[Path]:
    """The texts whose names start with one of ``prefixes``; all texts if there are no prefixes."""
    found = sorted((FOLDER / "src").glob("*.py"))
    return [path for path in found if path.name.startswith(tuple(prefixes) or "")]


def built_path(source: Path) -> Path:
    return FOLDER / f"{source.stem}.ipynb"


def read_text(text: str) -> NotebookNode:
    """The notebook that a py:percent text describes, without outputs; ids come from position and title."""
    notebook = jupytext.reads(text.strip(), fmt="py:percent")
    notebook.metadata = NotebookNode(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell, name in zip(notebook.cells, _cell_ids(notebook.cells), strict=True):
        cell.id = name
        cell.metadata = _kept_metadata(cell)
    return notebook


def _kept_metadata(cell: NotebookNode) -> NotebookNode:
    kept = NotebookNode({key: cell.metadata[key] for key in KEPT if cell.metadata.get(key)})
    if "answer" in kept.get("tags", []):  # folded until the reader runs or opens the cell
        kept["jupyter"] = NotebookNode({**kept.get("jupyter", {}), "outputs_hidden": True})
    return kept


def _cell_ids(cells: Sequence[NotebookNode]) -> Iterator[str]:
    title = "top"
    for position, cell in enumerate(cells):
        heading = re.search(r"^#+ (.+)$", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else None
        title = re.sub(r"[^a-z0-9]+", "-", heading[1].lower()).strip("-")[:40] if heading else title
        yield f"{position:02d}-{title}"


def solved(notebook: NotebookNode) -> NotebookNode:
    """The same notebook with each cell tagged ``stub`` filled with the next folded solution."""
    notebook = nbformat.from_dict(notebook)
    waiting = [cell for cell in notebook.cells if "stub" in tags_of(cell)]
    answers = [cell for cell in notebook.cells if "solution" in tags_of(cell)]
    if len(waiting) != len(answers):
        raise NotebookProblemsError(f"{len(waiting)} stubs but {len(answers)} solutions")
    for stub, answer in zip(waiting, answers, strict=True):
        stub.source = "\n".join(re.findall(r"```python\n(.*?)\n```", answer.source, re.DOTALL))
    return notebook


def run(
    notebook: NotebookNode, parameters: Mapping[str, Any] | None = None, before: Sequence[str] = ()
) -> NotebookNode:
    """Execute in a fresh kernel in an empty folder, after the code ``before``; returns the executed notebook.

    Raises:
        PapermillExecutionError: a cell raised.
        NotebookProblemsError: the guards found problems that papermill does not look for.
    """
    refuse(undeclared_parameters(notebook, parameters or ()))
    executed = execute(notebook, parameters, before)
    refuse(find_problems(executed))
    return executed


def execute(
    notebook: NotebookNode, parameters: Mapping[str, Any] | None = None, before: Sequence[str] = ()
) -> NotebookNode:
    """Like ``run``, without the guards' checks.

    The kernel has a reader's environment: this package, no start-up files, no TORCH_DISTRIBUTED_DEBUG.
    """
    notebook = nbformat.from_dict(notebook)
    hidden = [
        nbformat.v4.new_code_cell(code, id=f"hidden-{number}") for number, code in enumerate((*before, WATCH))
    ]
    notebook.cells = [*hidden, *notebook.cells]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # last digits depend on the number of threads
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, one, PYTHONPATH=path, IPYTHONDIR=folder),
        patch.object(AsyncZMQSocketChannel, "get_msg", _get_msg_looking_again),
    ):
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
        executed = papermill.execute_notebook(
            notebook,
            None,
            dict(parameters or {}),
            cwd=folder,
            progress_bar=False,
            execution_timeout=CELL_LIMIT,
            shutdown_kernel="immediate",  # otherwise the kernel and its fork server wait for each other
        )
    executed.cells = executed.cells[len(hidden) :]
    return executed


_GET_MSG = AsyncZMQSocketChannel.get_msg


async def _get_msg_looking_again(
    channel: AsyncZMQSocketChannel, timeout: float | None = None
) -> dict[str, Any]:
    """Wait for a message, and look again each second.

    nbclient sends the content of an ``Output`` widget over the same socket on which it waits for a cell's
    reply. If both happen at the same moment, nothing wakes nbclient until its timeout.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return await _GET_MSG(channel, min(1.0, max(0.0, end - time.monotonic())))
        except Empty:
            if time.monotonic() >= end:
                raise


def refuse(problems: Sequence[Problem]) -> None:
    """Raise a NotebookProblemsError that lists the problems, if there are any."""
    if problems:
        raise NotebookProblemsError("\n".join(map(str, problems)))


def normalise(notebook: NotebookNode) -> NotebookNode:
    """An executed notebook as it is committed, without anything that changes from run to run."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = NotebookNode(METADATA)
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in tags_of(cell)]
    numbers = iter(range(1, len(notebook.cells) + 1))
    for cell in notebook.cells:
        cell.metadata = _kept_metadata(cell)
        if cell.cell_type == "code":
            cell.execution_count = next(numbers)
            cell.outputs = _normal_outputs(cell.outputs, cell.execution_count)
    return notebook


def _normal_outputs(outputs: Sequence[NotebookNode], count: int) -> list[NotebookNode]:
    kept: list[NotebookNode] = []
    for output in outputs:
        if "data" in output:
            output.data = {
                kind: output.data[kind] for kind in sorted(output.data) if kind not in (VIEW, EVIDENCE)
            }
            output.metadata = NotebookNode()
            if not output.data:
                continue
        if output.output_type == "execute_result":
            output.execution_count = count
        if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def differences(text: NotebookNode, committed: NotebookNode) -> list[Problem]:
    """The places where a committed notebook differs from its text."""
    if len(text.cells) != len(committed.cells):
        counts = f"the text has {len(text.cells)} cells, the notebook {len(committed.cells)}"
        return [Problem("notebook", counts)]
    mine, theirs = (
        [(cell.id, cell.cell_type, cell.source, tags_of(cell)) for cell in notebook.cells]
        for notebook in (text, committed)
    )
    advice = "text and notebook differ; run scripts/notebooks.py build"
    return [Problem(said[0], advice) for said, other in zip(mine, theirs, strict=True) if said != other]


def output_differences(fresh: NotebookNode, committed: NotebookNode) -> list[Problem]:
    """Cells whose outputs differ from those of a fresh run, except cells tagged ``volatile``."""

    def shown(cell: NotebookNode) -> Any:
        return None if "volatile" in tags_of(cell) else cell.get("outputs")

    pairs = zip(fresh.cells, committed.cells, strict=False)
    advice = "the outputs differ from those of a fresh run"
    return [Problem(mine.id, advice) for mine, theirs in pairs if shown(mine) != shown(theirs)]


def unclean(notebook: NotebookNode) -> list[Problem]:
    """Problems in a notebook: stray metadata, machine paths, images without alt text."""
    found = [Problem("notebook", f"metadata {key!r}") for key in notebook.metadata if key not in METADATA]
    for cell in notebook.cells:
        found += [Problem(cell.id, f"metadata {key!r}") for key in cell.metadata if key not in KEPT]
        outputs = json.dumps(cell.get("outputs", []))
        hits = [(what, re.search(pattern, outputs)) for pattern, what in _UNCLEAN.items()]
        found += [Problem(cell.id, f"{what}: {hit[0][:80]}") for what, hit in hits if hit]
    return found


_UNCLEAN = {
    r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users|private)/[^\s\"<]*": "an absolute path",
    r"<img (?![^>]*alt=\\\"[^\\])[^>]{0,40}": "a picture without alt text",
    r"image/svg\+xml\\?\":|<svg": "bare SVG, which an untrusted notebook drops",
    r" at 0x[0-9a-f]{6,}": "a memory address",
    r"\b\w{0,40}Warning: .*": "a warning",
}


def build(source: Path) -> Path:
    """Execute a text and write its notebook; returns the path."""
    notebook = normalise(run(_read(source)))
    refuse(unclean(notebook))
    nbformat.validate(notebook)
    built_path(source).write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return built_path(source)


def check(source: Path, execute: bool = False, parameters: Mapping[str, Any] | None = None) -> list[Problem]:
    """The problems of a text's committed notebook; with ``execute``, also differences from a fresh run."""
    if not built_path(source).exists():
        return [Problem(source.stem, "has not been built")]
    committed = nbformat.read(built_path(source), as_version=4)
    text = _read(source)
    fresh = output_differences(normalise(run(text, parameters)), committed) if execute else []
    return [*differences(text, committed), *unclean(committed), *fresh]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="notebooks.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("build", "check", "run"))
    parser.add_argument("names", nargs="*", help="beginnings of the texts' names: 00, 01 …; default: all")
    parser.add_argument(
        "--run", action="store_true", help="check: compare with the outputs of a fresh run, too"
    )
    parser.add_argument("--solved", action="store_true", help="run: fill the stubs with the folded solutions")
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    options = parser.parse_intermixed_args(arguments)
    chosen = sources(options.names)
    if not chosen:
        print(f"no text in {FOLDER / 'src'} starts with {options.names}", file=sys.stderr)
        return 2
    if options.command == "check":
        problems = [f"{text.stem}: {problem}" for text in chosen for problem in check(text, options.run)]
        print("\n".join(problems) or f"{len(chosen)} notebooks agree with their texts")
        return 1 if problems else 0
    parameters = {name: _value(text) for name, text in options.parameter}
    for source in chosen:
        if options.command == "build":
            print(f"built {build(source).relative_to(ROOT)}")
            continue
        notebook, start = _read(source), time.perf_counter()
        run(solved(notebook) if options.solved else notebook, parameters)
        print(f"{source.stem}: ran in {time.perf_counter() - start:.1f} s")
    return 0


def _read(source: Path) -> NotebookNode:
    return read_text(source.read_text(encoding="utf-8"))


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    sys.exit(main())
