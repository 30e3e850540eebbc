"""Drives a widget through its positions, each of which must show a sound picture with its own alt text."""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

from muon_tutorial.learn.widgets.shell import ERROR_MARK, Shell, stops

MOST = 300
FEW = 8
LINK = "{http://www.w3.org/1999/xlink}href"


def positions(shell: Shell, most: int = MOST) -> Iterator[dict[str, Any]]:
    """All combinations of the controls' values. If they are too many, each control moves alone, with the
    others at their first and at their last value, through all values or as many as ``most`` allows."""
    values = {name: list(stops(control).values()) for name, control in shell.controls.items()}
    if math.prod(map(len, values.values())) <= most:
        yield from (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
        return
    each = max(2, most // (2 * len(values)))
    for name, end in itertools.product(values, (0, -1)):
        others = {other: of_one[end] for other, of_one in values.items()}
        yield from ({**others, name: value} for value in _spread(values[name], each))


def _spread(values: list[Any], most: int) -> list[Any]:
    """``most`` of the values, evenly spread, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def move(shell: Shell, position: Mapping[str, Any]) -> str:
    """Set the controls as a reader would; returns the widget's HTML then."""
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


def drive_shell(
    shell: Shell, says: Callable[[Mapping[str, Any]], str] = lambda position: "", most: int = MOST
) -> None:
    """Each position has a different alt text; ``says`` gives a part of it."""
    said: dict[str, dict[str, Any]] = {}
    for position in positions(shell, most):
        alt = alt_of_sound_picture(move(shell, position))
        assert len(alt) > 40
        assert says(position) in alt
        assert said.setdefault(alt, position) == position, f"{position} says what {said[alt]} said"
