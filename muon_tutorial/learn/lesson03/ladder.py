"""Pictures of messages over time: a lane a rank, a rung a message. Pure functions to one ``Picture``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..pictures.picture import EMPTY, INK, QUIET, Picture, blank, finish, holder_colour
from .messages import Held, Message, holdings_after

ALARM = "#b00020"
Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 92, 44, 78, 62, 24


@dataclass(frozen=True, slots=True)
class Story:
    """A run to be drawn: what it is called, what each rank held at first, and the messages that followed.

    ``phases`` are the names of its parts, and how many rounds each takes; ``wrong`` is a message to mark.
    """

    title: str
    what: str
    start: tuple[Held, ...]
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


def draw_ladder(story: Story, last: int | None = None, name: str = "ladder") -> Picture:
    """What each rank holds after every round, and the messages in between; rounds after ``last`` are open."""
    last = story.rounds if last is None else last
    lanes = _Lanes(len(story.start))
    figure, axes = blank(900, round(lanes.top(story.rounds) + _STRIP + 22))
    axes.text(16, 22, story.title, size=11.5, weight="bold", va="center", color=INK)
    axes.text(16, 40, story.what, size=9, va="top", color=QUIET, linespacing=1.35)
    _draw_lanes(axes, story, lanes)
    for row in range(last + 1):
        for rank, held in enumerate(holdings_after(story.start, story.messages, row)):
            _draw_strip(axes, held, story, (lanes.left(rank), lanes.top(row)), lanes.width)
    for message in story.messages:
        if message.round <= last:
            _draw_message(axes, message, story, lanes)
    return finish(figure, name, describe(story, last))


def _draw_lanes(axes: Axes, story: Story, lanes: _Lanes) -> None:
    ends = [lanes.top(0), lanes.top(story.rounds) + _STRIP]
    for rank in range(lanes.count):
        x = lanes.middle(rank)
        axes.plot([x, x], ends, color=EMPTY, linewidth=2, zorder=1)
        axes.text(x, _TOP + 8, f"rank {rank}", size=9.5, ha="center", va="center", color=INK)
    for row in range(story.rounds):
        label = f"round {row + 1}"
        axes.text(16, lanes.top(row) + _STRIP / 2 + _ROW / 2, label, size=9, va="center", color=QUIET)
    begun = 0
    for phase, rounds in story.phases:
        axes.text(16, lanes.top(begun) + 12, phase, size=9, weight="bold", va="center", color=INK, zorder=6)
        begun += rounds


def _draw_strip(axes: Axes, held: Held, story: Story, corner: tuple[float, float], width: float) -> None:
    count = len(story.start)
    cell = width / count
    for piece in range(count):
        ranks = held.get(piece, frozenset())
        share = len(ranks) / count if story.sums else float(bool(ranks))
        left = corner[0] + piece * cell
        label = "" if not ranks or cell < 9 else str(len(ranks)) if story.sums else str(piece)
        _draw_cell(axes, (left, corner[1]), cell, _tint(piece, share), label, full=share == 1)


def _draw_cell(
    axes: Axes, corner: Point, width: float, fill: tuple[float, ...], label: str, full: bool
) -> None:
    line, order = (1.8, 4) if full else (0.7, 3)
    axes.add_patch(
        Rectangle(corner, width, _STRIP, facecolor=fill, edgecolor=INK, linewidth=line, zorder=order)
    )
    middle = (corner[0] + width / 2, corner[1] + _STRIP / 2)
    axes.text(*middle, label, size=min(9.5, width / 1.7), ha="center", va="center", color=INK, zorder=6)


def _tint(piece: int, share: float) -> tuple[float, ...]:
    """A piece's colour, the paler the less of the sum is in it; grey where there is nothing."""
    if not share:
        return to_rgb(EMPTY)
    strength = 0.25 + 0.75 * share**2
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(holder_colour(piece)))


def _draw_message(axes: Axes, message: Message, story: Story, lanes: _Lanes) -> None:
    lost = message.stop is None
    colour = ALARM if lost or message == story.wrong else INK
    for start, stop in _paths(message, lanes):
        if lost:
            stop = _between(start, stop, 0.55)
            axes.text(*stop, "✕", size=13, ha="center", va="center", color=ALARM, zorder=8)
        _draw_arrow(axes, start, stop, colour, "--" if lost else "-")
        _draw_label(axes, message, _between(start, stop, 0.5), colour)


def _draw_arrow(axes: Axes, start: Point, stop: Point, colour: str, line: str) -> None:
    arrow = FancyArrowPatch(
        start, stop, arrowstyle="-|>", mutation_scale=11, color=colour, linestyle=line, linewidth=1.3,
        shrinkA=0, shrinkB=0, zorder=5,
    )  # fmt: skip
    axes.add_patch(arrow)


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


def describe(story: Story, last: int) -> str:
    """The ladder in words: each round's messages, and which of them nobody received."""
    said = [f"{story.title}: {story.what}".replace("\n", " ")]
    for row in range(1, last + 1):
        sent = [message for message in story.messages if message.round == row]
        said.append(f"Round {row}: " + "; ".join(_say(message, story) for message in sent) + ".")
    ends = holdings_after(story.start, story.messages, last)
    full = [f"rank {rank} {len(held)}" for rank, held in enumerate(ends)]
    return " ".join(said) + (f" Pieces held then: {', '.join(full)}." if not story.sums else "")


def _say(message: Message, story: Story) -> str:
    content = message.content
    parts = f", {len(content.ranks)} summed" if story.sums and content else ""
    lost = ", and nobody receives it" if message.stop is None else ""
    return f"{message}{parts}{lost}"


def draw_clock(story: Story, name: str = "clock") -> Picture:
    """The same messages against the clock: from the call that sends to the moment the receiver has it."""
    lanes, height = _Lanes(len(story.start)), 360.0
    figure, axes = blank(900, round(_TOP + height + 60))
    done = [message for message in story.messages if message.stop is not None]
    span = max((message.stop or 0.0 for message in done), default=1.0) or 1.0
    axes.text(16, 22, "The same run against the clock", size=11.5, weight="bold", va="center", color=INK)
    axes.text(16, 40, "from the call that sends, to the receiver having it", size=9, va="top", color=QUIET)
    for tick in range(5):
        y = _TOP + 26 + height * tick / 4
        axes.plot([_LEFT - 10, 890], [y, y], color=EMPTY, linewidth=1, zorder=0)
        axes.text(16, y, f"{span * 1e3 * tick / 4:.2f} ms", size=9, va="center", color=QUIET)
    for rank in range(lanes.count):
        x = lanes.middle(rank)
        axes.plot([x, x], [_TOP + 26, _TOP + 26 + height], color=QUIET, linewidth=1, zorder=1)
        axes.text(x, _TOP + 8, f"rank {rank}", size=9.5, ha="center", va="center", color=INK)
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
