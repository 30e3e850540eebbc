"""Finds the widgets that a notebook displays, by running only the cells that each of them needs.

A cell that displays a widget reads the parameter ``widgets``. Of the cells above it, only those that write a
name it needs are run.
"""

from __future__ import annotations

import ast
import io
import linecache
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from nbformat import NotebookNode

from scripts.notebook_guards import tags_of

SWITCH = "widgets"


def widget_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells that display a widget, in order."""
    cells = [cell for cell in _code_cells(notebook) if "parameters" not in tags_of(cell)]
    return [cell for cell in cells if SWITCH in _names(cell)[0]]


def cells_for(notebook: NotebookNode, cell: NotebookNode) -> list[NotebookNode]:
    """The cells to run so that ``cell`` can run, in order; ``cell`` itself is the last."""
    before = _code_cells(notebook)
    before = before[: [other.id for other in before].index(cell.id)]
    needed, wanted = [cell], set(_names(cell)[0])
    for other in reversed(before):
        read, written = _names(other)
        if written & wanted:
            needed.insert(0, other)
            wanted = (wanted - written) | read
    return needed


def displayed(
    notebook: NotebookNode, cells: Sequence[NotebookNode], parameters: Mapping[str, Any] | None = None
) -> list[Any]:
    """The objects that these cells display. The cells that they need are run first, each once.

    A cell may start ranks.
    """
    wanted = {needed.id for cell in cells for needed in cells_for(notebook, cell)}
    names: dict[str, Any] = {"__name__": "__main__"}  # so that functions are sent to ranks by value
    shown: dict[str, Any] = {}
    for cell in _code_cells(notebook):
        if cell.id not in wanted:
            continue
        with redirect_stdout(io.StringIO()):
            shown[cell.id] = _run(cell, names)
        if "parameters" in tags_of(cell):
            names.update(parameters or {})
    return [shown[cell.id] for cell in cells]


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and "setup" not in tags_of(cell)]


def _names(cell: NotebookNode) -> tuple[set[str], set[str]]:
    """The names that a cell reads, and those that it writes; ``x[0] = 1`` and ``x += 1`` read and write x.

    A cell that is not pure Python (a magic, an unfinished answer) counts as reading and writing nothing.
    """
    read: set[str] = set()
    written: set[str] = set()
    try:
        lines = ast.parse(cell.source)
    except SyntaxError:
        return read, written
    for node in ast.walk(lines):
        match node:
            case ast.Name(name, ast.Load()):
                read.add(name)
            case ast.Name(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                written.add(name)
            case ast.AugAssign(target):  # x += 1 reads x, although ast marks the target as stored only
                read |= _inner_names(target)
            case ast.alias(name, asname):
                written.add((asname or name).split(".")[0])
            case ast.Attribute(whole, ctx=ast.Store()) | ast.Subscript(whole, ctx=ast.Store()):
                written |= _inner_names(whole)
    return read, written


def _inner_names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _run(cell: NotebookNode, names: dict[str, Any]) -> Any:
    """Run a cell's lines; returns the value of its last line if that is an expression."""
    file = f"<cell {cell.id}>"
    linecache.cache[file] = (len(cell.source), None, cell.source.splitlines(True), file)
    lines = ast.parse(cell.source).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), file, "exec"), names)
    return eval(compile(ast.Expression(last.value), file, "eval"), names) if last else None
