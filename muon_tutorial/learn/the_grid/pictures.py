"""Pictures of lesson 06: a grid of ranks, a rank's groups, and which ranks have heard of each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from ... import Grid
from ..exercises.on_real_ranks import say_ranks
from ..pictures.colours import CARD, DP_GROUP, EMPTY, INK, QUIET, TP_GROUP, rank_colour
from ..pictures.picture import GridFrame, Picture, blank, centred, finish, rectangle, write
from ..widgets.shell import RankButtons, Shell, show
from .on_ranks import read_groups

_WIDTH, _MARGIN = 880, 24.0
_EDGE = {"tp": TP_GROUP, "dp": DP_GROUP}
_DASHES = {"tp": "-", "dp": "--"}


def _outline(axes: Axes, frame: GridFrame, axis: str, ranks: Sequence[int]) -> None:
    """An outline around the cells of a group, which lie in one row or in one column."""
    inset = 3.0 if axis == "tp" else 7.0
    (left, top), (right, bottom) = frame.cell(ranks[0]), frame.cell(ranks[-1])
    size = right - left + frame.wide - 2 * inset, bottom - top + frame.high - 2 * inset
    corner = (left + inset, top + inset)
    patch = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=8", fill=False, zorder=6)
    patch.set(edgecolor=_EDGE[axis], linewidth=3.0, linestyle=_DASHES[axis])
    axes.add_patch(patch)


def explore(dp: int, tp: int, live: bool = True) -> Shell | Picture:
    grid = Grid.of(dp=dp, tp=tp)
    draw = functools.cache(functools.partial(draw_rank, grid))
    return show(draw, draw_rank(grid, 0), live, rank=RankButtons(dp, tp))


def draw_rank(grid: Grid, rank: int) -> Picture:
    """One rank in its colour, its row and column outlined, and next to them the arithmetic."""
    frame = GridFrame.fitting(grid, (_MARGIN + 26, 52.0), 420, (104, 92))
    figure, axes = blank(_WIDTH, round(max(frame.bottom + 24, 262)))
    write(axes, frame.left, frame.top - 18, "along tp →", color=TP_GROUP)
    centred(axes, frame.left - 18, frame.top, "along dp →", rotation=-90, va="top", color=DP_GROUP)
    at, tp = grid.at(rank), grid.size("tp")
    for other in grid.ranks:
        (x, y), spot = frame.cell(other), frame.grid.at(other)
        inset, fill = 11.0, rank_colour(other) if other == rank else EMPTY
        size = frame.wide - 2 * inset, frame.high - 2 * inset
        rectangle(axes, x + inset, y + inset, *size, fill, linewidth=1.0)
        middle = (x + frame.wide / 2, y + frame.high / 2)
        if frame.wide > 90:
            centred(axes, middle[0], middle[1] - 12, f"rank {other}", 12, weight="bold")
            centred(axes, middle[0], middle[1] + 11, f"dp {spot['dp']}, tp {spot['tp']}")
        else:
            centred(axes, *middle, str(other), weight="bold")
    for axis in ("tp", "dp"):
        _outline(axes, frame, axis, at.group(axis))
    arithmetic = [
        (f"rank {rank}", INK, "bold"),
        (f"dp_rank = {rank} // {tp} = {at['dp']}", INK, "normal"),
        (f"tp_rank = {rank} % {tp} = {at['tp']}", INK, "normal"),
        (f"and back: {at['dp']} · {tp} + {at['tp']} = {rank}", INK, "normal"),
        (f"tp group, its row: {_short(at.group('tp'))}", TP_GROUP, "bold"),
        (f"in it, rank {rank} is number {at['tp']}", TP_GROUP, "normal"),
        (f"dp group, its column: {_short(at.group('dp'))}", DP_GROUP, "bold"),
        (f"in it, rank {rank} is number {at['dp']}", DP_GROUP, "normal"),
    ]
    for number, (line, colour, weight) in enumerate(arithmetic):
        write(axes, 504, 40 + 30 * number, line, 12, color=colour, weight=weight)
    said = (
        f"A grid of ranks, {grid.size('dp')} along dp and {tp} along tp. Rank {rank} stands at "
        f"dp {at['dp']}, tp {at['tp']}. Its row, its tp group, is {say_ranks(at.group('tp'))}; there it is "
        f"number {at['tp']}. Its column, its dp group, is {say_ranks(at.group('dp'))}; there it is "
        f"number {at['dp']}."
    )
    return finish(figure, f"grid-rank-{rank}", said)


def _short(ranks: Sequence[int]) -> str:
    """The ranks of a group. Of a long group, only the first two and the last are named.

    >>> _short((0, 3)), _short(range(9))
    ('0, 3', '0, 1, … 8')
    """
    listed = list(ranks) if len(ranks) < 6 else [ranks[0], f"{ranks[1]}, … {ranks[-1]}"]
    return ", ".join(map(str, listed))


def picture_of_groups(made: object, dp: int, tp: int) -> Picture:
    """The groups that a function returned, as lines on the grid; wrong members are crossed out."""
    parts = made if isinstance(made, (tuple, list)) and len(made) == 2 else ((), ())
    grid = Grid.of(dp=dp, tp=tp)
    half = GridFrame.fitting(grid, (_MARGIN, 46.0), 400, (100, 84))
    figure, axes = blank(_WIDTH, round(half.bottom + 18))
    said = []
    for number, (axis, part) in enumerate(zip(("dp", "tp"), parts, strict=True)):
        frame = GridFrame(grid, _MARGIN + 432 * number, half.top, half.wide, half.high)
        listed = read_groups(part) or []
        write(axes, frame.left, 24, f"{axis}_groups, as you made them", 12, weight="bold", color=_EDGE[axis])
        for rank in frame.grid.ranks:
            (x, y), mine = frame.cell(rank), [number for number, ranks in enumerate(listed) if rank in ranks]
            alone = len(mine) == 1
            fill, hatch = (rank_colour(rank), None) if alone else (EMPTY, "xx")
            rectangle(axes, x + 8, y + 8, frame.wide - 16, frame.high - 16, fill, hatch=hatch)
            told = f"group {mine[0]}" if alone else "in several" if mine else "in none"
            label = f"rank {rank}\n{told}" if frame.wide > 90 else str(rank)
            box = {"facecolor": fill, "edgecolor": "none", "pad": 1.2}
            centred(axes, x + frame.wide / 2, y + frame.high / 2, label, zorder=8, bbox=box)
        for ranks in listed:
            spots = [frame.cell(rank) for rank in ranks if rank in frame.grid.ranks]
            across, down = [x + frame.wide / 2 for x, _ in spots], [y + frame.high / 2 for _, y in spots]
            axes.plot(across, down, color=_EDGE[axis], linestyle=_DASHES[axis], linewidth=4, zorder=5)
        said.append(f"{axis}_groups: {'; '.join(say_ranks(group) for group in listed if group) or 'none'}.")
    return finish(figure, "grid-groups", " ".join(said))


def hero() -> Picture:
    """Three grids: before any call, after a call in the tp groups, and after one in the dp groups."""
    grid = Grid.of(dp=2, tp=3)
    figure, axes = blank(900, 262)
    moments: dict[str, tuple[str, ...]] = {
        "Each knows itself": (),
        "After one call in its row": ("tp",),
        "and one in its column": ("tp", "dp"),
    }
    for number, (title, called) in enumerate(moments.items()):
        frame = GridFrame(grid, 18.0 + 296 * number, 54.0, 90.0, 92.0)
        colour = _EDGE[called[-1]] if called else INK
        write(axes, frame.left + 4, 28, title, 12.5, weight="bold", color=colour)
        for rank in grid.ranks:
            _draw_tiles(axes, frame, rank, heard=grid.at(rank).group(*called))
        for axis in called[-1:]:
            for ranks in sorted({grid.at(rank).group(axis) for rank in grid.ranks}):
                _outline(axes, frame, axis, ranks)
        if number:
            centred(axes, frame.left - 15, frame.top + 92, "→", 16)
    said = "Six tiles in a cell, one for each rank, coloured once that rank has been heard of."
    write(axes, 22, 250, said, color=QUIET)
    alt = (
        "A grid of ranks, two rows of three, in three moments. At first each rank knows itself alone. After "
        "a call in every tp group, a row, each knows its row. After a call in every dp group, a column, each "
        "knows all six."
    )
    return finish(figure, "grid-hero", alt)


def _draw_tiles(axes: Axes, frame: GridFrame, rank: int, heard: Sequence[int]) -> None:
    """One rank's cell: its number, and a small grid in which the ranks that it has heard of are coloured."""
    (x, y), grid = frame.cell(rank), frame.grid
    rectangle(axes, x + 9, y + 9, frame.wide - 18, frame.high - 18, CARD, linewidth=1.0)
    centred(axes, x + frame.wide / 2, y + 21, f"rank {rank}", weight="bold", zorder=7)
    wide, high = (frame.wide - 34) / grid.size("tp"), (frame.high - 50) / grid.size("dp")
    for other in grid.ranks:
        dp, tp = divmod(other, grid.size("tp"))
        fill = rank_colour(other) if other in heard else EMPTY
        rectangle(axes, x + 17 + tp * wide, y + 33 + dp * high, wide, high, fill, linewidth=0.6, zorder=2)
