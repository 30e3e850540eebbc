"""A picture that every notebook viewer shows: one opaque card in one ``<img>``, with alt text.

An untrusted notebook shows an ``<img alt src="data:…">``, but not a bare SVG. The card has its own background
and ink, so it looks the same in any theme.
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
from matplotlib.patches import FancyArrowPatch, Rectangle

from ...evidence.svg import svg_element, svg_style
from ...plan.grid import Grid
from .colours import CARD, INK, QUIET, RIGHT, RIGHT_FILL, WRONG, WRONG_FILL

Point = tuple[float, float]
Frame = tuple[float, float, float, float]
"""A rectangle on a card: its upper left corner, its width and its height, in pixels."""
_LOOK: dict[str, Any] = {"text.color": INK, "path.simplify": False}


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG document, its alt text, and its width on screen in pixels."""

    svg: str
    alt: str
    width: int

    @property
    def html(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        alt = html.escape(self.alt, quote=True)
        return f'<img alt="{alt}" width="{self.width}" src="data:image/svg+xml;base64,{data}">'

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return textwrap.fill(self.alt, 100)


@dataclass(frozen=True, slots=True)
class GridFrame:
    """The place of a grid on a card, in pixels: its upper left corner, a cell's sides, and gaps between."""

    grid: Grid
    left: float
    top: float
    wide: float
    high: float
    gap: Point = (0.0, 0.0)

    @classmethod
    def fitting(cls, grid: Grid, corner: Point, width: float, most: Point) -> GridFrame:
        """The frame whose cells are as large as ``width`` allows, and at most as large as ``most``."""
        wide = min(most[0], width / grid.size("tp"))
        return cls(grid, *corner, wide, min(most[1], max(wide * most[1] / most[0], 64)))

    def cell(self, rank: int) -> Point:
        at, (across, down) = self.grid.at(rank), self.gap
        return self.left + at["tp"] * (self.wide + across), self.top + at["dp"] * (self.high + down)

    @property
    def right(self) -> float:
        return self.left + self.grid.size("tp") * (self.wide + self.gap[0])

    @property
    def bottom(self) -> float:
        return self.top + self.grid.size("dp") * (self.high + self.gap[1])


def card(width: int, height: int) -> Figure:
    """An empty card for axes; width and height in pixels."""
    return Figure(figsize=(width / 96, height / 96), dpi=96, facecolor=CARD)


def blank(
    width: int, height: int, title: str = "", x: float = 16, y: float = 20, size: float = 12
) -> tuple[Figure, Axes]:
    """An empty card and its axes, in pixels from the upper left corner; a ``title`` is written in bold."""
    figure = card(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    if title:
        write(axes, x, y, title, size, weight="bold")
    return figure, axes


def heading(axes: Axes, title: str, what: str, size: float = 13.5) -> None:
    """A title, and below it, in grey, a line that says what the picture shows."""
    write(axes, 16, 24, title, size, weight="bold")
    write(axes, 16, 49, what, color=QUIET)


def rectangle(axes: Axes, x: float, y: float, width: float, height: float, fill: Any, **look: Any) -> None:
    """A rectangle with its upper left corner at ``x``, ``y``, edged in ink unless ``look`` says otherwise."""
    axes.add_patch(Rectangle((x, y), width, height, **{"facecolor": fill, "edgecolor": INK, **look}))


def write(axes: Axes, x: float, y: float, text: str, size: float = 11, **look: Any) -> None:
    """A text in ink that begins at ``x``, vertically centred at ``y``, unless ``look`` says otherwise."""
    axes.text(x, y, text, **{"size": size, "va": "center", "color": INK, **look})


def centred(axes: Axes, x: float, y: float, text: str, size: float = 11, **look: Any) -> None:
    """A text whose middle is at ``x``, ``y``."""
    write(axes, x, y, text, size, **{"ha": "center", **look})


def tile(axes: Axes, frame: Frame, fill: Any, text: str = "", size: float = 11, **look: Any) -> None:
    """A rectangle with a text in its middle. ``weight`` is for the text, ``look`` is for the rectangle."""
    x, y, width, height = frame
    words = {name: look.pop(name) for name in ("weight", "linespacing") if name in look}
    rectangle(axes, *frame, fill, **look)
    if text:
        order = {"zorder": look["zorder"] + 1} if "zorder" in look else {}
        centred(axes, x + width / 2, y + height / 2, text, size, **order, **words)


def verdict(axes: Axes, frame: Frame, text: str, right: bool) -> None:
    """A box that says by colour, by a mark and in words whether all is right."""
    x, y, width, height = frame
    fill, edge, mark = (RIGHT_FILL, RIGHT, "✓") if right else (WRONG_FILL, WRONG, "✗")
    rectangle(axes, *frame, fill, edgecolor=edge, linewidth=1.6)
    centred(axes, x + width / 2, y + height / 2, f"{mark} {text}", 13, weight="bold", color=edge)


def arrow(axes: Axes, start: Point, stop: Point, **look: Any) -> None:
    axes.add_patch(FancyArrowPatch(start, stop, **{"arrowstyle": "-|>", "color": INK, **look}))


def between(start: Point, stop: Point, share: float) -> Point:
    """The point that is ``share`` of the way from ``start`` to ``stop``."""
    return start[0] + share * (stop[0] - start[0]), start[1] + share * (stop[1] - start[1])


def finish(figure: Figure, name: str, alt: str) -> Picture:
    """The figure as a picture whose SVG ids start with ``name``. The same figure gives the same bytes."""
    with svg_style(name, **_LOOK):
        svg = svg_element(figure)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return Picture(re.sub(r"\n\s*", "\n", svg), alt, round(figure.get_figwidth() * 96))
