"""Reads a lesson's prose from its notebook."""

from __future__ import annotations

import re

from nbformat import NotebookNode


def bold_terms(notebook: NotebookNode) -> list[str]:
    """The bold terms in prose, in order, without code and labels ("Quiz.")."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    found = [" ".join(term.split()).rstrip(":") for term in re.findall(r"\*\*([^*]+)\*\*", prose)]
    return [term for term in found if not term.endswith(".")]
