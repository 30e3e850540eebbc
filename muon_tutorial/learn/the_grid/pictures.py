"""Pictures of lesson 06: a grid of ranks, a Linear cut by its tp axis, and the buffers that its dp axis cuts.

A fill stands for a tp position: ranks of one column of the grid hold the same piece of a weight.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from ... import Box, Grid, Plan, Replicate, Shard
from ...plan.bucket import Bucket
from ...plan.layout import shard_box
from ..pictures import figures
from ..pictures.colours import ADAMW, EMPTY, INK, QUIET, SGD, rank_colour
from ..pictures.holdings import StepMoment, momentum_holdings, weight_holdings, with_letters
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..widgets.rank_buttons import RankButtons
from ..widgets.shell import Shell, choice, show
from .exercises import Groups, read_groups
from .on_ranks import BATCH, DIM, KINDS, UP, CutKind, KeptByRank, groups, letters_of, plan_of, say_ranks

Frame = tuple[float, float, float, float]
_WIDTH, _MARGIN, _SPLIT = 880, 24.0, 340.0
_UNIT, _SPACE = 14.0, 52.0
_WHAT: dict[CutKind, str] = {
    "column": "Cuts dimension 0 of W: its rows. A place needs all of x, and makes some columns of y.",
    "row": "Cuts dimension 1 of W: its columns. A place needs the same columns of x, and makes a part of "
    "every sum in y; an all_reduce over the tp group adds the parts up.",
}


@dataclass(frozen=True, slots=True)
class LinearOperand:
    """One matrix of ``y = x Wᵀ``: its name, its shape, and the dimension that tp cuts, or None.

    ``partial`` says that every place has a part of every sum.
    """

    name: str
    shape: tuple[int, int]
    dim: int | None
    partial: bool = False

    def box(self, place: int, tp: int) -> Box:
        """What one tp position holds of it."""
        return shard_box(self.shape, Replicate() if self.dim is None else Shard(self.dim), place, tp)

    def say(self, place: int, tp: int) -> str:
        """What one tp position holds of it, in words."""
        if self.dim is None or tp == 1:
            return f"{'a part of every sum in' if self.partial and tp > 1 else 'all of'} {self.name}"
        box, what = self.box(place, tp), ("row", "column")[self.dim]
        start, length = box.offset[self.dim], box.shape[self.dim]
        run = f"{what}s {start} to {start + length - 1}" if length > 1 else f"{what} {start}"
        return f"{run if length else 'nothing'} of {self.name}"


def operands(shape: tuple[int, int], kind: CutKind) -> tuple[LinearOperand, LinearOperand, LinearOperand]:
    """The input, weight and output of a Linear with a weight of ``shape`` (out, in), as tp cuts them."""
    out, into = shape
    x, y = (None, 1) if kind == "column" else (1, None)
    return (
        LinearOperand("x", (BATCH, into), x),
        LinearOperand("W", shape, DIM[kind]),
        LinearOperand("y", (BATCH, out), y, partial=kind == "row"),
    )


def draw_overview(grid: Grid, shape: tuple[int, int], rank: int = 0) -> Picture:
    """The grid beside one Linear cut both ways, each tp position in its colour; one rank's groups framed."""
    figure, axes = blank(_WIDTH, 502)
    _draw_grid(axes, grid, rank, (_MARGIN, 24.0, _SPLIT - 2 * _MARGIN, 380.0))
    for number, kind in enumerate(KINDS):
        _draw_linear(axes, shape, kind, range(grid.size("tp")), grid.size("tp"), 24.0 + 244 * number)
    cuts = [_say_cut(grid, shape, kind) for kind in KINDS]
    return finish(figure, "grid-overview", " ".join([_say_rank(grid, rank), *cuts]))


def draw_place(grid: Grid, shape: tuple[int, int], rank: int, kind: CutKind) -> Picture:
    """One rank: its groups on the grid, and in colour what it holds of a Linear that is cut one way."""
    figure, axes = blank(_WIDTH, 324)
    place, tp = grid.at(rank)["tp"], grid.size("tp")
    _draw_grid(axes, grid, rank, (_MARGIN, 24.0, _SPLIT - 2 * _MARGIN, 276.0))
    _draw_linear(axes, shape, kind, [place], tp, 24.0)
    for number, line in enumerate(_held_lines(grid, shape, rank, kind)):
        write(axes, _SPLIT, 264 + 19 * number, line, 9)
    said = " ".join([_say_rank(grid, rank), *_held_lines(grid, shape, rank, kind)])
    return finish(figure, f"grid-{rank}-{kind}", said)


def _held_lines(grid: Grid, shape: tuple[int, int], rank: int, kind: CutKind) -> list[str]:
    at = grid.at(rank)
    x, w, y = (operand.say(at["tp"], at.size("tp")) for operand in operands(shape, kind))
    row = f"Together {say_ranks(at.group('tp'))} keep all of W." if at.size("tp") > 1 else ""
    same = f"Rank {rank} keeps {w}; the same piece is on {say_ranks(at.group('dp'))}."
    return [same, f"It takes {x}, and makes {y}.", *([row] if row else [])]


def _say_rank(grid: Grid, rank: int) -> str:
    at = grid.at(rank)
    return (
        f"A grid of ranks, {grid.size('dp')} along dp and {grid.size('tp')} along tp. Rank {rank} stands at "
        f"dp {at['dp']}, tp {at['tp']}: its row, its tp group, is {say_ranks(at.group('tp'))}; its column, "
        f"its dp group, is {say_ranks(at.group('dp'))}."
    )


def _say_cut(grid: Grid, shape: tuple[int, int], kind: CutKind) -> str:
    tp, (x, w, y) = grid.size("tp"), operands(shape, kind)
    places = (f"tp {p} takes {x.say(p, tp)}, keeps {w.say(p, tp)}, makes {y.say(p, tp)}" for p in range(tp))
    return f"{kind.capitalize()} parallel, W of shape {shape[0]} × {shape[1]}: {'; '.join(places)}."


def _draw_grid(axes: Axes, grid: Grid, rank: int, frame: Frame) -> None:
    left, top, width, height = frame
    dp, tp = grid.size("dp"), grid.size("tp")
    write(axes, left, top, f"The grid: dp {dp}, tp {tp}", 11.5, weight="bold")
    side, edge, upper = _cell_side(grid, width - 36, height - 118), left + 28, top + 42
    write(axes, edge + 8, upper - 12, "along tp →", 9, color=QUIET)
    axes.text(left + 10, upper + 8, "along dp →", size=9, rotation=-90, va="top", ha="center", color=QUIET)
    for other in map(grid.at, grid.ranks):
        label, width = (
            f"rank {other.rank}\ndp {other['dp']}\ntp {other['tp']}",
            2.6 if other.rank == rank else 1.0,
        )
        place = (edge + other["tp"] * side, upper + other["dp"] * side, side)
        _draw_cell(axes, place, rank_colour(other["tp"]), label, linewidth=width)
    at = grid.at(rank)
    _outline(axes, (edge - 2, upper + at["dp"] * side - 2, tp * side + 4, side + 4), ADAMW, "-")
    _outline(axes, (edge + at["tp"] * side + 2, upper + 2, side - 4, dp * side - 4), SGD, "--")
    _draw_key(axes, grid, rank, left, upper + dp * side + 24)


def _draw_key(axes: Axes, grid: Grid, rank: int, left: float, top: float) -> None:
    at = grid.at(rank)
    keys = (ADAMW, "-", "tp", "row"), (SGD, "--", "dp", "column")
    for number, (colour, dashes, axis, line) in enumerate(keys):
        y = top + 19 * number
        axes.plot([left, left + 24], [y, y], color=colour, linewidth=2.6, linestyle=dashes)
        text = f"{axis} group of rank {rank}, its {line}: {_short(at.group(axis))}"
        write(axes, left + 32, y, text, 9)
    said = "The same fill: the same piece of every weight."
    write(axes, left, top + 40, said, 9, color=QUIET)


def _short(ranks: Sequence[int]) -> str:
    """The ranks of a group; of a long one the first and the last.

    >>> _short((0, 3)), _short(range(9))
    ('0, 3', '0, 1, … 8')
    """
    listed = list(ranks) if len(ranks) < 6 else [ranks[0], f"{ranks[1]}, … {ranks[-1]}"]
    return ", ".join(map(str, listed))


def _cell_side(grid: Grid, width: float, height: float) -> float:
    return min(78.0, width / grid.size("tp"), height / grid.size("dp"))


def _draw_cell(
    axes: Axes,
    where: tuple[float, float, float],
    fill: str,
    label: str,
    linewidth: float = 1.0,
    hatch: str | None = None,
) -> None:
    """One rank of a grid; where a cell has no room for the whole label, its first line's number stays."""
    x, y, side = where
    inset = side / 9
    inner = side - 2 * inset
    rectangle(axes, x + inset, y + inset, inner, inner, fill, linewidth=linewidth, hatch=hatch)
    text, size = (label, 8.0) if side > 70 else (label.split()[1], min(9.0, side / 3))
    box = {"facecolor": fill, "edgecolor": "none", "pad": 1.2} if hatch else None
    write(axes, x + side / 2, y + side / 2, text, size, ha="center", linespacing=1.5, bbox=box)


def _outline(axes: Axes, frame: Frame, colour: str, dashes: str) -> None:
    x, y, width, height = frame
    patch = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=6", fill=False)
    patch.set(edgecolor=colour, linewidth=2.6, linestyle=dashes)
    axes.add_patch(patch)


def _draw_linear(
    axes: Axes, shape: tuple[int, int], kind: CutKind, places: Iterable[int], tp: int, top: float
) -> None:
    """``y = x Wᵀ`` with the pieces of some tp positions in colour and the rest in grey."""
    places = list(places)
    title = f"{kind.capitalize()} parallel: y = x Wᵀ"
    write(axes, _SPLIT, top, title, 11.5, weight="bold")
    what = "\n".join(textwrap.wrap(_WHAT[kind], 87))
    axes.text(_SPLIT, top + 16, what, size=9, va="top", color=QUIET, linespacing=1.3)
    left = _SPLIT
    for operand in operands(shape, kind):
        _draw_operand(axes, operand, places, tp, (left, top + 72))
        left += operand.shape[1] * _UNIT + _SPACE


def _draw_operand(
    axes: Axes, operand: LinearOperand, places: Sequence[int], tp: int, corner: tuple[float, float]
) -> None:
    (left, top), (rows, columns) = corner, operand.shape
    title = f"{operand.name}  {rows} × {columns}"
    write(axes, left, top - 10, title, 9, weight="bold")
    size = (columns * _UNIT, rows * _UNIT)
    rectangle(axes, left, top, *size, EMPTY, linewidth=1.4)
    partial = operand.partial and tp > 1
    if operand.dim is None and len(places) > 1:
        label = "every place:\na part of\nevery sum" if partial else "every place:\nall of it"
        _draw_piece(axes, (left, top, *size), "#ffffff", label, partial)
        return
    for place in places:
        box = operand.box(place, tp)
        if box.numel:
            x, y = left + box.offset[1] * _UNIT, top + box.offset[0] * _UNIT
            frame = (x, y, box.shape[1] * _UNIT, box.shape[0] * _UNIT)
            _draw_piece(axes, frame, rank_colour(place), f"tp {place}", partial)


def _draw_piece(axes: Axes, frame: Frame, fill: str, label: str, partial: bool) -> None:
    x, y, width, height = frame
    hatch = "//" if partial else None
    rectangle(axes, x, y, width, height, fill, linewidth=1.2, hatch=hatch, zorder=3)
    narrow = width < 30
    label = label.removeprefix("tp ") if narrow else label
    size = min(8.5, max(width, 12) / (2 if narrow else 4), max(height, 12) / 1.4)
    box = {"facecolor": fill, "edgecolor": "none", "pad": 1.2} if partial or width > 60 else None
    write(axes, x + width / 2, y + height / 2, label, size, ha="center", zorder=7, bbox=box)


def picture_of_groups(function: Groups, dp: int, tp: int) -> Picture:
    """The groups that the reader's function returns, right or wrong, on the grid: one fill a group.

    The reference's, where it is a stub.
    """
    made, grid = function(dp, tp), Grid.of(dp=dp, tp=tp)
    if made is ...:
        print("No answer yet: this is the reference.")
        made = groups(dp, tp)
    parts = made if isinstance(made, (tuple, list)) and len(made) == 2 else ((), ())
    side = _cell_side(grid, 380, 240)
    figure, axes = blank(_WIDTH, round(78 + dp * side + 20))
    said = []
    for number, (axis, part) in enumerate(zip(("dp", "tp"), parts, strict=True)):
        listed = read_groups(part) or []
        left = _MARGIN + 436 * number
        write(axes, left, 24, f"{axis}_groups", 11.5, weight="bold")
        write(axes, left, 44, "one fill, one group", 9, color=QUIET)
        for at in map(grid.at, grid.ranks):
            mine = [number for number, group in enumerate(listed) if at.rank in group]
            alone = len(mine) == 1
            label = f"rank {at.rank}\n" + (
                f"group {mine[0]}" if alone else "in several" if mine else "in none"
            )
            fill, place = (
                rank_colour(mine[0]) if alone else EMPTY,
                (left + at["tp"] * side, 62 + at["dp"] * side),
            )
            _draw_cell(axes, (*place, side), fill, label, hatch=None if alone else "xx")
        said.append(f"{axis}_groups: {'; '.join(say_ranks(group) for group in listed) or 'none'}.")
    return finish(figure, "grid-groups", " ".join(said))


def picture_of_buffers(dp: int, tp: int) -> Picture:
    """For each tp position the flat buffer of both weights, and how dp cuts it."""
    plan = plan_of(dp, tp)
    [bucket] = plan.buckets
    figure, axes = blank(_WIDTH, round(58 + 92 * tp))
    title = "One buffer for each place along tp, cut by dp"
    write(axes, _MARGIN, 24, title, 11.5, weight="bold")
    for place in range(tp):
        _draw_buffer(axes, plan, bucket, place, 52.0 + 92 * place)
    return finish(figure, "grid-buffers", " ".join(say_buffer(plan, place) for place in range(tp)))


def _draw_buffer(axes: Axes, plan: Plan, bucket: Bucket, place: int, top: float) -> None:
    at, dp, left = plan.grid.at(place), plan.grid.size("dp"), _MARGIN + 62
    length = bucket.length(bucket.model_layout, at)
    scale = (_WIDTH - left - _MARGIN) / length
    write(axes, _MARGIN, top + 32, f"tp {place}", 10, weight="bold")
    rectangle(axes, left, top, length * scale, 32, EMPTY, hatch="xxxx")
    for spot in bucket.buffer_slices(bucket.model_layout, at):
        if spot.box.numel:
            rows, columns = spot.box.shape
            start, stop = (left + edge * scale for edge in spot.interval)
            label = f"{spot.entry.matrix.name}'s piece, {rows} × {columns}"
            _draw_piece(axes, (start, top, stop - start, 32), rank_colour(place), label, partial=False)
    for position in range(dp):
        start, width = left + position * length / dp * scale, length / dp * scale
        rank = plan.grid.rank({"dp": position, "tp": place})
        _draw_piece(axes, (start, top + 40, width, 26), "#ffffff", f"rank {rank}", partial=False)
        if position:
            axes.plot([start, start], [top - 6, top + 66], color=INK, linewidth=1.4, dashes=(3, 2), zorder=6)


def say_buffer(plan: Plan, place: int) -> str:
    """One buffer in words: which pieces lie where, and which rank keeps which slice."""
    [bucket] = plan.buckets
    at, dp = plan.grid.at(place), plan.grid.size("dp")
    length = bucket.length(bucket.model_layout, at)
    spots = [spot for spot in bucket.buffer_slices(bucket.model_layout, at) if spot.box.numel]
    pieces = [f"{spot.entry.matrix.name} from {spot.interval[0]} to {spot.interval[1]}" for spot in spots]
    if sum(spot.box.numel for spot in spots) < length:
        pieces.append("padding elsewhere" if pieces else "padding only")
    slices = (
        f"rank {rank} keeps {position * length // dp} to {(position + 1) * length // dp}"
        for position, rank in enumerate(at.group("dp"))
    )
    return f"tp {place}: a buffer of {length} numbers holds {', '.join(pieces)}; {'; '.join(slices)}."


def explore(dp: int, tp: int, live: bool = True) -> Shell | Picture:
    """A button for each rank and one for each cut, over the rank's groups and what it holds of a Linear."""
    grid = Grid.of(dp=dp, tp=tp)

    def draw(rank: int, cut: CutKind) -> Picture:
        return draw_place(grid, UP, rank, cut)

    cut = choice("cut", {f"{kind} parallel": kind for kind in KINDS})
    cut.style.button_width = "130px"
    return show(draw, draw_overview(grid, UP), live, rank=RankButtons(dp, tp), cut=cut)


def picture_of_kept(plan: Plan, kept: Sequence[KeptByRank]) -> Picture:
    """The first weight and its momentum, by holder, with a letter for each distinct content of a real run."""
    up, _, momentum = letters_of(kept)
    held = with_letters(weight_holdings(plan), up), with_letters(momentum_holdings(plan), momentum)
    moments = [
        StepMoment("up: the weight", "tp cuts it, dp copies it", held[0]),
        StepMoment("up: its momentum", "tp cuts it, dp cuts the buffer", held[1]),
    ]
    return figures.draw_holdings(moments, UP, "the_grid-kept")
