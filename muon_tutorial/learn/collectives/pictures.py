"""Pictures of lesson 03: messages over time with a lane per rank, and a message's time by its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..pictures import picture
from ..pictures.colours import EMPTY, INK, OTHER, QUIET, WRONG, rank_colour
from ..pictures.picture import Picture, Point, between, blank, centred, finish, heading, rectangle, write
from ..pictures.spectra import card, style
from ..widgets.shell import Shell, play
from .messages import HeldPieces, Message, MessageLog, first_repeat, holdings_after, of_ring_all_reduce
from .on_ranks import ITEM, NUMEL, LinkSpeed

_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 126, 46, 84, 62, 30
_GREY = "a digit is a piece, named for the rank that brings it; grey: not here yet"
_FULL = "each digit is a piece; its cell fills up as ranks add their entries"
SUM = ("all_reduce, message by message", _FULL)
GATHER = ("Your all_gather, message by message", _GREY)
HALF = ("Your reduce_scatter, message by message", _FULL)


def _pitch(ranks: int) -> float:
    return min(116.0, (900 - _LEFT - _RIGHT) / ranks)


def _x(ranks: int, rank: int, share: float = 0.5) -> float:
    """A place across a rank's lane: ``share`` 0 is its left edge, 0.5 its middle, 1 its right edge."""
    return _LEFT + _pitch(ranks) * (rank + 0.5 + 0.76 * (share - 0.5))


def _y(row: int) -> float:
    """The top of the strips that show what ranks hold after round ``row``."""
    return _TOP + 22 + row * _ROW


def hero() -> Picture:
    ranks = 4
    start = tuple({piece: frozenset({rank}) for piece in range(ranks)} for rank in range(ranks))
    sent = of_ring_all_reduce(ranks, NUMEL * ITEM)
    return draw_ladder(MessageLog(ranks, start, sent), SUM, "collectives-hero")


def draw_ladder(run: MessageLog, words: tuple[str, str], name: str, last: int | None = None) -> Picture:
    """What each rank holds after each round, and the messages between; rounds after ``last`` stay empty."""
    last = run.rounds if last is None else last
    width = round(max(_LEFT + _RIGHT + _pitch(run.ranks) * run.ranks, 540))
    figure, axes = blank(width, round(_y(run.rounds) + _STRIP + 16))
    heading(axes, *words)
    for x, rank in ((_x(run.ranks, rank), rank) for rank in range(run.ranks)):
        axes.plot([x, x], [_y(0), _y(run.rounds) + _STRIP], zorder=1, color=EMPTY, linewidth=2)
        centred(axes, x, _TOP + 8, f"rank {rank}", weight="bold")
    for row in range(run.rounds):
        write(axes, 12, _y(row) + _STRIP / 2 + _ROW / 2, f"round {row + 1}", color=QUIET)
    if words == SUM and run.rounds == 2 * (half := run.ranks - 1):
        for begun, phase in ((0, "reduce_\nscatter"), (half, "all_\ngather")):
            write(axes, 12, _y(begun) + 12, phase, weight="bold", zorder=6)
    for row in range(last + 1):
        for rank, held in enumerate(holdings_after(run.start, run.messages, row)):
            _draw_strip(axes, held, run, (_x(run.ranks, rank, 0), _y(row)), 0.76 * _pitch(run.ranks))
    wrong = first_repeat(run.start, run.messages)
    for message in run.messages:
        if message.round <= last:
            lost, colour = message.stop is None, WRONG if (message.stop is None or message == wrong) else INK
            for start, stop in _paths(message, run.ranks):
                if lost:
                    stop = between(start, stop, 0.55)
                    centred(axes, *stop, "✕", 13, color=WRONG, zorder=8)
                look: Any = {"linestyle": "--" if lost else "-", "linewidth": 1.3, "mutation_scale": 11}
                picture.arrow(axes, start, stop, zorder=5, color=colour, shrinkA=0, shrinkB=0, **look)
                label, fill = "?", EMPTY
                if message.content is not None:
                    label, fill = str(message.content.piece), rank_colour(message.content.piece)
                box = {"boxstyle": "round,pad=0.18", "facecolor": fill, "edgecolor": colour, "linewidth": 1.0}
                centred(axes, *between(start, stop, 0.5), label, zorder=7, bbox=box)
    return finish(figure, name, _describe(run, words, last))


def _draw_strip(axes: Axes, held: HeldPieces, run: MessageLog, corner: Point, width: float) -> None:
    """What a rank holds: a cell per piece, filled in proportion to the ranks in its sum."""
    cell = width / run.ranks
    for piece in range(run.ranks):
        ranks = held.get(piece, frozenset())
        share = len(ranks) / run.ranks if run.sums else float(bool(ranks))
        left, full = corner[0] + piece * cell, share * _STRIP
        rectangle(axes, left, corner[1], cell, _STRIP, EMPTY, linewidth=0, zorder=2)
        top, fill = corner[1] + _STRIP - full, rank_colour(piece)
        rectangle(axes, left, top, cell, full, fill, linewidth=0, zorder=3)
        line, order = (1.8, 5) if share == 1 else (0.7, 4)
        label = str(piece) if ranks and cell >= 12 else ""
        frame = (left, corner[1], cell, _STRIP)
        picture.tile(axes, frame, "none", label, min(11, cell / 1.7), linewidth=line, zorder=order)


def _paths(message: Message, ranks: int) -> list[tuple[Point, Point]]:
    """The arrow's lines: one, or two if it leaves the card at one edge and comes in at the other."""
    here, there = message.sender, message.receiver
    high, low = _y(message.round - 1) + _STRIP - 2, _y(message.round) + 2
    if there != (here + 1) % ranks:
        return [((_x(ranks, here), high + 2), (_x(ranks, there), low - 2))]
    ends = (_x(ranks, here, 1), high), (_x(ranks, there, 0), low)
    if here < ranks - 1:
        return [ends]
    middle = (high + low) / 2
    return [(ends[0], (ends[0][0] + 40, middle)), ((ends[1][0] - 40, middle), ends[1])]


def _describe(run: MessageLog, heading: tuple[str, str], last: int) -> str:
    """The ladder in words: each round's messages, and which of them were never received."""
    said = [": ".join(heading)]
    for row in range(1, last + 1):
        sent = [_say(message, run.sums) for message in run.messages if message.round == row]
        said.append(f"Round {row}: {'; '.join(sent)}.")
    if not run.sums:
        ends = enumerate(holdings_after(run.start, run.messages, last))
        said.append(f"Pieces held then: {', '.join(f'rank {rank} {len(held)}' for rank, held in ends)}.")
    return " ".join(said)


def _say(message: Message, sums: bool) -> str:
    parts = f", {len(message.content.ranks)} summed" if sums and message.content else ""
    return f"{message}{parts}{', and no rank receives it' if message.stop is None else ''}"


def explore_sum(run: MessageLog, live: bool = True) -> Shell | Picture:
    def draw(moment: int) -> Picture:
        return draw_ladder(run, SUM, f"collectives-sum-{moment}", moment)

    return play(draw, run.rounds, draw_ladder(run, SUM, "collectives-sum"), live, interval=900)


def picture_of_wire(wire: LinkSpeed, sizes: Sequence[int], seconds: Sequence[float]) -> Picture:
    """A message's time by its bytes, both logarithmic: measurements as dots, the model as a line."""
    figure = card(640, 400)
    title = "One message between two ranks of your machine"
    axes = style(figure.add_subplot(), title, "bytes of the message", "microseconds")
    grid = np.geomspace(sizes[0], sizes[-1], 80)
    model = [wire.seconds(size) * 1e6 for size in grid]
    axes.loglog(grid, model, color=INK, label="latency + bytes / bandwidth")
    axes.axhline(wire.latency * 1e6, linestyle="--", color=QUIET, linewidth=1, label="latency alone")
    axes.loglog(sizes, np.asarray(seconds) * 1e6, "o", color=OTHER, label="measured")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, place: f"{value:,.0f}")
        axis.set_minor_formatter(lambda value, place: "")
        axis.label.set_fontsize(11)
    axes.set_xticks([10.0, 1e3, 1e5, 1e7])
    axes.title.set_fontsize(13)
    axes.tick_params(labelsize=11)
    axes.legend(fontsize=11, frameon=False)
    figure.tight_layout()
    said = "; ".join(f"{size:,} bytes {time * 1e6:.0f} µs" for size, time in zip(sizes, seconds, strict=True))
    words = f"latency {wire.latency * 1e6:.0f} µs, bandwidth {wire.bandwidth / 1e9:.2f} GB/s"
    return finish(figure, "collectives-wire", f"{title}: {said}. The model: {words}.")
