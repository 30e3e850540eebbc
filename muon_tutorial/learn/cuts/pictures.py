"""Pictures of lesson 07: a Linear cut both ways, the buffers that dp cuts, a fused weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from ... import Box, Grid, Plan, Replicate, Shard
from ...plan.exchange import BufferSlice
from ...plan.layout import shard_box
from ..pictures.colours import CARD, EMPTY, INK, QUIET, RIGHT, TP_HATCHES, WRONG, rank_colour
from ..pictures.holdings import patches
from ..pictures.picture import Frame, Picture, Point, blank, centred, finish, rectangle, tile, write
from ..widgets.shell import RankButtons, Shell, choice, play, show
from .on_ranks import BATCH, DIM, KINDS, UP, CutKind, KeptByRank, letters_of, plan_of, slice_length
from .qkv import PARTS, FusedRows, cut_fused, rows_as_one, rows_of_each

_WIDTH, _MARGIN = 880, 24.0
_UNIT, _SPACE = 20.0, 66.0
_CUTS: dict[CutKind, str] = {
    "column": "Column parallel cuts the rows of W: its out features.",
    "row": "Row parallel cuts the columns of W: its in features.",
}


@dataclass(frozen=True, slots=True)
class LinearOperand:
    """One matrix of ``y = x Wᵀ``: cut by tp along ``dim``, whole if ``dim`` is None, or a ``partial`` sum."""

    name: str
    shape: tuple[int, int]
    dim: int | None
    partial: bool = False

    def box(self, tp_rank: int, tp: int) -> Box:
        return shard_box(self.shape, Replicate() if self.dim is None else Shard(self.dim), tp_rank, tp)

    def say(self, tp_rank: int, tp: int) -> str:
        if self.dim is None or tp == 1:
            return f"{'a part of every sum in' if self.partial and tp > 1 else 'all of'} {self.name}"
        box, what = self.box(tp_rank, tp), ("row", "column")[self.dim]
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


def explore(dp: int, tp: int, live: bool = True) -> Shell | Picture:
    grid = Grid.of(dp=dp, tp=tp)
    cut = choice("cut", {f"{kind} parallel": kind for kind in KINDS}, width=130)
    draw = partial(draw_linear, grid, UP)
    return show(draw, draw_both_cuts(grid, UP, 0), live, rank=RankButtons(dp, tp), cut=cut)


def draw_linear(grid: Grid, shape: tuple[int, int], rank: int, cut: CutKind) -> Picture:
    """One rank's part of a Linear that is cut in one way, in the rank's colour."""
    figure, axes = blank(_WIDTH, 366)
    _draw_cut(axes, grid, shape, rank, cut, 24.0)
    lines = _held_lines(grid, shape, rank, cut)
    for number, line in enumerate(lines):
        write(axes, _MARGIN, 318 + 24 * number, line, 11.5)
    return finish(figure, f"cuts-{rank}-{cut}", " ".join([_CUTS[cut], *lines]))


def draw_both_cuts(grid: Grid, shape: tuple[int, int], rank: int) -> Picture:
    """One rank's part of a Linear, cut column parallel, and below it cut row parallel."""
    figure, axes = blank(_WIDTH, 620)
    for number, kind in enumerate(KINDS):
        _draw_cut(axes, grid, shape, rank, kind, 24.0 + 304 * number)
    said = [" ".join([_CUTS[kind], *_held_lines(grid, shape, rank, kind)]) for kind in KINDS]
    return finish(figure, f"cuts-both-{rank}", " ".join(said))


def _held_lines(grid: Grid, shape: tuple[int, int], rank: int, kind: CutKind) -> list[str]:
    at = grid.at(rank)
    x, w, y = (operand.say(at["tp"], at.size("tp")) for operand in operands(shape, kind))
    same = ", ".join(map(str, at.group("dp")))
    return [f"Rank {rank} holds {w}, as do all in its dp group: {same}.", f"It takes {x}, and makes {y}."]


def _draw_cut(axes: Axes, grid: Grid, shape: tuple[int, int], rank: int, kind: CutKind, top: float) -> None:
    """``y = x Wᵀ`` with every piece hatched and labelled, and one rank's pieces in its colour."""
    write(axes, _MARGIN, top, _CUTS[kind], 12.5, weight="bold")
    write(axes, _WIDTH - _MARGIN, top, f"in colour: rank {rank}", 11.5, ha="right", color=QUIET)
    left, at = _MARGIN + 16, grid.at(rank)
    for operand in operands(shape, kind):
        _draw_operand(axes, operand, at["tp"], at.size("tp"), rank, (left, top + 58))
        left += operand.shape[1] * _UNIT + _SPACE + (24 if operand.name == "W" else 0)


def _draw_operand(axes: Axes, operand: LinearOperand, mine: int, tp: int, rank: int, corner: Point) -> None:
    """An operand's pieces, each with its tp coordinate beside it, so that even a thin piece has a label."""
    (left, top), (rows, columns) = corner, operand.shape
    whole = (left, top, columns * _UNIT, rows * _UNIT)
    write(axes, left, top - 30, f"{operand.name}   {rows} × {columns}", 12, weight="bold")
    rectangle(axes, *whole, CARD, linewidth=1.4)
    if operand.dim is None:
        label = "a part of\nevery sum" if operand.partial and tp > 1 else "all of it"
        tile(axes, whole, rank_colour(rank), label, 11.5, linewidth=1.4, linespacing=1.3)
        return
    for tp_rank in range(tp):
        box = operand.box(tp_rank, tp)
        if not box.numel:
            continue
        x, y = left + box.offset[1] * _UNIT, top + box.offset[0] * _UNIT
        width, height = box.shape[1] * _UNIT, box.shape[0] * _UNIT
        fill, weight = (rank_colour(rank), "bold") if tp_rank == mine else (EMPTY, "normal")
        hatch = TP_HATCHES[tp_rank % len(TP_HATCHES)] or None
        rectangle(axes, x, y, width, height, fill, linewidth=1.2, hatch=hatch)
        if operand.dim == 0:
            write(axes, x + width + 5, y + height / 2, f"tp {tp_rank}", weight=weight)
        else:
            label = f"tp {tp_rank}" if width > 38 else str(tp_rank)
            centred(axes, x + width / 2, y - 9, label, weight=weight)


def hero() -> Picture:
    """Which ranks hold which entries on a grid of 2 × 3: copies of the weight, slices of the buffers."""
    return draw_holders(plan_of(2, 3), "cuts-hero")


def picture_of_kept(dp: int, tp: int, kept: Sequence[KeptByRank]) -> Picture:
    """Draws a real run as ``hero`` draws a plan. Equal letters mean equal contents."""
    weights, _, momentum = letters_of(kept)
    return draw_holders(plan_of(dp, tp), "cuts-kept", weights, momentum)


def draw_holders(plan: Plan, name: str, weights: Sequence[str] = (), momentum: Sequence[str] = ()) -> Picture:
    """The first weight, copied for each dp coordinate, and the buffers of both weights' momentum."""
    dp, tp = plan.grid.size("dp"), plan.grid.size("tp")
    title = "The weight up: tp cuts it, dp copies it"
    figure, axes = blank(_WIDTH, round(max(322, 72 + 80 * tp)), title, _MARGIN, 24, 12.5)
    operand, step, unit = LinearOperand("up", UP, 0), min(196.0, 392 / dp), 24.0
    width = step - min(28.0, step / 6)
    for rank in plan.grid.ranks:
        at = plan.grid.at(rank)
        box, left = operand.box(at["tp"], tp), _MARGIN + step * at["dp"]
        if at["tp"] == 0:
            write(axes, left, 50, f"dp {at['dp']}", color=QUIET)
        if box.numel:
            frame = (left, 64 + unit * box.offset[0], width, unit * box.shape[0])
            tile(axes, frame, rank_colour(rank), _label(rank, weights, width), 11.5, linewidth=1.2)
    write(axes, 452, 24, "The momentum: dp cuts the buffer", 12.5, weight="bold")
    for tp_rank in range(tp):
        _draw_buffer(axes, plan, tp_rank, (452, 52.0 + 80 * tp_rank, 404, 56), momentum)
    bytes_of = [f" (bytes {letter})" for letter in weights] or [""] * plan.grid.world_size
    held = [f"rank {r} holds {operand.say(r % tp, tp)}{letter}" for r, letter in enumerate(bytes_of)]
    said = " ".join(say_buffer(plan, tp_rank, momentum) for tp_rank in range(tp))
    return finish(figure, name, f"The weight up, {UP[0]} × {UP[1]}: {'; '.join(held)}. {said}")


def draw_answers(who_holds: Callable[..., Any], dp: int, tp: int) -> Picture:
    """The weight up, each entry in the colour of the rank that a reader's function names for it."""
    length, (rows, columns) = slice_length(dp, tp), UP
    said = [[who_holds(row, column, dp, tp, length) for column in range(columns)] for row in range(rows)]
    panels = {f"weight, dp {p}": [[int(sorted(on)[p]) for on, _ in row] for row in said] for p in range(dp)}
    panels["momentum"] = [[int(keeper) for _, keeper in row] for row in said]
    unit = min(18.0, 800 / len(panels) / (columns + 2))
    title = f"The weight up, painted with {rows * columns} answers of yours"
    width = max(2 * _MARGIN + len(panels) * unit * (columns + 2) - 2 * unit, 500)
    figure, axes = blank(round(width), 280, title, _MARGIN, 24, 12.5)
    for number, (name, ranks) in enumerate(panels.items()):
        left, words = _MARGIN + unit * (columns + 2) * number, list[str]()
        write(axes, left, 58, name)
        for rank, top, start, down, across in patches(ranks):
            frame = (left + unit * start, 76 + 18.0 * top, unit * across, 18.0 * down)
            tile(axes, frame, rank_colour(rank), _label(rank, (), frame[2]), linewidth=0.8)
            words.append(f"rank {rank} {down} × {across} from row {top}, column {start}")
        title += f". {name}: {'; '.join(words)}"
    return finish(figure, "cuts-answers", f"{title}.")


def picture_of_buffers(dp: int, tp: int) -> Picture:
    """The flat buffer of both weights' pieces at each tp coordinate, and how dp cuts it."""
    plan = plan_of(dp, tp)
    title = "One buffer for each tp coordinate, and dp cuts each"
    figure, axes = blank(_WIDTH, round(48 + 84 * tp), title, _MARGIN, 24, 12.5)
    for tp_rank in range(tp):
        _draw_buffer(axes, plan, tp_rank, (_MARGIN, 48.0 + 84 * tp_rank, _WIDTH - 2 * _MARGIN, 60))
    return finish(figure, "cuts-buffers", " ".join(say_buffer(plan, tp_rank) for tp_rank in range(tp)))


def _draw_buffer(axes: Axes, plan: Plan, tp_rank: int, frame: Frame, letters: Sequence[str] = ()) -> None:
    """The pieces that lie in a buffer, and below them the slices into which dp cuts it."""
    [bucket] = plan.buckets
    at, dp = plan.grid.at(tp_rank), plan.grid.size("dp")
    left, top, width, height = frame[0] + 44, frame[1], frame[2] - 44, frame[3] / 2
    length = bucket.length(bucket.model_layout, at)
    scale = width / length
    write(axes, frame[0], top + height, f"tp {tp_rank}", 11.5, weight="bold")
    rectangle(axes, left, top, width, height, EMPTY)
    spots = _spots(plan, tp_rank)
    if at["tp"] == plan.grid.size("tp") - 1 and sum(spot.box.numel for spot in spots) < length:
        write(axes, left, top - 9, "grey: padding", color=QUIET)
    for spot in spots:
        rows, columns = spot.box.shape
        start, stop = (left + edge * scale for edge in spot.interval)
        name = spot.entry.matrix.name
        label = f"{name} {rows} × {columns}" if stop - start > 92 else name
        tile(axes, (start, top, stop - start, height), CARD, label)
    part = width / dp
    for position, rank in enumerate(at.group("dp")):
        frame = (left + position * part, top + height, part, height)
        tile(axes, frame, rank_colour(rank), _label(rank, letters, part))


def _spots(plan: Plan, tp_rank: int) -> list[BufferSlice]:
    [bucket] = plan.buckets
    spots = bucket.buffer_slices(bucket.model_layout, plan.grid.at(tp_rank))
    return [spot for spot in spots if spot.box.numel]


def _label(rank: int, letters: Sequence[str], width: float) -> str:
    """A rank and the letter of its contents, shortened if there is little room."""
    words = f"rank {rank}" if width > (90 if letters else 60) else str(rank)
    if not letters:
        return words
    return f"{words} · {letters[rank]}" if width > 60 else f"{words}·{letters[rank]}"


def say_buffer(plan: Plan, tp_rank: int, letters: Sequence[str] = ()) -> str:
    """One buffer in words: where each piece lies, and which rank keeps which slice."""
    [bucket] = plan.buckets
    at, dp = plan.grid.at(tp_rank), plan.grid.size("dp")
    length = bucket.length(bucket.model_layout, at)
    spots = _spots(plan, tp_rank)
    pieces = [f"{spot.entry.matrix.name} from {spot.interval[0]} to {spot.interval[1]}" for spot in spots]
    if sum(spot.box.numel for spot in spots) < length:
        pieces.append("padding elsewhere" if pieces else "padding only")
    bytes_of = {rank: f" (bytes {letters[rank]})" if letters else "" for rank in at.group("dp")}
    ends = [position * length // dp for position in range(dp + 1)]
    slices = (f"rank {r} keeps {ends[n]} to {ends[n + 1]}{bytes_of[r]}" for n, r in enumerate(bytes_of))
    return f"tp {tp_rank}: a buffer of {length} entries holds {', '.join(pieces)}; {'; '.join(slices)}."


def slide_qkv(live: bool = True) -> Shell | Picture:
    """A slider over tp: a fused weight cut as one, and beside it the same weight with q, k, v cut apart."""
    return play(draw_tp, 6, draw_tp(2), live, label="tp", interval=1500, first=1)


def draw_tp(tp: int) -> Picture:
    panels = (("cut as one", rows_as_one), ("q, k and v each cut", rows_of_each))
    figure, axes = blank(_WIDTH, 442)
    said = []
    for number, (title, rows_of) in enumerate(panels):
        fused = cut_fused(rows_of, tp)
        _draw_fused(axes, fused, f"tp = {tp}, {title}", _MARGIN + 436 * number)
        said.append(_say_fused(fused, f"tp = {tp}, {title}"))
    return finish(figure, f"cuts-qkv-{tp}", " ".join(said))


def draw_fused(fused: FusedRows, title: str) -> Picture:
    """A fused weight, cut according to an answer, and which of its heads are whole or torn."""
    figure, axes = blank(460, 442)
    _draw_fused(axes, fused, title, _MARGIN)
    return finish(figure, "cuts-qkv-yours", _say_fused(fused, title))


def _draw_fused(axes: Axes, fused: FusedRows, title: str, left: float) -> None:
    write(axes, left, 24, title, 12.5, weight="bold")
    torn = fused.torn()
    verdict = f"{len(torn)} of {fused.heads} heads torn" if torn else "every head is whole"
    write(axes, left, 48, verdict, 12, color=WRONG if torn else RIGHT, weight="bold")
    unit = 356 / fused.rows
    for number, name in enumerate(PARTS):  # the edges and names of q, k and v, and the edges of their heads
        top, height = 70 + unit * number * fused.rows / 3, unit * fused.rows / 3
        rectangle(axes, left + 26, top, 96, height, "none", linewidth=2.2, zorder=6)
        write(axes, left + 6, top + height / 2, name, 13, weight="bold")
        for head in range(1, fused.heads):
            y = top + unit * head * fused.size
            axes.plot([left + 26, left + 122], [y, y], color=INK, linewidth=0.9, dashes=(4, 2), zorder=6)
    for holder, _, start, _, length in patches([[fused.holder(row) for row in range(fused.rows)]]):
        top, height = 70 + unit * start, unit * length
        fill = rank_colour(holder) if holder >= 0 else EMPTY
        rectangle(axes, left + 26, top, 96, height, fill, linewidth=0.6)
        write(axes, left + 128, top + height / 2, f"rank {holder}" if holder >= 0 else "nobody")
    for head in range(fused.heads):
        x, y = left + 206, 70 + 356 / fused.heads * head
        mark, edge = ("✗ torn", WRONG) if len(fused.ranks_of(head)) > 1 else ("✓ whole", RIGHT)
        write(axes, x, y + 12, f"head {head}", 11.5, weight="bold")
        write(axes, x + 64, y + 12, mark, 11.5, color=edge, weight="bold")
        high = min(30.0, 356 / fused.heads - 40)
        for part, name in enumerate(PARTS):
            holders = fused.holders(part, head)
            for holder, _, start, _, length in patches([holders]):
                down, height = (high * number / len(holders) for number in (start, length))
                fill = rank_colour(holder) if holder >= 0 else EMPTY
                rectangle(axes, x + 56 * part, y + 28 + down, 46, height, fill, linewidth=0.6)
            frame = (x + 56 * part, y + 28, 46, high)
            tile(axes, frame, "none", name, 11.5, edgecolor=edge, linewidth=1.8, zorder=6)


def _say_fused(fused: FusedRows, title: str) -> str:
    torn = fused.torn()
    told = ["torn between ranks" if head in torn else "whole on rank" for head in range(fused.heads)]
    ranks = [", ".join(map(str, fused.ranks_of(head))) for head in range(fused.heads)]
    heads = (f"head {head} is {said} {ranks[head]}" for head, said in enumerate(told))
    return f"{title}: {len(torn)} of {fused.heads} heads torn; {'; '.join(heads)}."
