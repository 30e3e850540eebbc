"""Reads a lesson's prose from its notebook, and checks that a page loads nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from nbformat import NotebookNode

from muon_tutorial.learn.widgets.shell import VIEW
from scripts.files import POLICY
from scripts.notebook_guards import WIDGET_STATE

FETCHED = {"src", "srcset", "poster", "data", "background", "action", "formaction", "ping", "manifest"}
"""Attributes whose URL a browser loads at once."""


def bold_terms(notebook: NotebookNode) -> list[str]:
    """The bold terms in prose, in order, without code and labels ("Quiz.")."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    found = [" ".join(term.split()).rstrip(":") for term in re.findall(r"\*\*([^*]+)\*\*", prose)]
    return [term for term in found if not term.endswith(".")]


def parsed(page: Path) -> Any:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def assert_keeps_to_itself(page: Path, tree: Any) -> None:
    """Assert that a page has no script and no widget's state, loads nothing, and forbids loading."""
    assert tree.find_all(["script", "iframe", "object", "embed", "base", "audio", "video"]) == []
    asked = [tag[name] for tag in tree.find_all() for name in FETCHED & tag.attrs.keys()]
    asked += [tag["href"] for tag in tree.find_all(["link", "image", "use"])]
    assert [url[:60] for url in asked if not url.startswith("data:")] == []
    styles = " ".join([tag.string for tag in tree.find_all("style")])
    styles += " ".join([tag["style"] for tag in tree.find_all(style=True)])
    assert re.findall(r"@import|url\((?![\"']?data:)[^)]*|@font-face", styles) == []
    text = page.read_text(encoding="utf-8")
    assert [mark for mark in (WIDGET_STATE, VIEW, "model_id", "ipywidgets.org") if mark in text] == []
    metas = tree.find_all("meta", attrs={"http-equiv": "Content-Security-Policy"})
    assert [meta["content"] for meta in metas] == [POLICY], page.name
    assert text.index("Content-Security") < 500
