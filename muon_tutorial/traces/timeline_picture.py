"""A timeline as a static picture: a function of the timeline alone, to the byte.

For each rank one band of states over the wall time, and its collectives below it. A column of the band shows
the state that fills most of it, so the picture's size does not grow with the run's length.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .perfetto import lanes
from .time_intervals import Intervals, clip, measure
from .time_split import STATES, RankTimes, State, Timeline, paint

COLUMNS = 800
FILLS: dict[State, str] = {
    "compute": "#2f7ebc",
    "communication": "#e8913a",
    "waiting": "#cfcfcf",
    "unsplit": "#b79ac8",
    "neither": "#f4f4f4",
}
HATCHES: dict[State, str] = {"waiting": "////", "unsplit": "...."}
WORDS: dict[State, str] = {
    "communication": "communication in progress",
    "waiting": "waiting for the last member",
    "unsplit": "communication or waiting",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "timeline",
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.5,
}


def draw_timeline(timeline: Timeline, title: str = "") -> str:
    """The timeline as an SVG document. The same timeline gives the same bytes."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 1.2 + 0.62 * len(timeline.ranks)), dpi=96, facecolor="#ffffff")
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.07, 0.55 / figure.get_figheight(), 0.91, 1 - 1.05 / figure.get_figheight()))
        _draw_ranks(axes, timeline)
        _label(axes, timeline, title)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    return "\n".join(line.rstrip() for line in svg[svg.index("<svg") :].splitlines()) + "\n"


def describe_timeline(timeline: Timeline) -> str:
    """The picture in words, for those who cannot see it."""
    states = paint(timeline)
    lines = []
    for times in timeline.ranks:
        span = max(1, times.end - times.begin)
        shares = ((state, measure(states[times.rank][state]) / span) for state in STATES)
        parts = ", ".join(f"{WORDS.get(state, state)} {share:.0%}" for state, share in shares if share)
        lines.append(f"Rank {times.rank}: {span / 1e6:.1f} ms; {parts}; {len(times.flights)} collectives.")
    return " ".join(lines)


def _draw_ranks(axes: Axes, timeline: Timeline) -> None:
    states = paint(timeline)
    column = max(1, (timeline.end - timeline.begin) // COLUMNS)
    for row, times in enumerate(timeline.ranks):
        for state, bars in _bars(states[times.rank], times, column).items():
            shown = [((begin - timeline.begin) / 1e6, (end - begin) / 1e6) for begin, end in bars]
            axes.broken_barh(
                shown,
                (row, 0.6),
                facecolor=FILLS[state],
                hatch=HATCHES.get(state),
                edgecolor="#8a8a8a",
                linewidth=0,
            )
        _draw_flights(axes, times, row + 0.64, timeline.begin)


def _bars(
    states: Mapping[State, Intervals], times: RankTimes, column: int
) -> dict[State, list[tuple[int, int]]]:
    bars: dict[State, list[tuple[int, int]]] = {}
    for begin, end, state in _columns(states, times, column):
        row = bars.setdefault(state, [])
        if row and row[-1][1] == begin:
            row[-1] = (row[-1][0], end)
        else:
            row.append((begin, end))
    return bars


def _columns(
    states: Mapping[State, Intervals], times: RankTimes, column: int
) -> Iterator[tuple[int, int, State]]:
    for begin in range(times.begin, times.end, column):
        end = min(times.end, begin + column)
        yield begin, end, max(STATES, key=lambda state: measure(clip(states[state], begin, end)))


def _draw_flights(axes: Axes, times: RankTimes, top: float, begin: int) -> None:
    rows = lanes(times.flights)
    height = 0.26 / max(1, len(rows))
    for lane, flights in enumerate(rows):
        shown = [((f.issued - begin) / 1e6, (f.done - f.issued) / 1e6) for f in flights]
        axes.broken_barh(
            shown,
            (top + lane * height, height * 0.8),
            facecolor=FILLS["communication"],
            edgecolor="#7a4a12",
            linewidth=0.4,
        )


def _label(axes: Axes, timeline: Timeline, title: str) -> None:
    used = paint(timeline)
    shown = [state for state in STATES if any(states[state] for states in used.values())]
    handles = [
        Patch(facecolor=FILLS[s], hatch=HATCHES.get(s), edgecolor="#8a8a8a", label=WORDS.get(s, s))
        for s in shown
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=8)
    axes.set_yticks([row + 0.3 for row in range(len(timeline.ranks))])
    axes.set_yticklabels([f"rank {times.rank}" for times in timeline.ranks], fontsize=9)
    axes.set_ylim(len(timeline.ranks), -0.05)
    axes.set_xlim(0, max(1, timeline.end - timeline.begin) / 1e6)
    axes.set_xlabel("milliseconds; below each band, the rank's collectives from request to end", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title(title, fontsize=10, loc="left", pad=18)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
