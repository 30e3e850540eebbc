"""Finds problems that notebook runners miss: failed processes, hidden widget errors, ranks that never ran.

papermill reports success when ``!python …`` exits 3, when a subprocess crashed unchecked, when a widget
callback raised (the error appears only in widget metadata) and when it is given a parameter that does not
exist. ``watch`` runs inside the kernel and leaves evidence in outputs, which ``find_problems`` reads.
The guards work however the notebook is executed.

Tags that allow intended problems: ``raises-exception``, ``stderr`` (text on stderr), ``child-may-fail``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

EVIDENCE = "application/vnd.muon-tutorial.evidence+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
_CALLS_LAUNCH = re.compile(r"(?<![\w.])launch\(")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, and its cell (the cell's id, or "notebook")."""

    cell: str
    what: str

    def __str__(self) -> str:
        return f"{self.cell}: {self.what}"


@dataclass(slots=True)
class Watch:
    """The children and launches that a kernel starts, reported cell by cell."""

    shell: Any
    children: list[subprocess.Popen | BaseProcess] = field(default_factory=list)

    def show(self, **evidence: object) -> None:
        """Leave evidence in the outputs of the current cell."""
        self.shell.display_pub.publish({EVIDENCE: evidence})

    def count_ranks(self, launch: Callable[..., list]) -> Callable[..., list]:
        """Wrap ``launch`` to leave evidence of the ranks that returned a value."""

        @functools.wraps(launch)
        def watched(*args: Any, **kwargs: Any) -> list:
            values = launch(*args, **kwargs)
            self.show(kind="ranks", returned=len(values))
            return values

        return watched

    def remember(self, method: Callable[..., None]) -> Callable[..., None]:
        """Wrap a method that starts a child process, so that each child is noted."""

        @functools.wraps(method)
        def noting(child: Any, *args: Any, **kwargs: Any) -> None:
            method(child, *args, **kwargs)
            self.children.append(child)

        return noting

    def after_cell(self, result: object = None) -> None:
        """Report each child that has failed since the last cell."""
        shell_code = self.shell.user_ns.pop("_exit_code", 0)
        if shell_code:
            self.show(kind="child", command="a shell command", exit=shell_code)
        running = []
        for child in self.children:
            if isinstance(child, subprocess.Popen):
                code, named = child.poll(), child.args
            else:
                code, named = child.exitcode, child.name
            if code is None:
                running.append(child)
            elif code:
                self.show(kind="child", command=str(named), exit=code)
        self.children = running


def watch(shell: Any) -> Watch:
    """Watch this kernel from now on. Call it in an extra cell, before the notebook's first one."""
    seen = Watch(shell)
    original = importlib.import_module("muon_tutorial.launching.launch").launch
    watched = seen.count_ranks(original)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "muon_tutorial" and vars(module).get("launch") is original:
            vars(module)["launch"] = watched
    subprocess.Popen.__init__ = seen.remember(subprocess.Popen.__init__)  # type: ignore[method-assign]
    BaseProcess.start = seen.remember(BaseProcess.start)  # type: ignore[method-assign]
    shell.events.register("post_run_cell", seen.after_cell)
    return seen


def find_problems(notebook: Mapping[str, Any]) -> list[Problem]:
    """All problems of an executed notebook, including those that its runner does not report."""
    in_cells = [problem for cell in notebook["cells"] for problem in _cell_problems(cell)]
    return [*in_cells, *widget_errors(notebook)]


def undeclared_parameters(notebook: Mapping[str, Any], given: Iterable[str]) -> list[Problem]:
    """The ``given`` parameters that the notebook's ``parameters`` cell does not declare."""
    declared = declared_parameters(notebook)
    known = ", ".join(declared) or "none"
    unknown = [name for name in given if name not in declared]
    return [Problem("notebook", f"no parameter {name!r}; declared: {known}") for name in unknown]


def declared_parameters(notebook: Mapping[str, Any]) -> list[str]:
    """The annotated assignments of the cell tagged ``parameters``, in order."""
    cells = [cell for cell in notebook["cells"] if "parameters" in tags_of(cell)]
    lines = [line for cell in cells for line in ast.parse(_text(cell["source"])).body]
    return [
        line.target.id
        for line in lines
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]


def widget_errors(notebook: Mapping[str, Any]) -> list[Problem]:
    """Errors that widget callbacks left in the widget state, which no runner checks."""
    # Imported here, because a watched kernel must not import widgets.
    from muon_tutorial.learn.widgets.shell import ERROR_MARK

    models = notebook.get("metadata", {}).get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    errors: list[str] = []
    for state in (model["state"] for model in models.values()):
        errors += [_error_text(out) for out in state.get("outputs", ()) if out["output_type"] == "error"]
        if ERROR_MARK in str(state.get("value", "")):
            errors.append(re.sub(r"<[^>]*>", " ", state["value"]).strip())
    return [Problem("widget state", error) for error in errors]


def _cell_problems(cell: Mapping[str, Any]) -> list[Problem]:
    if cell["cell_type"] != "code":
        return []
    tags, outputs, said = tags_of(cell), cell["outputs"], []
    evidence = [out["data"][EVIDENCE] for out in outputs if EVIDENCE in out.get("data", ())]
    failed = [item for item in evidence if item["kind"] == "child"]
    if "raises-exception" not in tags:
        said += [_error_text(out) for out in outputs if out["output_type"] == "error"]
    if "stderr" not in tags:
        said += [f"stderr: {_text(out['text'])}" for out in outputs if out.get("name") == "stderr"]
    if "child-may-fail" not in tags:
        said += [f"{item['command']} ended with exit code {item['exit']}" for item in failed]
    calls = "raises-exception" not in tags and _CALLS_LAUNCH.search(_text(cell["source"])) is not None
    ran = any(item["kind"] == "ranks" and item["returned"] for item in evidence)
    if ("ranks" in tags or calls) and not ran:
        said.append("this cell should run real ranks, but none ran")
    return [Problem(cell["id"], what) for what in said]


def tags_of(cell: Mapping[str, Any]) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def _error_text(output: Mapping[str, Any]) -> str:
    return f"{output['ename']}: {output['evalue']}"
