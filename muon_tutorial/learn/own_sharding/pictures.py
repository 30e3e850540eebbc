"""Pictures of lesson 11: the four layouts side by side and as a film, wrong rows, bytes, loads, a timeline.

A fill says whose entries they are: who brought them, or who computed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, WRONG, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..widgets.play import play
from ..widgets.shell import Shell, choice
from .journey import LAYOUTS, MOMENTS, Entries, Journey, journey_of, say_moment
from .shared_work import MixedModel, as_the_package

_HERO_ROWS = {"assign": "assign_fn", "gather": "gather_fn", "redistribute": "redistribute_fn"}
_HERO_SAYS = {
    "assign": "who is to\northogonalize",
    "gather": "pieces →\nthe owner",
    "redistribute": "the update →\neverybody",
}


def hero() -> Picture:
    """One parameter through a config's three functions, under four layouts, side by side."""
    left, across, down, small = 152, 182, 100, 38
    figure, axes = blank(left + 4 * across + 4, 66 + 3 * down + 46)
    journeys = [journey_of(layout, 2, 2) for layout in LAYOUTS]
    for column, journey in enumerate(journeys):
        x = left + column * across
        write(axes, x, 20, journey.layout, 14, weight="bold")
        write(axes, x, 42, _short(journey.layout), 11, color=QUIET)
    for row, (name, title) in enumerate(_HERO_ROWS.items()):
        y = 66 + row * down
        rectangle(axes, 8, y - 6, left + 4 * across - 12, down - 6, CARD, edgecolor=EMPTY, linewidth=1.0)
        write(axes, 16, y + 16, title, 11, weight="bold")
        write(axes, 16, y + 50, _HERO_SAYS[name], 11, color=QUIET, linespacing=1.25)
        for column, journey in enumerate(journeys):
            now = journey.moments[MOMENTS.index(name)]
            for rank, held in enumerate(now.held):
                x = left + column * across + rank * (small + 6)
                _draw_matrix(axes, x, y + 6, small, journey.side, held)
                if name == "assign" and rank in journey.owners:
                    write(axes, x + small / 2, y + 25, "★", 15, ha="center", zorder=6)
            write(axes, left + column * across, y + 66, _hero_line(journey, name), 11)
    bottom = 66 + 3 * down + 20
    for rank in range(4):
        rectangle(axes, left + rank * 88, bottom - 8, 16, 16, rank_colour(rank), linewidth=0.8)
        write(axes, left + rank * 88 + 22, bottom, f"rank {rank}", 11)
    write(
        axes, left + 4 * 88 + 4, bottom, "★ owner · colour: who brought it, or computed it", 11, color=QUIET
    )
    said = " ".join(say_moment(journey, MOMENTS.index(name)) for journey in journeys for name in _HERO_ROWS)
    return finish(figure, "own_sharding-hero", f"One parameter, three functions, four layouts. {said}")


def _short(layout: str) -> str:
    return {
        "FSDP2": "rows cut",
        "HSDP": "rows cut, replicas",
        "TP": "columns cut",
        "EP": "an expert each",
    }[layout]


def _hero_line(journey: Journey, name: str) -> str:
    if name == "assign":
        return "each its own" if journey.layout == "EP" else f"rank {journey.owners[0]}, for all"
    sent = journey.moments[MOMENTS.index(name)].sent
    crossing = sum(journey.replica_of(each.sender) != journey.replica_of(each.receiver) for each in sent)
    pieces = "1 piece travels" if len(sent) == 1 else f"{len(sent)} pieces travel"
    if crossing:
        return f"{len(sent)} travel, {crossing} across"
    return pieces if sent else "nothing travels"


def _draw_matrix(
    axes: Axes, x: float, y: float, size: float, side: int, held: Sequence[Entries], look: float = 1.0
) -> None:
    """A square matrix, with what is there of it."""
    rectangle(axes, x, y, size, size, EMPTY, edgecolor=QUIET, linewidth=0.8 * look)
    unit = size / side
    for each in held:
        (top, left), (high, wide) = each.box.offset, each.box.shape
        rectangle(axes, x + left * unit, y + top * unit, wide * unit, high * unit, rank_colour(each.by),
                  linewidth=0.8 * look)  # fmt: skip


@cache
def draw_journey(layout: str, moment: int, dp: int = 2, tp: int = 2) -> Picture:
    """All ranks at one moment of the way, with an arrow for each piece that has just travelled."""
    journey = journey_of(layout, dp, tp)
    now, ranks = journey.moments[moment], journey.grid.world_size
    across = min(200, 860 // ranks)
    size = min(120, across - 24)
    width, top = max(560, across * ranks + 24), 112
    figure, axes = blank(width, top + size + 66)
    write(axes, 14, 22, f"{layout}: {LAYOUTS[layout]}", 13, weight="bold")
    _draw_phases(axes, moment)
    left = (width - across * ranks) / 2 + (across - size) / 2
    for rank, held in enumerate(now.held):
        x = left + rank * across
        _draw_matrix(axes, x, top, size, journey.side, held, 1.4)
        is_owner = moment > 0 and rank in journey.owners
        if is_owner:
            rectangle(axes, x - 4, top - 4, size + 8, size + 8, "none", linewidth=2.6)
        write(axes, x + size / 2, top + size + 20, f"{'★ ' if is_owner else ''}rank {rank}", 12, ha="center",
              weight="bold" if is_owner else "normal")  # fmt: skip
        write(axes, x + size / 2, top + size + 44, now.said[rank], 11, ha="center")
    for each in now.sent:
        ends = [(left + rank * across + size / 2, top - 6) for rank in (each.sender, each.receiver)]
        crosses = journey.replica_of(each.sender) != journey.replica_of(each.receiver)
        _draw_arc(axes, ends[0], ends[1], crosses)
    return finish(figure, f"own_sharding-{layout}-{moment}-{dp}-{tp}", say_moment(journey, moment))


def _draw_phases(axes: Axes, moment: int) -> None:
    x = 14.0
    for number, name in enumerate(MOMENTS):
        wide = 9.4 * len(name) + 18
        rectangle(
            axes,
            x,
            38,
            wide,
            24,
            MARKED if number == moment else CARD,
            linewidth=1.4 if number == moment else 0.5,
        )
        write(axes, x + wide / 2, 50, name, 11, ha="center", weight="bold" if number == moment else "normal")
        x += wide + 6


def _draw_arc(axes: Axes, start: tuple[float, float], stop: tuple[float, float], crosses: bool) -> None:
    away = 0.18 if start[0] < stop[0] else -0.18
    ends: dict[str, Any] = {"shrinkA": 3, "shrinkB": 3, "connectionstyle": f"arc3,rad={-away}"}
    look: dict[str, Any] = {
        "color": INK,
        "linewidth": 1.7,
        "linestyle": "--" if crosses else "-",
        "zorder": 8,
    }
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=15, **ends, **look))


def explore_layouts(dp: int = 2, tp: int = 2, live: bool = True) -> Shell | Picture:
    """Pick a layout, and play a parameter's way through it; the gather of FSDP2 where no kernel runs."""

    def draw(moment: int, layout: str) -> Picture:
        return draw_journey(layout, moment, dp, tp)

    still = draw_journey("FSDP2", MOMENTS.index("gather"), dp, tp)
    layouts = choice("layout", {name: name for name in LAYOUTS})
    return play(draw, len(MOMENTS) - 1, still, live, interval=1200, layout=layouts)


def draw_rows(
    found: Sequence[int | None], lengths: Sequence[int], group: Sequence[int], index: int
) -> Picture:
    """The rows that a ``gather_fn`` returned, beside those that are due, in the colours of who holds them."""
    owners = [rank for rank, length in zip(group, lengths, strict=True) for _ in range(length)]
    high = min(26, 300 / len(owners))
    figure, axes = blank(560, round(78 + high * len(owners)))
    write(axes, 14, 20, f"Matrix {index}, row by row", 12, weight="bold")
    for x, title in ((90, "due"), (320, "yours")):
        write(axes, x, 48, title, 11, color=QUIET)
    for row, rank in enumerate(owners):
        y, came = 62 + row * high, found[row]
        rectangle(axes, 90, y, 180, high - 3, rank_colour(rank), linewidth=0.7)
        write(axes, 96, y + high / 2 - 1, f"row {row} of rank {rank}", 11 if high > 18 else 8)
        fill = EMPTY if came is None else rank_colour(owners[came])
        wrong = came != row
        rectangle(
            axes,
            320,
            y,
            180,
            high - 3,
            fill,
            linewidth=2.4 if wrong else 0.7,
            edgecolor=WRONG if wrong else INK,
        )
        said = "no row of it" if came is None else f"row {came}"
        write(axes, 326, y + high / 2 - 1, said, 11 if high > 18 else 8)
        write(axes, 506, y + high / 2 - 1, "✗" if wrong else "", 12, color=WRONG)
    bad = [
        f"row {row} has {'nothing' if came is None else came}"
        for row, came in enumerate(found)
        if came != row
    ]
    return finish(figure, f"own_sharding-rows-{index}", f"Your matrix {index}: {'; '.join(bad)}.")


def draw_loads(model: MixedModel, owners: Mapping[int, int]) -> Picture:
    """Each rank's work as a bar of its matrices, beside the package's makespan."""
    loads, par = model.loads(dict(owners)), model.makespan(as_the_package(model))
    scale = 560 / max(*loads, par)
    figure, axes = blank(760, 74 + 34 * len(loads))
    write(axes, 14, 20, "Work of each rank, in GFLOP", 12, weight="bold")
    ends = [0.0] * len(loads)
    for index, owner in sorted(owners.items()):
        share = (model.loads({index: owner})[owner]) * scale
        y = 44 + 34 * owner
        rectangle(axes, 90 + ends[owner], y, share, 26, rank_colour(owner), linewidth=0.8)
        ends[owner] += share
    for rank, load in enumerate(loads):
        write(axes, 14, 57 + 34 * rank, f"rank {rank}", 11)
        write(axes, 96 + ends[rank], 57 + 34 * rank, f"{load:.1f}", 11)
    x = 90 + par * scale
    axes.plot([x, x], [38, 46 + 34 * len(loads)], color=INK, linewidth=1.6, linestyle="--")
    write(axes, x, 56 + 34 * len(loads), f"par {par:.1f}", 11, ha="center")
    said = ", ".join(f"rank {rank} {load:.1f}" for rank, load in enumerate(loads))
    return finish(figure, "own_sharding-loads", f"GFLOP: {said}; par is {par:.1f} on the busiest rank.")
