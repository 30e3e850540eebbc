"""Pictures of lesson 03: messages over time, a lane for each rank; and time by bytes of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..pictures.colours import EMPTY, INK, OTHER, QUIET, WRONG, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..pictures.spectra import card, style
from ..widgets.play import play
from ..widgets.shell import Shell
from .link_speed import LinkSpeed
from .messages import HeldPieces, Message, MessageLog, first_repeat, holdings_after, of_ring_all_reduce
from .on_ranks import ITEM, NUMEL, CollectiveRun

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 126, 46, 84, 62, 30
GATHER = (
    "all_gather, message by message",
    "a digit is a piece, named for the rank that brings it; grey: not here yet",
)
SUM = (
    "all_reduce, message by message",
    "a digit is a piece; a full cell has every rank's entries in its sum",
)


def _pitch(ranks: int) -> float:
    """From one lane to the next, in pixels."""
    return min(116.0, (900 - _LEFT - _RIGHT) / ranks)


def _across(ranks: int) -> int:
    """How wide a ladder is, in pixels."""
    return round(max(_LEFT + _RIGHT + _pitch(ranks) * ranks, 540))


def _x(ranks: int, rank: int, share: float = 0.5) -> float:
    """The middle of a rank's lane; with a share of 0, its left edge, with 1 its right one."""
    return _LEFT + _pitch(ranks) * (rank + 0.5 + 0.76 * (share - 0.5))


def _y(row: int) -> float:
    """The top of the strips that show what is held after a round."""
    return _TOP + 22 + row * _ROW


def hero() -> Picture:
    """The first picture of the lesson: an all_reduce on a ring."""
    ranks = 4
    start = tuple({piece: frozenset({rank}) for piece in range(ranks)} for rank in range(ranks))
    sent = of_ring_all_reduce(ranks, NUMEL * ITEM)
    return draw_messages(MessageLog(ranks, start, sent), SUM, "collectives-hero")


def draw_ladder(run: CollectiveRun, heading: tuple[str, str], name: str, last: int | None = None) -> Picture:
    """The ladder of a run on real ranks."""
    return draw_messages(run.log, heading, name, last)


def draw_messages(run: MessageLog, heading: tuple[str, str], name: str, last: int | None = None) -> Picture:
    """What each rank holds after every round, and the messages in between; rounds after ``last`` are open.

    The two halves of an all_reduce are named, and the first message that brings nothing new is marked.
    """
    last = run.rounds if last is None else last
    figure, axes = blank(_across(run.ranks), round(_y(run.rounds) + _STRIP + 16))
    write(axes, 16, 22, heading[0], 13.5, weight="bold")
    write(axes, 16, 48, heading[1], 10.5, color=QUIET)
    _draw_lanes(axes, run.ranks, _y(0), _y(run.rounds) + _STRIP, color=EMPTY, linewidth=2)
    for row in range(run.rounds):
        write(axes, 12, _y(row) + _STRIP / 2 + _ROW / 2, f"round {row + 1}", 11, color=QUIET)
    if heading == SUM and run.rounds == 2 * (half := run.ranks - 1):
        for begun, phase in ((0, "reduce_\nscatter"), (half, "all_\ngather")):
            write(axes, 12, _y(begun) + 12, phase, 11, weight="bold", zorder=6)
    for row in range(last + 1):
        for rank, held in enumerate(holdings_after(run.start, run.messages, row)):
            _draw_strip(axes, held, run, (_x(run.ranks, rank, 0), _y(row)), 0.76 * _pitch(run.ranks))
    wrong = first_repeat(run.start, run.messages)
    for message in run.messages:
        if message.round <= last:
            _draw_message(axes, message, message.stop is None or message == wrong, run.ranks)
    return finish(figure, name, _describe(run, heading, last))


def _draw_lanes(axes: Axes, ranks: int, top: float, bottom: float, **line: Any) -> None:
    for rank in range(ranks):
        axes.plot([_x(ranks, rank)] * 2, [top, bottom], zorder=1, **line)
        write(axes, _x(ranks, rank), _TOP + 8, f"rank {rank}", 11, ha="center", weight="bold")


def _draw_strip(axes: Axes, held: HeldPieces, run: MessageLog, corner: Point, width: float) -> None:
    """What a rank holds: a cell for each piece, the fuller the more ranks are in its sum."""
    cell = width / run.ranks
    for piece in range(run.ranks):
        ranks = held.get(piece, frozenset())
        share = len(ranks) / run.ranks if run.sums else float(bool(ranks))
        left, full = corner[0] + piece * cell, share * _STRIP
        rectangle(axes, left, corner[1], cell, _STRIP, EMPTY, linewidth=0, zorder=2)
        rectangle(
            axes, left, corner[1] + _STRIP - full, cell, full, rank_colour(piece), linewidth=0, zorder=3
        )
        line, order = (1.8, 5) if share == 1 else (0.7, 4)
        axes.add_patch(
            Rectangle(
                (left, corner[1]), cell, _STRIP, fill=False, edgecolor=INK, linewidth=line, zorder=order
            )
        )
        label = str(piece) if ranks and cell >= 12 else ""
        write(
            axes, left + cell / 2, corner[1] + _STRIP / 2, label, min(11, cell / 1.7), ha="center", zorder=6
        )


def _draw_message(axes: Axes, message: Message, wrong: bool, ranks: int) -> None:
    lost, colour = message.stop is None, WRONG if wrong else INK
    for start, stop in _paths(message, ranks):
        if lost:
            stop = _between(start, stop, 0.55)
            write(axes, *stop, "✕", 13, ha="center", color=WRONG, zorder=8)
        _draw_arrow(axes, start, stop, colour, "--" if lost else "-")
        _draw_label(axes, message, _between(start, stop, 0.5), colour)


def _draw_arrow(axes: Axes, start: Point, stop: Point, colour: str, line: str) -> None:
    look: Any = {"color": colour, "linestyle": line, "linewidth": 1.3, "mutation_scale": 11}
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", shrinkA=0, shrinkB=0, zorder=5, **look))


def _draw_label(axes: Axes, message: Message, where: Point, edge: str) -> None:
    """The number of the piece that travels; a question mark where it is none."""
    label, fill = "?", EMPTY
    if message.content is not None:
        label, fill = str(message.content.piece), rank_colour(message.content.piece)
    box = {"boxstyle": "round,pad=0.18", "facecolor": fill, "edgecolor": edge, "linewidth": 1.0}
    write(axes, *where, label, 11, ha="center", zorder=7, bbox=box)


def _between(start: Point, stop: Point, share: float) -> Point:
    return start[0] + share * (stop[0] - start[0]), start[1] + share * (stop[1] - start[1])


def _paths(message: Message, ranks: int) -> list[tuple[Point, Point]]:
    """Where the arrow runs. Between the last lane and the first it leaves the card and comes in again."""
    here, there, last = message.sender, message.receiver, ranks - 1
    high, low = _y(message.round - 1) + _STRIP - 2, _y(message.round) + 2
    if there != (here + 1) % ranks:
        return [((_x(ranks, here), high + 2), (_x(ranks, there), low - 2))]
    ends = (_x(ranks, here, 1), high), (_x(ranks, there, 0), low)
    if here != last:
        return [ends]
    middle = (high + low) / 2
    return [(ends[0], (ends[0][0] + 40, middle)), ((ends[1][0] - 40, middle), ends[1])]


def _describe(run: MessageLog, heading: tuple[str, str], last: int) -> str:
    """The ladder in words: each round's messages, and which of them nobody received."""
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
    return f"{message}{parts}{', and nobody receives it' if message.stop is None else ''}"


def picture_of_gather(run: CollectiveRun, name: str = "collectives-gather") -> Picture:
    """The ladder of an all_gather."""
    return draw_ladder(run, GATHER, name)


def explore_sum(run: CollectiveRun, live: bool = True) -> Shell | Picture:
    """The rounds of an all_reduce as a film."""

    def draw(moment: int) -> Picture:
        return draw_ladder(run, SUM, f"collectives-sum-{moment}", moment)

    still = draw_ladder(run, SUM, "collectives-sum")
    return play(draw, run.log.rounds, still, live, label="moment", interval=900)


def picture_of_wire(wire: LinkSpeed, sizes: Sequence[int], seconds: Sequence[float]) -> Picture:
    """Time by bytes, both logarithmic: measured dots, and the model's line."""
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
