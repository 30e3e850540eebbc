"""Pictures of lesson 03: messages over time, a lane for each rank; and time by bytes of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch

from ..pictures.colours import ADAMW, EMPTY, INK, QUIET, WRONG, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..pictures.spectra import card, style
from ..widgets.shell import Shell, show, slider
from .link_speed import LinkSpeed
from .messages import HeldPieces, Message, first_repeat, holdings_after
from .on_ranks import CollectiveRun

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 92, 44, 78, 62, 24
GATHER = (
    "all_gather, message by message",
    "a strip shows what a rank holds: grey is nothing yet, 0 is what rank 0 brought, and so on",
)
SUM = (
    "all_reduce, message by message",
    "on an arrow, which piece travels; in a strip, one cell a piece: how many ranks are in its sum",
)


def _width(ranks: int) -> float:
    """How wide a lane is, in pixels."""
    return min(132.0, (900 - _LEFT - _RIGHT) / ranks * 0.6)


def _x(ranks: int, rank: int, share: float = 0.5) -> float:
    """The middle of a rank's lane; with a share of 0, its left edge, with 1 its right one."""
    left = _LEFT + (900 - _LEFT - _RIGHT) / ranks * (rank + 0.5) - _width(ranks) / 2
    return left + share * _width(ranks)


def _y(row: int) -> float:
    """The top of the strips that show what is held after a round."""
    return _TOP + 22 + row * _ROW


def draw_ladder(run: CollectiveRun, heading: tuple[str, str], name: str, last: int | None = None) -> Picture:
    """What each rank holds after every round, and the messages in between; rounds after ``last`` are open.

    The two halves of an all_reduce are named, and the first message that brings nothing new is marked.
    """
    last = run.rounds if last is None else last
    figure, axes = blank(900, round(_y(run.rounds) + _STRIP + 22))
    _write_heading(axes, *heading, linespacing=1.35)
    _draw_lanes(axes, run.ranks, _y(0), _y(run.rounds) + _STRIP, color=EMPTY, linewidth=2)
    for row in range(run.rounds):
        write(axes, 16, _y(row) + _STRIP / 2 + _ROW / 2, f"round {row + 1}", 9, color=QUIET)
    if heading == SUM and run.rounds == 2 * (half := run.ranks - 1):
        for begun, phase in ((0, "reduce_\nscatter"), (half, "all_\ngather")):
            write(axes, 16, _y(begun) + 12, phase, 9, weight="bold", zorder=6)
    for row in range(last + 1):
        for rank, held in enumerate(holdings_after(run.start, run.messages, row)):
            _draw_strip(axes, held, run, (_x(run.ranks, rank, 0), _y(row)), _width(run.ranks))
    wrong = first_repeat(run.start, run.messages)
    for message in run.messages:
        if message.round <= last:
            _draw_message(axes, message, message.stop is None or message == wrong, run.ranks)
    return finish(figure, name, _describe(run, heading, last))


def _write_heading(axes: Axes, title: str, what: str, **look: Any) -> None:
    write(axes, 16, 22, title, 11.5, weight="bold")
    write(axes, 16, 40, what, 9, va="top", color=QUIET, **look)


def _draw_lanes(axes: Axes, ranks: int, top: float, bottom: float, **line: Any) -> None:
    for rank in range(ranks):
        axes.plot([_x(ranks, rank)] * 2, [top, bottom], zorder=1, **line)
        write(axes, _x(ranks, rank), _TOP + 8, f"rank {rank}", 9.5, ha="center")


def _draw_strip(axes: Axes, held: HeldPieces, run: CollectiveRun, corner: Point, width: float) -> None:
    cell = width / run.ranks
    for piece in range(run.ranks):
        ranks = held.get(piece, frozenset())
        share = len(ranks) / run.ranks if run.sums else float(bool(ranks))
        left = corner[0] + piece * cell
        label = "" if not ranks or cell < 9 else str(len(ranks)) if run.sums else str(piece)
        line, order = (1.8, 4) if share == 1 else (0.7, 3)
        rectangle(axes, left, corner[1], cell, _STRIP, _tint(piece, share), linewidth=line, zorder=order)
        middle = (left + cell / 2, corner[1] + _STRIP / 2)
        write(axes, *middle, label, min(9.5, cell / 1.7), ha="center", zorder=6)


def _tint(piece: int, share: float) -> tuple[float, ...]:
    """A piece's colour, the paler the less of the sum is in it; grey where there is nothing."""
    if not share:
        return to_rgb(EMPTY)
    strength = 0.25 + 0.75 * share**2
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(rank_colour(piece)))


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
    box = {"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": edge, "linewidth": 1.0}
    write(axes, *where, label, 8.5, ha="center", zorder=7, bbox=box)


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


def _describe(run: CollectiveRun, heading: tuple[str, str], last: int) -> str:
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


def picture_of_clock(run: CollectiveRun) -> Picture:
    """The same messages against the clock: from the call that sends to the moment the receiver has it."""
    height = 360.0
    figure, axes = blank(900, round(_TOP + height + 60))
    done = [(message, message.stop) for message in run.messages if message.stop is not None]
    span = max((stop for _, stop in done), default=1.0) or 1.0
    title, top = "The same run against the clock", _TOP + 26
    _write_heading(axes, title, "from the call that sends, to the receiver having it")
    for tick in range(5):
        y = top + height * tick / 4
        axes.plot([_LEFT - 10, 890], [y, y], color=EMPTY, linewidth=1, zorder=0)
        write(axes, 16, y, f"{span * 1e3 * tick / 4:.2f} ms", 9, color=QUIET)
    _draw_lanes(axes, run.ranks, top, top + height, color=QUIET, linewidth=1)
    said = []
    for message, stop in done:
        begin = (_x(run.ranks, message.sender), top + message.start * (height / span))
        end = (_x(run.ranks, message.receiver), top + stop * (height / span))
        _draw_arrow(axes, begin, end, INK, "-")
        _draw_label(axes, message, _between(begin, end, 0.3), INK)
        said.append(f"{message}, from {message.start * 1e3:.2f} to {1e3 * stop:.2f} ms")
    return finish(
        figure,
        "collectives-clock",
        f"{title}, {span * 1e3:.2f} ms in all. {'; '.join(said)}.",
    )


def picture_of_gather(run: CollectiveRun, name: str = "collectives-gather") -> Picture:
    """The ladder of an all_gather."""
    return draw_ladder(run, GATHER, name)


def explore_sum(run: CollectiveRun, live: bool = True) -> Shell | Picture:
    """A slider through the rounds of an all_reduce."""

    def draw(last: int) -> Picture:
        return draw_ladder(run, SUM, f"collectives-sum-{last}", last)

    still = draw_ladder(run, SUM, "collectives-sum")
    return show(draw, still, live, last=slider("round", last=run.rounds))


def picture_of_wire(wire: LinkSpeed, sizes: Sequence[int], seconds: Sequence[float]) -> Picture:
    """Time by bytes, both logarithmic: measured dots, and the model's line."""
    figure = card(760, 400)
    title = "One message between rank 0 and rank 1 of your machine"
    axes = style(figure.add_subplot(), title, "bytes of the message", "microseconds")
    grid = np.geomspace(sizes[0], sizes[-1], 80)
    model = [wire.seconds(size) * 1e6 for size in grid]
    axes.loglog(grid, model, color=INK, label="latency + bytes / bandwidth")
    axes.axhline(wire.latency * 1e6, linestyle="--", color=QUIET, linewidth=1, label="latency alone")
    axes.loglog(sizes, np.asarray(seconds) * 1e6, "o", color=ADAMW, label="measured")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, place: "")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.legend(fontsize=8.5, frameon=False)
    figure.tight_layout()
    said = "; ".join(f"{size:,} bytes {time * 1e6:.0f} µs" for size, time in zip(sizes, seconds, strict=True))
    words = f"latency {wire.latency * 1e6:.0f} µs, bandwidth {wire.bandwidth / 1e9:.2f} GB/s"
    return finish(figure, "collectives-wire", f"{title}: {said}. The model: {words}.")
