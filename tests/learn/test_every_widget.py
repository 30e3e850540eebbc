"""At every position of its controls, each widget of a lesson shows a picture with alt text, and no error."""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from muon_tutorial.learn.pictures.picture import Picture
from muon_tutorial.learn.widgets.shell import ERROR_MARK, Shell, choice, play, slider, stops
from scripts.notebooks import read_text, sources
from scripts.shells import displayed, widget_cells

from ..exhaustive import left_out

MOST = 300
FEW = 4
LINK = "{http://www.w3.org/1999/xlink}href"


def positions(shell: Shell, most: int) -> Iterator[dict[str, Any]]:
    """All combinations of the controls' values, in an order in which few controls move at a time. If there
    are more than ``most``, one control moves at a time, in two rounds: the others are first at their first,
    then at their last values; ``most`` limits how many values of a control are tried. If ``most`` is ``FEW``,
    the second round is a single position, with all controls at their last values."""
    values = {name: list(stops(control).values()) for name, control in shell.controls.items()}
    sizes = [len(its) for its in values.values()]
    chosen = set(itertools.product(*map(range, sizes))) if math.prod(sizes) <= most else set()
    each = max(2, most // (2 * len(values)))
    for others in [] if chosen else [[0] * len(sizes), [size - 1 for size in sizes]]:
        chosen.add(tuple(others))
        for place, size in enumerate(sizes) if others[0] == 0 or most > FEW else ():
            chosen |= {(*others[:place], number, *others[place + 1 :]) for number in _spread(size, each)}
    for numbers in sorted(chosen):
        yield {name: its[number] for (name, its), number in zip(values.items(), numbers, strict=True)}


def _spread(size: int, most: int) -> list[int]:
    """All places if there are at most ``most``, otherwise ``most`` of them, spread evenly from the first to
    the last."""
    if size <= most:
        return list(range(size))
    return [round(place * (size - 1) / (most - 1)) for place in range(most)]


def move(shell: Shell, position: Mapping[str, Any]) -> str:
    """Set the controls as a reader would; returns the widget's new HTML."""
    for name, value in position.items():
        shell.controls[name].value = value
    return shell.canvas.value


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def alt_of_sound_picture(page: str) -> str:
    """The alt text of the one picture on the page, which must need no other file."""
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


def drive_shell(shell: Shell, most: int) -> None:
    """Each position has a different alt text."""
    said: dict[str, dict[str, Any]] = {}
    for position in positions(shell, most):
        alt = alt_of_sound_picture(move(shell, position))
        assert len(alt) > 40
        assert said.setdefault(alt, position) == position, f"{position} says what {said[alt]} said"


SLOW = {"11-a-grid-you-have-not-seen"}
"""Widgets that plan another grid at each position. A usual run leaves them to ``test_many_ranks.py``."""


@pytest.mark.parametrize(
    ("most", "parameters"),
    [
        pytest.param(FEW, {"steps": 1}, id="few"),
        left_out(MOST, {"steps": 1}, id="all"),
        left_out(FEW, {"steps": 1, "dp": 3}, id="another grid"),
    ],
)
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem[:2])
def test_every_position_is_a_picture_with_words_of_its_own(
    source: Path, most: int, parameters: dict[str, int]
) -> None:
    notebook = read_text(source.read_text(encoding="utf-8"))
    cells = [cell for cell in widget_cells(notebook) if most == MOST or cell.id not in SLOW]
    for cell, shown in zip(cells, displayed(notebook, cells, parameters), strict=True):
        assert isinstance(shown, Shell), cell.id
        drive_shell(shown, most=most)


def draw(number: int) -> Picture:
    if number == 3:
        raise ValueError("three cannot be drawn")
    return Picture("<svg/>", f"picture {number}", 10)


STILL = Picture("<svg/>", "all pictures", 10)


def test_moving_a_control_draws_anew_and_a_drawing_that_raises_shows_its_error_and_recovers() -> None:
    shell = Shell(draw, number=slider("number", last=5))
    shell.controls["number"].value = 2
    assert 'alt="picture 2"' in shell.canvas.value
    shell.controls["number"].value = 3
    assert ERROR_MARK in shell.canvas.value
    assert "three cannot be drawn" in shell.canvas.value
    shell.controls["number"].value = 4
    assert 'alt="picture 4"' in shell.canvas.value


def test_each_frame_is_drawn_once_however_often_it_is_played() -> None:
    drawn = []

    def draw(moment: int, rank: int) -> Picture:
        drawn.append((moment, rank))
        return Picture("<svg/>", f"moment {moment} of rank {rank}", 10)

    film = play(draw, 2, STILL, rank=choice("rank", {"rank 0": 0, "rank 1": 1}))
    assert isinstance(film, Shell)
    for _ in range(3):
        for rank in (0, 1):
            film.controls["rank"].value = rank
            for moment in (0, 1, 2):
                film.controls["moment"].slider.value = moment
                assert f"moment {moment} of rank {rank}" in film.canvas.value
    assert sorted(drawn) == sorted(set(drawn))
