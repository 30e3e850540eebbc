"""Makes environments like a hosted notebook's, with a kernel, without our packages; runs notebooks in them.

``linked_venv`` needs only seconds, because it links the packages of this environment. Packages are chosen by
their declared dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.notebook_guards import Problem, find_problems
from scripts.notebooks import ROOT as ROOT
from scripts.notebooks import WATCH

HOST = ("torch", "numpy", "matplotlib", "ipywidgets", "ipykernel")
NO_NETWORK = "ip link set lo up && ! ip route get 192.0.2.1 2>/dev/null && exec "


def run(command: Sequence[object], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **more)


def can_unshare() -> bool:
    """Whether a network namespace can be made on this machine."""
    found = all(map(shutil.which, ("unshare", "ip")))
    return found and run(["unshare", "-rn", "true"]).returncode == 0


def isolated() -> list[str]:
    """The command for this Python in its own network namespace, if that is permitted."""
    if not can_unshare():
        return [sys.executable]
    return ["unshare", "-rn", "sh", "-c", f'{NO_NETWORK} "$0" "$@"', sys.executable]


def empty_venv(folder: Path) -> Path:
    """A virtual environment with nothing in it, not even pip; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def linked_venv(folder: Path, names: Sequence[str] = HOST) -> Path:
    """A virtual environment with links to ``names`` and their requirements; returns its Python."""
    python = empty_venv(folder)
    [site] = folder.glob("lib/python*/site-packages")
    for installed in _closure(names):
        for part in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(str(installed.locate_file(part)))
    return python


def _closure(names: Sequence[str]) -> list[Distribution]:
    """The installed distributions of these names and of all their requirements."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        installed = next(iter(distributions(name=name)), None)
        if name not in found and installed is not None and installed.files:
            found[name] = installed
            needed = [Requirement(line) for line in installed.requires or ()]
            waiting += [e.name for e in needed if e.marker is None or e.marker.evaluate({"extra": ""})]
    return list(found.values())


def run_in(python: Path, notebook: NotebookNode, folder: Path) -> list[Problem]:
    """Run a notebook with papermill in ``python``'s kernel, without files or network; return the problems."""
    watched = nbformat.from_dict(notebook)
    watched.cells.insert(2, nbformat.v4.new_code_cell(WATCH))
    start, end, empty = folder / "in.ipynb", folder / "out.ipynb", folder / "empty"
    empty.mkdir(parents=True)
    nbformat.write(watched, start)
    command = [*isolated(), "-m", "papermill", start, end, "-k", "bare", "--cwd", empty, "--no-progress-bar"]
    done = run(command, env=environment(python, folder), cwd=empty)
    if done.returncode:
        return [Problem("papermill", done.stderr[-3000:])]
    return find_problems(nbformat.read(end, as_version=4))


def environment(python: Path, folder: Path) -> dict[str, str]:
    """A runner's variables. The kernel ``bare`` runs ``python``, and finds only the packages there."""
    install = ["-m", "ipykernel", "install", "--name", "bare", "--prefix", folder]
    run([python, *install], check=True)
    (folder / "tmp").mkdir()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    own = {"JUPYTER_PATH": str(folder / "share" / "jupyter"), "IPYTHONDIR": str(folder / "ipython")}
    return {**kept, **own, "PYTHONNOUSERSITE": "1", "TMPDIR": str(folder / "tmp")}
