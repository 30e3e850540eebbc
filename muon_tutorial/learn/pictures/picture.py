"""A picture that survives: one opaque card in one ``<img>``, with words for those who cannot see it.

Committed bare SVG vanishes in an untrusted notebook; an ``<img alt src="data:…">`` stays. The card brings its
own background and ink: it reads the same on any theme. Knows SVG and HTML, and nothing of what is drawn.
"""

from __future__ import annotations

import base64
import html
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ...evidence.svg import svg_element, svg_style
from .colours import CARD, INK

_LOOK: dict[str, Any] = {"text.color": INK, "path.simplify": False}


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG document, the words that stand for it, and its width on screen, in pixels."""

    svg: str
    alt: str
    width: int

    @property
    def html(self) -> str:
        """The picture as one ``<img>``."""
        data = base64.b64encode(self.svg.encode()).decode()
        alt = html.escape(self.alt, quote=True)
        return f'<img alt="{alt}" width="{self.width}" src="data:image/svg+xml;base64,{data}">'

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return textwrap.fill(self.alt, 100)


def card(width: int, height: int) -> Figure:
    """An empty card, in pixels, to put axes on."""
    return Figure(figsize=(width / 96, height / 96), dpi=96, facecolor=CARD)


def blank(width: int, height: int) -> tuple[Figure, Axes]:
    """An empty card and its axes, in pixels, with the origin at the upper left."""
    figure = card(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def rectangle(axes: Axes, x: float, y: float, width: float, height: float, fill: Any, **look: Any) -> None:
    """A rectangle with its upper left corner at ``x``, ``y``, edged in ink unless ``look`` says otherwise."""
    axes.add_patch(Rectangle((x, y), width, height, **{"facecolor": fill, "edgecolor": INK, **look}))


def write(axes: Axes, x: float, y: float, text: str, size: float, **look: Any) -> None:
    """A text in ink whose middle is at the height ``y``, and which begins at ``x``, unless told otherwise."""
    axes.text(x, y, text, **{"size": size, "va": "center", "color": INK, **look})


def finish(figure: Figure, name: str, alt: str) -> Picture:
    """The figure as a picture whose ids start with ``name``. The same figure gives the same bytes."""
    with svg_style(name, **_LOOK):
        svg = svg_element(figure)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return Picture(re.sub(r"\n\s*", "\n", svg), alt, round(figure.get_figwidth() * 96))
