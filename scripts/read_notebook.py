"""Reads a built notebook; its errors are one line."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat import NotebookNode

from muon_tutorial.errors import UsageError


def read_notebook(path: Path) -> NotebookNode:
    """A notebook with at least one cell.

    Raises:
        UsageError: the file is missing, or is not a notebook; the message says how to restore it.
    """
    remedy = f"`python scripts/notebooks.py build {path.stem[:2]}` builds it again"
    if not path.is_file():
        raise UsageError(f"{path} is missing; {remedy}")
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        notebook.cells[0]
    except Exception as error:
        raise UsageError(f"{path} is not a whole notebook ({type(error).__name__}); {remedy}") from error
    return notebook
