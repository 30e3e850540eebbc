"""Draws steps as predicted and as recorded, for each rank one above the other, on one time axis.

The same timelines give the same bytes. Each band shows a rank's processor, and its transfers below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from muon_tutorial.evidence.svg import svg_document, svg_style
from muon_tutorial.evidence.traces.timeline_picture import FILLS, HATCHES
from muon_tutorial.timing.timed_world import Doing
from muon_tutorial.timing.timeline import StepTimeline, compare_phases

SPAN_FILLS: dict[Doing, str] = {
    "product": FILLS["compute"],
    "copy": "#9cc3e0",
    "wait": FILLS["waiting"],
    "transfer": FILLS["communication"],
}
WORDS: dict[Doing, str] = {
    "product": "products",
    "copy": "copies and all else",
    "wait": "waiting",
    "transfer": "transfers",
}
BAND = 26
THINNEST = 1500
"""Bars shorter than the step's duration divided by this are not drawn: they would be too thin to see."""


@dataclass(frozen=True, slots=True)
class TimelinePair:
    """A step with a name, as predicted and as recorded."""

    name: str
    predicted: StepTimeline
    recorded: StepTimeline

    @property
    def worst(self) -> float:
        """The largest error of a phase's begin or end, as a fraction of the recorded step."""
        return max(gap.worst for gap in compare_phases(self.predicted, self.recorded))

    def __str__(self) -> str:
        said, seen = (f"{1000 * one.seconds:.0f}" for one in (self.predicted, self.recorded))
        times = f"predicted {said} ms, recorded {seen}"
        return f"{self.name}: {times}; phases within {self.worst:.0%} of the step"


def draw_pairs(pairs: Sequence[TimelinePair], title: str = "") -> str:
    """The pairs below each other as an SVG document. The same timelines give the same bytes."""
    ranks = len(pairs[0].predicted.ranks)
    heights = [2 * BAND * ranks + 62 for _ in pairs]
    whole, top = sum(heights) + 60, 50
    with svg_style("timelines", **{"hatch.linewidth": 0.5}):
        figure = Figure(figsize=(9.6, whole / 96), dpi=96, facecolor="#ffffff")
        for pair, height in zip(pairs, heights, strict=True):
            low = 1 - (top + height - 32) / whole
            axes = figure.add_axes((0.13, low, 0.85, (height - 62) / whole))
            _draw_pair(axes, pair)
            top += height
        handles = [Patch(facecolor=fill, hatch=_hatch(doing), edgecolor="#8a8a8a", label=WORDS[doing])
                   for doing, fill in SPAN_FILLS.items()]  # fmt: skip
        figure.legend(handles=handles, loc="upper left", ncols=4, frameon=False, fontsize=8.5,
                      bbox_to_anchor=(0.12, 1 - 20 / whole))  # fmt: skip
        figure.text(0.012, 1 - 16 / whole, title, fontsize=10.5, weight="bold", va="center")
        return svg_document(figure)


def _draw_pair(axes: Axes, pair: TimelinePair) -> None:
    last = 1000 * max(pair.predicted.seconds, pair.recorded.seconds)
    bands = [
        (f"rank {rank} {timeline.source}", rank, timeline)
        for rank in pair.predicted.ranks
        for timeline in (pair.predicted, pair.recorded)
    ]
    for row, (_, rank, timeline) in enumerate(bands):
        _draw_band(axes, row, rank, timeline)
    axes.set_yticks([row + 0.45 for row in range(len(bands))])
    axes.set_yticklabels([name for name, _, _ in bands], fontsize=8)
    axes.set(xlim=(0, last), ylim=(len(bands), 0))
    axes.tick_params(labelsize=8)
    axes.set_title(f"{pair}; milliseconds", fontsize=8.5, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_band(axes: Axes, row: int, rank: int, timeline: StepTimeline) -> None:
    for doing, fill in SPAN_FILLS.items():
        least = timeline.seconds / THINNEST
        shown = [span for span in timeline.of(rank, doing) if span.end - span.begin > least]
        bars = [(1000 * span.begin, 1000 * (span.end - span.begin)) for span in shown]
        where = (row + 0.62, 0.26) if doing == "transfer" else (row + 0.06, 0.54)
        edge: dict[str, Any] = {"edgecolor": "#8a8a8a", "linewidth": 0.2}
        axes.broken_barh(bars, where, facecolor=fill, hatch=_hatch(doing), **edge)


def _hatch(doing: Doing) -> str | None:
    return HATCHES["waiting"] if doing == "wait" else None
