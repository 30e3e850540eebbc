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
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from muon_tutorial.learn.course import series
from scripts.notebook_guards import Problem
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
    return data.get("text/html") or _escaped(data.get("text/plain") or output.get("text", ""))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def answers_of(number: str) -> dict[str, list[str]]:
    """The patterns of a lesson's predictions."""
    names = dict.fromkeys(name for lesson, name, _ in _PATTERNS if lesson == number)
    return {name: [row[2] for row in _PATTERNS if row[:2] == [number, name]] for name in names}


def predicted_names(cell: Mapping[str, Any]) -> list[str]:
    """The names that a stub leaves open."""
    return [
        node.id
        for line in ast.walk(ast.parse(cell["source"]))
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and line.value.value is ...
        for node in line.targets
        if isinstance(node, ast.Name)
    ]


def spoilers(notebook: Mapping[str, Any], answers: Answers, page: str | None = None) -> list[Problem]:
    """The places where an unrun notebook, or its page, answers a prediction too early.

    Each prediction must have a pattern, and a later cell tagged ``answer`` must match it.
    """
    cells = notebook["cells"]
    places = [place for place, cell in enumerate(cells) if has(cell, "predict")]
    open_names = [(place, name) for place in places for name in predicted_names(cells[place])]
    known = {name for _, name in open_names}
    found = [
        Problem("notebook", f"no stub tagged predict asks for {name!r}")
        for name in answers
        if name not in known
    ]
    for place, name in open_names:
        if not answers.get(name):
            found.append(Problem(cells[place]["id"], f"no pattern declares what would answer {name!r}"))
        for pattern in answers.get(name, ()):
            found += _spoilers_of(cells, place, pattern, page)
    return found


def _spoilers_of(cells: Sequence[Any], asked: int, pattern: str, page: str | None) -> Iterator[Problem]:
    revealing = [cell for cell in cells[asked + 1 :] if has(cell, "answer")]
    reveal = next((cell for cell in revealing if re.search(pattern, _all_said(cell))), None)
    if reveal is None:
        yield Problem(cells[asked]["id"], f"no cell tagged answer says {pattern!r}: the declaration is empty")
    elif page is not None and page.count(FOLD) != sum(has(cell, "answer") for cell in cells):
        tagged = sum(has(cell, "answer") for cell in cells)
        yield Problem("page", f"folds {page.count(FOLD)} answers, but {tagged} cells have the tag answer")
    elif page is not None:
        number = [cell["id"] for cell in cells if has(cell, "answer")].index(reveal["id"]) + 1
        before = FOLD.join(page.split(FOLD)[:number])
        if hit := re.search(pattern, seen(before)):
            yield Problem("page", f"says {hit[0]!r} before its fold")
    else:
        for cell in cells[: cells.index(reveal) + 1]:
            if hit := re.search(pattern, shown(cell)):
                yield Problem(
                    cell["id"], f"says {hit[0]!r}, which answers a prediction before its answer cell"
                )


def _all_said(cell: Mapping[str, Any]) -> str:
    """All text of a cell and its outputs, including folds."""
    pages = (_page(output) for output in cell["outputs"])
    return " ".join(seen(re.sub(r"</?details[^>]*>", "", page)) for page in pages)


def form_problems(notebook: Mapping[str, Any], title: str, links: str) -> list[Problem]:
    """The ways in which a lesson's first screen, folds or headers do not have this form."""
    first, hero, logistics, *others = notebook["cells"]
    heading, _, question = first["source"].partition("\n\n")
    wrong = {
        f"does not begin with {title!r}": heading != f"# {title}",
        "the first cell is not the title and a question": "?" not in first["source"] or not question.strip(),
        "the question takes more than two sentences": len(re.findall(r"[.?!](?=\s|$)", question)) > 2,
        f"the question takes more than {WORDS} words": len(question.split()) > WORDS,
        "the second cell is not set-up and picture, hidden": not has(hero, "setup", "hero")
        or not is_hidden(hero, "source"),
        "the second cell shows no picture": not any("<img " in _page(out) for out in hero.get("outputs", ())),
        "the third cell does not fold the logistics": links not in logistics["source"]
        or bool(_FOLDED.sub("", logistics["source"]).strip()),
        "parameters and imports are not hidden": not all(is_hidden(cell, "source") for cell in others[:2]),
    }
    screen = [Problem("first screen", what) for what, is_so in wrong.items() if is_so]
    return [*screen, *_without_header(notebook), *_not_folded(notebook)]


def _without_header(notebook: Mapping[str, Any]) -> Iterator[Problem]:
    """Stubs whose prose does not end with a header: difficulty, minutes, whether required, and par."""
    prose = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and not has(cell, "solution"):
            prose = cell["source"]
        if has(cell, "stub"):
            if not HEADER.fullmatch(prose.strip().rpartition("\n\n")[2].strip()):
                yield Problem(cell["id"], "has no header, such as *Easy · 3 minutes · required*")
            prose = ""


def _not_folded(notebook: Mapping[str, Any]) -> list[Problem]:
    cells = [cell for cell in notebook["cells"] if has(cell, "answer")]
    what = "is tagged answer, and its outputs are not folded"
    return [Problem(cell["id"], what) for cell in cells if not is_hidden(cell, "outputs")]


def code_lines_of(source: str) -> list[str]:
    """The lines of code in a source, without blank lines and comments."""
    return [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]


def visible_code_lines(notebook: Mapping[str, Any]) -> int:
    cells = [
        cell for cell in notebook["cells"] if cell["cell_type"] == "code" and not is_hidden(cell, "source")
    ]
    return sum(len(code_lines_of(cell["source"])) for cell in cells)


def visible_words(notebook: Mapping[str, Any]) -> int:
    return sum(
        len(prose_words(cell["source"])) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )


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
    shown = [c for c in notebook["cells"] if c["cell_type"] == "code" and not is_hidden(c, "source")]
    cells = sum(not has(cell, "stub") for cell in shown)
    return visible_words(notebook) / 150 + visible_code_lines(notebook) / 12 + cells / 2
