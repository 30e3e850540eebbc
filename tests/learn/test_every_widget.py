"""Every widget that a lesson displays, at every position: a picture with words, and no error."""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from nbformat import NotebookNode

from muon_tutorial.learn.course.notebook_guards import ERROR_MARK
from muon_tutorial.learn.pictures.picture import blank, finish
from muon_tutorial.learn.widgets.reveal import Reveal
from muon_tutorial.learn.widgets.shell import Shell, choice, slider, stops
from scripts.notebooks import read_text, sources
from scripts.shells import displayed, widget_cells

MOST = 300
LINK = "{http://www.w3.org/1999/xlink}href"


def notebook_of(source: Path) -> NotebookNode:
    return read_text(source.read_text(encoding="utf-8"))


CASES = [(source, cell.id) for source in sources() for cell in widget_cells(notebook_of(source))]


def positions(shell: Shell | Reveal) -> Iterator[dict[str, Any]]:
    """All combinations of the controls' values; where they are too many, each control's values alone, with
    the others at their first and at their last."""
    values = {name: list(stops(control).values()) for name, control in shell.controls.items()}
    if math.prod(map(len, values.values())) <= MOST:
        yield from (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
        return
    for name, end in itertools.product(values, (0, -1)):
        others = {other: of_one[end] for other, of_one in values.items()}
        yield from ({**others, name: value} for value in values[name])


def move(shell: Shell | Reveal, position: Mapping[str, Any]) -> str:
    """Set the controls as a reader would; returns what the widget then shows."""
    for name, value in position.items():
        shell.controls[name].value = value
    return shell.canvas.value


class Tags(HTMLParser):
    """All tags of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def alt_of_sound_picture(page: str) -> str:
    """The words of the one picture on the page, which brings all that it needs."""
    assert ERROR_MARK not in page, page
    tags = Tags(page).found
    assert {tag for tag, _ in tags} <= {"p", "img"}
    [attributes] = [attributes for tag, attributes in tags if tag == "img"]
    kind, _, data = str(attributes["src"]).partition(",")
    assert kind == "data:image/svg+xml;base64"
    root = ET.fromstring(base64.b64decode(data))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(node.get(LINK, "#").startswith("#") for node in root.iter())
    assert not re.search(rb"url\((?!#)|@import", base64.b64decode(data))
    return str(attributes["alt"])


@pytest.mark.live
@pytest.mark.parametrize(
    ("source", "cell"), CASES, ids=[f"{source.stem[:2]}: {cell}" for source, cell in CASES]
)
def test_every_position_is_a_picture_with_words_of_its_own(source: Path, cell: str) -> None:
    notebook = notebook_of(source)
    [display] = [other for other in notebook.cells if other.id == cell]
    shown = displayed(notebook, display, {"steps": 1})
    if isinstance(shown, Reveal):
        drive_question(shown)
    else:
        assert isinstance(shown, Shell)
        drive_shell(shown)


def drive_shell(shell: Shell, says: Callable[[Mapping[str, Any]], str] = lambda position: "") -> None:
    """Every position says, in its picture's words, what no other says; ``says`` names a part of it."""
    said: dict[str, dict[str, Any]] = {}
    for position in positions(shell):
        alt = alt_of_sound_picture(move(shell, position))
        assert len(alt) > 40
        assert says(position) in alt
        assert said.setdefault(alt, position) == position, f"{position} says what {said[alt]} said"


def drive_question(question: Reveal) -> None:
    """No prediction shows the picture before the button is pressed; then, all show the same."""
    assert {move(question, position) for position in positions(question)} == {""}
    question.button.click()
    pages = [move(question, position) for position in positions(question)]
    assert {alt_of_sound_picture(page) for page in pages} == {question.answer.alt}
    assert len({page.partition("<img")[0] for page in pages}) > 1


def draw(row: int, rank: int) -> Any:
    if row == 1:
        raise ValueError("row 1 cannot be drawn")
    return finish(blank(20, 10)[0], "a", f"row {row} of rank {rank}")


def test_positions_are_bounded_and_reach_every_value_of_every_control() -> None:
    shell = Shell(draw, row=slider("row", last=30), rank=choice("rank", {str(n): n for n in range(20)}))
    found = list(positions(shell))
    assert len(found) == 2 * (31 + 20)
    assert {position["row"] for position in found} == set(range(31))
    assert {position["rank"] for position in found} == set(range(20))


def test_a_position_that_cannot_be_drawn_is_seen() -> None:
    shell = Shell(draw, row=slider("row", last=2), rank=choice("rank", {"0": 0, "1": 1}))
    pages = [move(shell, position) for position in positions(shell)]
    assert [ERROR_MARK in page for page in pages] == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    "change", [("data:", "http://elsewhere/"), ("<img", "<script><img"), ("alt=", "title=")]
)
def test_a_picture_that_needs_more_than_itself_is_refused(change: tuple[str, str]) -> None:
    page = draw(row=0, rank=1).html
    assert alt_of_sound_picture(page) == "row 0 of rank 1"
    with pytest.raises((AssertionError, ValueError, KeyError)):
        alt_of_sound_picture(page.replace(*change))
