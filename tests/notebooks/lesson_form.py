"""Checks the form of a lesson: its first screen is a question and a picture, and it gives no answer away.

A lesson chooses this form by tagging its set-up cell ``hero``. The first cell of such a lesson is the title
and the question, its second shows the picture, and all logistics follow, folded. Each stub has a header. A
stub tagged ``predict`` asks for predictions; cells tagged ``answer`` answer them, and their outputs are
folded. ``spoilers.txt`` has, for each lesson and predicted name, patterns that would give its answer away.
Each pattern must match a cell tagged ``answer``, because a pattern that matches no answer guards nothing.
This module reads notebooks, and runs nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from muon_tutorial.learn.course import series
from scripts.points import HEADER as HEADER

Answers = Mapping[str, Sequence[str]]
"""For each predicted name, patterns (regular expressions) that would give its answer away."""
_PATTERNS = [*series.rows(Path(__file__).with_name("spoilers.txt"))]

WORDS = 60
"""The most words that a question on the first screen may have."""
FOLD = '<details class="answer">'
"""The HTML with which a page begins to fold the outputs of a cell tagged ``answer``."""
_INLINE = {"span", "code", "a", "b", "i", "em", "strong", "sub", "sup"}
_FOLDED = re.compile(r"<details.*?</details>", re.DOTALL)
_NOT_PROSE = re.compile(r"^#+ [^\n]*$|^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class _Seen(HTMLParser):
    """The words that a page's reader sees or hears: texts and alt texts, except those inside a fold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.folds = self.unseen = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.words += [] if tag in _INLINE else [" "]
        self.folds += tag == "details"
        self.unseen += tag in ("style", "title")
        if tag == "img" and not self.folds:
            self.words.append(f"{dict(attrs).get('alt') or ''} ")

    def handle_endtag(self, tag: str) -> None:
        self.folds -= tag == "details"
        self.unseen -= tag in ("style", "title")

    def handle_data(self, data: str) -> None:
        if not (self.folds or self.unseen):
            self.words.append(data)


def seen(page: str) -> str:
    """The words of HTML, including alt texts, that a reader sees before opening a fold.

    >>> seen('<p>a <img alt="b"></p><details><summary>c</summary>d</details>')
    ' a  b   '
    """
    return "".join(_Seen(page).words)


def is_hidden(cell: Mapping[str, Any], what: str) -> bool:
    """Whether a notebook opens with this cell's ``source`` or ``outputs`` hidden."""
    return bool(cell["metadata"].get("jupyter", {}).get(f"{what}_hidden"))


def has(cell: Mapping[str, Any], *tags: str) -> bool:
    return set(tags) <= set(cell["metadata"].get("tags", ()))


def shown(cell: Mapping[str, Any]) -> str:
    """The text of a cell that a reader sees in a notebook before it is run."""
    if cell["cell_type"] == "markdown":
        return _FOLDED.sub("", cell["source"])
    source = "" if is_hidden(cell, "source") else cell["source"]
    outputs = [] if is_hidden(cell, "outputs") else cell["outputs"]
    return "\n".join([source, *(seen(_page(output)) for output in outputs)])


def _page(output: Mapping[str, Any]) -> str:
    """The displayed form of an output: its HTML, or else its text."""
    data = output.get("data", {})
    return data.get("text/html") or escape(data.get("text/plain") or output.get("text", ""))


def answers_of(number: str) -> dict[str, list[str]]:
    """The patterns of a lesson's predictions."""
    names = dict.fromkeys(name for lesson, name, _ in _PATTERNS if lesson == number)
    return {name: [row[2] for row in _PATTERNS if row[:2] == [number, name]] for name in names}


def predicted_names(cell: Mapping[str, Any]) -> list[str]:
    """The names that a stub tagged ``predict`` leaves open."""
    return [
        node.id
        for line in ast.walk(ast.parse(cell["source"] if has(cell, "predict") else ""))
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and line.value.value is ...
        for node in line.targets
        if isinstance(node, ast.Name)
    ]


def assert_gives_nothing_away(notebook: Mapping[str, Any], answers: Answers, page: str) -> None:
    """Assert that neither an unrun notebook nor its page answers a prediction before an answer cell does.

    Each prediction must have a pattern, and a later cell tagged ``answer`` must match it.
    """
    cells = notebook["cells"]
    asked = [(place, name) for place, cell in enumerate(cells) for name in predicted_names(cell)]
    assert {name for _, name in asked} == set(answers)
    revealing = [place for place, cell in enumerate(cells) if has(cell, "answer")]
    parts = page.split(FOLD)
    assert len(parts) == len(revealing) + 1
    for place, name in asked:
        for pattern in answers[name]:
            said = [each for each in revealing if each > place and re.search(pattern, _all_said(cells[each]))]
            assert said, f"no cell tagged answer says {pattern!r}"
            before = FOLD.join(parts[: revealing.index(said[0]) + 1])
            assert not re.search(pattern, seen(before)), f"the page says {pattern!r} before its fold"
            early = [cell["id"] for cell in cells[: said[0] + 1] if re.search(pattern, shown(cell))]
            assert early == [], f"a cell says {pattern!r}, which answers a prediction"


def _all_said(cell: Mapping[str, Any]) -> str:
    """All text of a cell and its outputs, including folds."""
    pages = (_page(output) for output in cell["outputs"])
    return " ".join(seen(re.sub(r"</?details[^>]*>", "", page)) for page in pages)


def assert_has_this_form(notebook: Mapping[str, Any], title: str, links: str) -> None:
    """Assert that a lesson's first screen, folds and headers have this form."""
    first, hero, logistics, *others = notebook["cells"]
    heading, _, question = first["source"].partition("\n\n")
    assert heading == f"# {title}"
    assert "?" in first["source"]
    assert 0 < len(question.split()) <= WORDS
    assert len(re.findall(r"[.?!](?=\s|$)", question)) <= 2, "more than two sentences"
    assert has(hero, "setup", "hero")
    assert any("<img " in _page(output) for output in hero["outputs"])
    assert links in logistics["source"]
    assert _FOLDED.sub("", logistics["source"]).strip() == ""
    assert all(is_hidden(cell, "source") for cell in (hero, *others[:2]))
    prose = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and not has(cell, "solution"):
            prose = cell["source"]
        if has(cell, "stub"):
            assert HEADER.fullmatch(prose.strip().rpartition("\n\n")[2].strip()), (
                f"{cell['id']} has no header"
            )
            prose = ""
        assert is_hidden(cell, "outputs") or not has(cell, "answer"), f"{cell['id']}: unfolded outputs"


def code_lines_of(source: str) -> list[str]:
    """The lines of code in a source, without blank lines and comments."""
    return [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]


def prose_words(text: str) -> list[str]:
    """The words of Markdown outside folds.

    >>> prose_words("# A title\\n\\n- See [the *grid*](06.ipynb) below.\\n\\n| a | 1 × 2 |\\n|---|---|")
    ['See', 'the', '*grid*', 'below.', 'a', '1', '2']
    """
    shown = _NOT_PROSE.sub("", HEADER.sub("", _FOLDED.sub("", text)))
    words = _LINK.sub(r"\1", shown).replace("|", " ").split()
    return [word for word in words if any(map(str.isalnum, word))]


def exercise_minutes(notebook: Mapping[str, Any], kind: str = "required") -> int:
    """The minutes of all required exercises together, or of all optional ones."""
    text = "\n\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return sum(int(minutes) for _, minutes, is_kind, _ in HEADER.findall(text) if is_kind == kind)


def reading_minutes(notebook: Mapping[str, Any]) -> float:
    """A newcomer's reading time: 150 words or 12 lines per minute, and half a minute per cell with output."""
    cells = notebook["cells"]
    shown = [cell for cell in cells if cell["cell_type"] == "code" and not is_hidden(cell, "source")]
    words = sum(len(prose_words(cell["source"])) for cell in cells if cell["cell_type"] == "markdown")
    lines = sum(len(code_lines_of(cell["source"])) for cell in shown)
    return words / 150 + lines / 12 + sum(not has(cell, "stub") for cell in shown) / 2
