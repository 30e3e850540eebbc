"""Reads a lesson's prose from its notebook, and a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from nbformat import NotebookNode


def bold_terms(notebook: NotebookNode) -> list[str]:
    """The bold terms in prose, in order, without code and labels ("Quiz.")."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    found = [" ".join(term.split()).rstrip(":") for term in re.findall(r"\*\*([^*]+)\*\*", prose)]
    return [term for term in found if not term.endswith(".")]


def parsed(page: Path) -> Any:
    """The tree of an HTML page."""
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
