"""SVG documents from matplotlib figures: the same figure gives the same bytes on every machine."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


def svg_style(salt: str, **more: Any) -> AbstractContextManager[None]:
    """A context to draw and save in. Text becomes paths in matplotlib's own font. Ids depend on ``salt``."""
    style: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": salt, "font.family": "DejaVu Sans"}
    return mpl.rc_context(style | more)


def svg_element(figure: Figure) -> str:
    """The figure as matplotlib writes it, but without date and version, which would change its bytes."""
    target = io.StringIO()
    FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    return svg[svg.index("<svg") :]


def svg_document(figure: Figure) -> str:
    """The figure as the text of an SVG file, without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in svg_element(figure).splitlines()) + "\n"
