"""Pictures of spectra: how loud a matrix is in each direction. Pure functions that return a ``Picture``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from .colours import FAINT, INK, QUIET
from .picture import Picture, card, finish

_FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class Curve:
    """A named spectrum: its values, and how its line is drawn."""

    name: str
    values: tuple[float, ...]
    colour: str
    line: str = "-"

    @classmethod
    def of(cls, name: str, values: Tensor, colour: str, line: str = "-") -> Curve:
        """The curve of a 1-D tensor's values, the largest first."""
        return cls(name, tuple(values.double().sort(descending=True).values.tolist()), colour, line)

    @classmethod
    def relative(cls, name: str, values: Tensor, colour: str, line: str = "-") -> Curve:
        """Like ``of``, but with values relative to the largest."""
        return cls.of(name, values / values.max(), colour, line)

    def say(self) -> str:
        numbers = (max(self.values), statistics.median(self.values), min(self.values))
        said = ["below 0.0001" if number < _FLOOR else f"{number:.2g}" for number in numbers]
        return f"{self.name}: loudest {said[0]}, median {said[1]}, quietest {said[2]}"


def style(axes: Axes, title: str, x: str, y: str) -> Axes:
    """The look that all plots share."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=11, color=QUIET)
    axes.set_ylabel(y, fontsize=11, color=QUIET)
    axes.tick_params(labelsize=11, colors=QUIET, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def decades(axes: Axes) -> None:
    """A logarithmic scale of loudness, written in plain numbers."""
    ticks = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR, 1.6)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()


def plot(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw curves over their directions, numbered from 1. Values too small for the axis lie at its foot."""
    for curve in curves:
        heights = [max(value, _FLOOR) for value in curve.values]
        places = range(1, len(heights) + 1)
        axes.plot(places, heights, curve.line, color=curve.colour, linewidth=2, label=curve.name)


def draw_spectra(panels: Sequence[tuple[str, Sequence[Curve]]], name: str, y: str = "loudness") -> Picture:
    """One panel for each (title, curves), at most three in a row, on one logarithmic scale."""
    columns, rows = min(3, len(panels)), -(-len(panels) // 3)
    width, height = (620, 380) if columns == 1 else (max(290 * columns, 620), 90 + 250 * rows)
    figure = card(width, height)
    for number, (title, curves) in enumerate(panels):
        axes = style(figure.add_subplot(rows, columns, number + 1), title, "direction, the loudest first", y)
        decades(axes)
        plot(axes, curves)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    look: Any = {"loc": "lower center", "frameon": False, "labelcolor": INK}
    figure.legend(handles, labels, ncols=len(labels), fontsize=11, **look)  # below all curves
    figure.tight_layout(rect=(0, 34 / height, 1, 1))
    said = [f"{title}: {'; '.join(curve.say() for curve in curves)}." for title, curves in panels]
    what = "Singular values, the loudest first, on a logarithmic scale."
    return finish(figure, name, " ".join([what, *said]))
