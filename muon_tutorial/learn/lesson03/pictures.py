"""Pictures of lesson 03: messages over time, a lane for each rank; and time by bytes of a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch

from ..pictures.picture import (
    ALARM,
    EMPTY,
    INK,
    QUIET,
    Picture,
    blank,
    finish,
    holder_colour,
    rectangle,
    write,
)
from ..pictures.spectra import BLUE, card, style
from ..widgets.shell import Shell, show, slider
from . import messages
from .link_speed import LinkSpeed
from .messages import HeldPieces, Message, holdings_after
from .on_ranks import CollectiveRun

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 92, 44, 78, 62, 24


@dataclass(frozen=True, slots=True)
class Ladder:
    """A run to be drawn: what it is called, what each rank held at first, and the messages that followed.

    ``phases`` are the names of its parts, and how many rounds each takes; ``wrong`` is a message to mark.
    """

    title: str
    what: str
    start: tuple[HeldPieces, ...]
    messages: tuple[Message, ...]
    phases: tuple[tuple[str, int], ...] = ()
    wrong: Message | None = None

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return max((message.round for message in self.messages), default=0)

    @property
    def sums(self) -> bool:
        """Whether pieces are summed: then every rank begins with all of them."""
        return len(self.start) > 1 and all(len(held) == len(self.start) for held in self.start)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Where things stand, in pixels."""

    count: int

    @property
    def pitch(self) -> float:
        return (900 - _LEFT - _RIGHT) / self.count

    @property
    def width(self) -> float:
        return min(132.0, self.pitch * 0.6)

    def left(self, rank: int) -> float:
        return _LEFT + self.pitch * (rank + 0.5) - self.width / 2

    def right(self, rank: int) -> float:
        return self.left(rank) + self.width

    def middle(self, rank: int) -> float:
        return self.left(rank) + self.width / 2

    @staticmethod
    def top(row: int) -> float:
        return _TOP + 22 + row * _ROW


def draw_ladder(story: Ladder, last: int | None = None, name: str = "ladder") -> Picture:
    """What each rank holds after every round, and the messages in between; rounds after ``last`` are open."""
    last = story.rounds if last is None else last
    lanes = _Lanes(len(story.start))
    figure, axes = blank(900, round(lanes.top(story.rounds) + _STRIP + 22))
    write(axes, 16, 22, story.title, 11.5, weight="bold")
    axes.text(16, 40, story.what, size=9, va="top", color=QUIET, linespacing=1.35)
    _draw_lanes(axes, story, lanes)
    for row in range(last + 1):
        for rank, held in enumerate(holdings_after(story.start, story.messages, row)):
            _draw_strip(axes, held, story, (lanes.left(rank), lanes.top(row)), lanes.width)
    for message in story.messages:
        if message.round <= last:
            _draw_message(axes, message, story, lanes)
    return finish(figure, name, describe(story, last))


def _draw_lanes(axes: Axes, story: Ladder, lanes: _Lanes) -> None:
    ends = [lanes.top(0), lanes.top(story.rounds) + _STRIP]
    for rank in range(lanes.count):
        x = lanes.middle(rank)
        axes.plot([x, x], ends, color=EMPTY, linewidth=2, zorder=1)
        write(axes, x, _TOP + 8, f"rank {rank}", 9.5, ha="center")
    for row in range(story.rounds):
        label = f"round {row + 1}"
        write(axes, 16, lanes.top(row) + _STRIP / 2 + _ROW / 2, label, 9, color=QUIET)
    begun = 0
    for phase, rounds in story.phases:
        axes.text(16, lanes.top(begun) + 12, phase, size=9, weight="bold", va="center", color=INK, zorder=6)
        begun += rounds


def _draw_strip(
    axes: Axes, held: HeldPieces, story: Ladder, corner: tuple[float, float], width: float
) -> None:
    count = len(story.start)
    cell = width / count
    for piece in range(count):
        ranks = held.get(piece, frozenset())
        share = len(ranks) / count if story.sums else float(bool(ranks))
        left = corner[0] + piece * cell
        label = "" if not ranks or cell < 9 else str(len(ranks)) if story.sums else str(piece)
        line, order = (1.8, 4) if share == 1 else (0.7, 3)
        rectangle(axes, left, corner[1], cell, _STRIP, _tint(piece, share), linewidth=line, zorder=order)
        middle = (left + cell / 2, corner[1] + _STRIP / 2)
        write(axes, *middle, label, min(9.5, cell / 1.7), ha="center", zorder=6)


def _tint(piece: int, share: float) -> tuple[float, ...]:
    """A piece's colour, the paler the less of the sum is in it; grey where there is nothing."""
    if not share:
        return to_rgb(EMPTY)
    strength = 0.25 + 0.75 * share**2
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(holder_colour(piece)))


def _draw_message(axes: Axes, message: Message, story: Ladder, lanes: _Lanes) -> None:
    lost = message.stop is None
    colour = ALARM if lost or message == story.wrong else INK
    for start, stop in _paths(message, lanes):
        if lost:
            stop = _between(start, stop, 0.55)
            axes.text(*stop, "✕", size=13, ha="center", va="center", color=ALARM, zorder=8)
        _draw_arrow(axes, start, stop, colour, "--" if lost else "-")
        _draw_label(axes, message, _between(start, stop, 0.5), colour)


def _draw_arrow(axes: Axes, start: Point, stop: Point, colour: str, line: str) -> None:
    look: Any = {
        "color": colour,
        "linestyle": line,
        "linewidth": 1.3,
        "shrinkA": 0,
        "shrinkB": 0,
        "zorder": 5,
    }
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=11, **look))


def _draw_label(axes: Axes, message: Message, where: Point, edge: str) -> None:
    """The number of the piece that travels; a question mark where it is none."""
    piece = None if message.content is None else message.content.piece
    box = {
        "boxstyle": "round,pad=0.25",
        "facecolor": EMPTY if piece is None else holder_colour(piece),
        "edgecolor": edge,
        "linewidth": 1.0,
    }
    label = "?" if piece is None else str(piece)
    axes.text(*where, label, size=8.5, ha="center", va="center", color=INK, zorder=7, bbox=box)


def _between(start: Point, stop: Point, share: float) -> Point:
    return start[0] + share * (stop[0] - start[0]), start[1] + share * (stop[1] - start[1])


def _paths(message: Message, lanes: _Lanes) -> list[tuple[Point, Point]]:
    """Where the arrow runs. Between the last lane and the first it leaves the card and comes in again."""
    here, there, last = message.sender, message.receiver, lanes.count - 1
    high, low = lanes.top(message.round - 1) + _STRIP - 2, lanes.top(message.round) + 2
    if there == (here + 1) % lanes.count and here != last:
        return [((lanes.right(here), high), (lanes.left(there), low))]
    if there == (here + 1) % lanes.count:
        middle = (high + low) / 2
        return [
            ((lanes.right(last), high), (lanes.right(last) + 40, middle)),
            ((lanes.left(0) - 40, middle), (lanes.left(0), low)),
        ]
    return [((lanes.middle(here), high + 2), (lanes.middle(there), low - 2))]


def describe(story: Ladder, last: int) -> str:
    """The ladder in words: each round's messages, and which of them nobody received."""
    said = [f"{story.title}: {story.what}".replace("\n", " ")]
    for row in range(1, last + 1):
        sent = [message for message in story.messages if message.round == row]
        said.append(f"Round {row}: " + "; ".join(_say(message, story) for message in sent) + ".")
    ends = holdings_after(story.start, story.messages, last)
    full = [f"rank {rank} {len(held)}" for rank, held in enumerate(ends)]
    return " ".join(said) + (f" Pieces held then: {', '.join(full)}." if not story.sums else "")


def _say(message: Message, story: Ladder) -> str:
    content = message.content
    parts = f", {len(content.ranks)} summed" if story.sums and content else ""
    lost = ", and nobody receives it" if message.stop is None else ""
    return f"{message}{parts}{lost}"


def draw_clock(story: Ladder, name: str = "clock") -> Picture:
    """The same messages against the clock: from the call that sends to the moment the receiver has it."""
    lanes, height = _Lanes(len(story.start)), 360.0
    figure, axes = blank(900, round(_TOP + height + 60))
    done = [message for message in story.messages if message.stop is not None]
    span = max((message.stop or 0.0 for message in done), default=1.0) or 1.0
    write(axes, 16, 22, "The same run against the clock", 11.5, weight="bold")
    axes.text(16, 40, "from the call that sends, to the receiver having it", size=9, va="top", color=QUIET)
    for tick in range(5):
        y = _TOP + 26 + height * tick / 4
        axes.plot([_LEFT - 10, 890], [y, y], color=EMPTY, linewidth=1, zorder=0)
        write(axes, 16, y, f"{span * 1e3 * tick / 4:.2f} ms", 9, color=QUIET)
    for rank in range(lanes.count):
        x = lanes.middle(rank)
        axes.plot([x, x], [_TOP + 26, _TOP + 26 + height], color=QUIET, linewidth=1, zorder=1)
        write(axes, x, _TOP + 8, f"rank {rank}", 9.5, ha="center")
    for message in done:
        _draw_timed(axes, message, lanes, height / span)
    return finish(figure, name, _describe_times(done, span))


def _draw_timed(axes: Axes, message: Message, lanes: _Lanes, scale: float) -> None:
    start = (lanes.middle(message.sender), _TOP + 26 + message.start * scale)
    stop = (lanes.middle(message.receiver), _TOP + 26 + (message.stop or 0.0) * scale)
    _draw_arrow(axes, start, stop, INK, "-")
    _draw_label(axes, message, _between(start, stop, 0.3), INK)


def _describe_times(messages: Sequence[Message], span: float) -> str:
    times = [
        f"{message}, from {message.start * 1e3:.2f} to {1e3 * (message.stop or 0):.2f} ms"
        for message in messages
    ]
    return f"The same run against the clock, {span * 1e3:.2f} ms in all. {'; '.join(times)}."


def story_of(run: CollectiveRun, title: str, what: str, phases: Sequence[tuple[str, int]] = ()) -> Ladder:
    """A run as its picture tells it; the first message that brings nothing new is marked."""
    found = run.messages
    wrong = messages.first_repeat(run.start, found)
    return Ladder(title, what, run.start, tuple(found), tuple(phases), wrong)


def gather_story(run: CollectiveRun) -> Ladder:
    """An all_gather, to be drawn."""
    what = "a strip shows what a rank holds: grey is nothing yet, 0 is what rank 0 brought, and so on"
    return story_of(run, "all_gather, message by message", what)


def sum_story(run: CollectiveRun) -> Ladder:
    """An all_reduce, to be drawn: its two halves are named."""
    rounds = max((message.round for message in run.messages), default=0)
    half = run.ranks - 1
    what = "on an arrow, which piece travels; in a strip, one cell a piece: how many ranks are in its sum"
    phases = (("reduce_\nscatter", half), ("all_\ngather", half)) if rounds == 2 * half else ()
    return story_of(run, "all_reduce, message by message", what, phases)


def picture_of_gather(run: CollectiveRun, name: str = "lesson03-gather") -> Picture:
    """The ladder of an all_gather."""
    return draw_ladder(gather_story(run), name=name)


def picture_of_clock(run: CollectiveRun) -> Picture:
    """The same messages against the clock."""
    return draw_clock(gather_story(run), "lesson03-clock")


def explore_sum(run: CollectiveRun, live: bool = True) -> Shell | Picture:
    """A slider through the rounds of an all_reduce."""
    story = sum_story(run)

    def draw(last: int) -> Picture:
        return draw_ladder(story, last, f"lesson03-sum-{last}")

    still = draw_ladder(story, name="lesson03-sum")
    return show(draw, still, live, last=slider("round", last=story.rounds))


def picture_of_wire(wire: LinkSpeed, sizes: Sequence[int], seconds: Sequence[float]) -> Picture:
    """Time by bytes, both logarithmic: measured dots, and the model's line."""
    figure = card(760, 400)
    title = "One message between rank 0 and rank 1 of your machine"
    axes = style(figure.add_subplot(), title, "bytes of the message", "microseconds")
    grid = np.geomspace(sizes[0], sizes[-1], 80)
    model = [wire.seconds(size) * 1e6 for size in grid]
    axes.loglog(grid, model, color=INK, label="latency + bytes / bandwidth")
    axes.axhline(wire.latency * 1e6, linestyle="--", color=QUIET, linewidth=1, label="latency alone")
    axes.loglog(sizes, np.asarray(seconds) * 1e6, "o", color=BLUE, label="measured")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, place: "")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
    axes.legend(fontsize=8.5, frameon=False)
    figure.tight_layout()
    said = "; ".join(f"{size:,} bytes {time * 1e6:.0f} µs" for size, time in zip(sizes, seconds, strict=True))
    words = f"latency {wire.latency * 1e6:.0f} µs, bandwidth {wire.bandwidth / 1e9:.2f} GB/s"
    return finish(figure, "lesson03-wire", f"{title}: {said}. The model: {words}.")
