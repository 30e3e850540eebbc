"""Draws a timeline as a static picture; the same timeline gives the same bytes.

Each rank has a band of states over the wall time, and its collectives below the band. A column of the band
shows only the state with the largest part, so the picture's size does not grow with the run's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..svg import svg_document, svg_style
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


def draw_timeline(timeline: Timeline) -> str:
    with svg_style("timeline", **{"hatch.linewidth": 0.5}):
        figure = Figure(figsize=(10, 1.2 + 0.62 * len(timeline.ranks)), dpi=96, facecolor="#ffffff")
        axes = figure.add_axes((0.07, 0.55 / figure.get_figheight(), 0.91, 1 - 1.05 / figure.get_figheight()))
        states = paint(timeline)
        for row, times in enumerate(timeline.ranks):
            _draw_rank(axes, row, times, states[times.rank], timeline)
        used = [state for state in STATES if any(painted[state] for painted in states.values())]
        _label(axes, timeline, used)
        return svg_document(figure)


def describe_timeline(timeline: Timeline) -> str:
    """The picture in words, for readers who cannot see it."""
    states = paint(timeline)
    lines = []
    for times in timeline.ranks:
        span = max(1, times.end - times.begin)
        shares = ((state, measure(states[times.rank][state]) / span) for state in STATES)
        parts = ", ".join(f"{WORDS.get(state, state)} {share:.0%}" for state, share in shares if share)
        lines.append(f"Rank {times.rank}: {span / 1e6:.1f} ms; {parts}; {len(times.flights)} collectives.")
    return " ".join(lines)


def _draw_rank(
    axes: Axes, row: int, times: RankTimes, states: Mapping[State, Intervals], timeline: Timeline
) -> None:
    """Draw one band of states, and the rank's collectives in lanes below it."""
    bars: dict[State, list[tuple[int, int]]] = {}
    column = max(1, (timeline.end - timeline.begin) // COLUMNS)
    columns = [(begin, min(times.end, begin + column)) for begin in range(times.begin, times.end, column)]

    def fullest(edges: tuple[int, int]) -> State:
        return max(STATES, key=lambda state: measure(clip(states[state], *edges)))

    for state, run in groupby(columns, fullest):
        alike = list(run)
        bars.setdefault(state, []).append((alike[0][0], alike[-1][1]))
    for state, shown in bars.items():
        axes.broken_barh(
            _milliseconds(shown, timeline.begin),
            (row, 0.6),
            facecolor=FILLS[state],
            hatch=HATCHES.get(state),
            edgecolor="#8a8a8a",
            linewidth=0,
        )
    rows = lanes(times.flights)
    height = 0.26 / max(1, len(rows))
    for lane, flights in enumerate(rows):
        shown = [(flight.issued, flight.done) for flight in flights]
        axes.broken_barh(
            _milliseconds(shown, timeline.begin),
            (row + 0.64 + lane * height, height * 0.8),
            facecolor=FILLS["communication"],
            edgecolor="#7a4a12",
            linewidth=0.4,
        )


def _milliseconds(bars: Iterable[tuple[int, int]], zero: int) -> list[tuple[float, float]]:
    """Each bar's start and length in milliseconds, in the form that ``broken_barh`` needs."""
    return [((begin - zero) / 1e6, (end - begin) / 1e6) for begin, end in bars]


def _label(axes: Axes, timeline: Timeline, used: Iterable[State]) -> None:
    handles = [
        Patch(facecolor=FILLS[s], hatch=HATCHES.get(s), edgecolor="#8a8a8a", label=WORDS.get(s, s))
        for s in used
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=8)
    axes.set_yticks([row + 0.3 for row in range(len(timeline.ranks))])
    axes.set_yticklabels([f"rank {times.rank}" for times in timeline.ranks], fontsize=9)
    axes.set_ylim(len(timeline.ranks), -0.05)
    axes.set_xlim(0, max(1, timeline.end - timeline.begin) / 1e6)
    axes.set_xlabel("milliseconds; below each band, the rank's collectives from request to end", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
