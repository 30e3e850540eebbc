"""Pictures of lesson 03: messages over time with a lane per rank, and a message's time by its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..pictures import picture
from ..pictures.colours import CARD, EMPTY, INK, OTHER, QUIET, RIGHT, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, Point, between, blank, centred, finish, heading, rectangle, write
from ..pictures.spectra import card, style
from ..widgets.shell import Shell, choice, play
from .messages import HeldPieces, Message, MessageLog, first_repeat, holdings_after, of_ring_all_reduce
from .on_ranks import EVERY, ITEM, NUMEL, SHORT, SWITCHES, First, LinkSpeed, Setting, SettingRuns, moments_of

_LEFT, _RIGHT, _TOP, _ROW, _STRIP = 126, 46, 84, 62, 30
_GREY = "a digit is a piece, named for the rank that brings it; grey: not here yet"
_FULL = "a digit is a piece; a full cell has every rank's entries in its sum"
GATHER, SUM = ("all_gather, message by message", _GREY), ("all_reduce, message by message", _FULL)


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
                line = "--" if lost else "-"
                look: Any = {"linestyle": line, "linewidth": 1.3, "mutation_scale": 11, **_TO_THE_END}
                picture.arrow(axes, start, stop, zorder=5, color=colour, **look)
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

    still = draw_ladder(run, SUM, "collectives-sum")
    return play(draw, run.rounds, still, live, interval=900)


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


_WIDE, _HIGH = 560, 420
_DASHED = "dashed: not sent yet · bold: passes just now"
_TO_THE_END: Any = {"shrinkA": 0, "shrinkB": 0}


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring of ranks with one setting of the switches, after ``moment`` moments, and where it is drawn."""

    setting: Setting
    moment: int
    left: float = 140
    right: float = 420

    @property
    def spots(self) -> tuple[tuple[float, float], ...]:
        """The ranks' places; messages go round clockwise."""
        return (self.left, 130), (self.right, 130), (self.right, 300), (self.left, 300)

    @property
    def now(self) -> list[int]:
        film = moments_of(self.setting)
        return film[self.moment - 1] if 0 < self.moment <= len(film) else []

    @property
    def done(self) -> list[int]:
        return [rank for passing in moments_of(self.setting)[: self.moment] for rank in passing]

    def state(self, rank: int) -> str:
        sent, received = rank in self.done, (rank - 1) % SWITCHES in self.done
        if sent and received:
            return "done"
        sending = not sent and (received or self.setting[rank] == "send")
        return f"sends to {(rank + 1) % SWITCHES}" if sending else f"waits for {(rank - 1) % SWITCHES}"


def explore_switches(runs: SettingRuns, live: bool = True) -> Shell | Picture:
    """A switch for each rank, and a film of the ring with these switches; below it, how real ranks ended."""
    options: dict[str, First] = {"send first": "send", "receive first": "receive"}
    knobs = {f"rank_{rank}": choice(f"rank {rank}", options, width=120) for rank in range(SWITCHES)}
    return play(partial(draw_setting, runs), SWITCHES, draw_flip(runs), live, interval=700, **knobs)


def draw_setting(runs: SettingRuns, moment: int, **firsts: First) -> Picture:
    """The ring after ``moment`` moments: which messages passed, what ranks do, and how real ranks ended."""
    ring = _Ring(tuple(firsts[f"rank_{rank}"] for rank in range(SWITCHES)), moment)
    figure, axes = blank(_WIDE, _HIGH)
    heading(axes, f"After {moment} moment{'s' * (moment != 1)}", _DASHED)
    _draw_ring(axes, ring, runs)
    return finish(figure, "collectives-switches", _say_ring(runs, ring))


def draw_flip(runs: SettingRuns) -> Picture:
    """Two rings half-way through their exchange: a deadlock, and the same ring with one switch flipped."""
    rings = _Ring(("send",) * 4, 2, 100, 330), _Ring(("receive", "send", "send", "send"), 2, 560, 790)
    figure, axes = blank(890, _HIGH)
    heading(axes, "After 2 moments: all send first, and the same with rank 0 flipped", _DASHED)
    for ring in rings:
        _draw_ring(axes, ring, runs)
    return finish(figure, "collectives-flip", " Beside it: ".join(_say_ring(runs, ring) for ring in rings))


def _draw_ring(axes: Axes, ring: _Ring, runs: SettingRuns) -> None:
    for rank in range(SWITCHES):
        start, stop = ring.spots[rank], ring.spots[(rank + 1) % SWITCHES]
        off = (78 if start[1] == stop[1] else 30) / math.dist(start, stop)
        ends = between(start, stop, off), between(start, stop, 1 - off)
        line, colour = ("-", INK) if rank in ring.done else ((0, (4, 3)), QUIET)
        look = {"linestyle": line, "linewidth": 3.4 if rank in ring.now else 1.6, **_TO_THE_END}
        picture.arrow(axes, *ends, mutation_scale=20, color=colour, **look)
    for rank, (x, y) in enumerate(ring.spots):
        rectangle(axes, x - 76, y - 27, 152, 54, rank_colour(rank), linewidth=1.4, zorder=4)
        centred(axes, x, y - 10, f"rank {rank}", 11.5, weight="bold", zorder=5)
        centred(axes, x, y + 12, ring.state(rank), zorder=5)
    frame = (ring.left - 88, 364, ring.right - ring.left + 176, 40)
    picture.verdict(axes, frame, _end(runs, ring.setting), runs.arrived[ring.setting], 11)


def _end(runs: SettingRuns, setting: Setting) -> str:
    if runs.arrived[setting]:
        return "on real processes, all messages arrived"
    return f"on real processes, all stood still for {SHORT:g} s"


def _say_ring(runs: SettingRuns, ring: _Ring) -> str:
    firsts = ", ".join(f"rank {rank} {first}" for rank, first in enumerate(ring.setting))
    passing = ", ".join(f"{rank} to {(rank + 1) % SWITCHES}" for rank in ring.now) or "none"
    states = ", ".join(f"rank {rank} {ring.state(rank)}" for rank in range(SWITCHES))
    now = f"After moment {ring.moment}, messages that pass just now: {passing}"
    return f"At first: {firsts}. {now}. {states}. In the end, {_end(runs, ring.setting)}."


def draw_every_setting(runs: SettingRuns) -> Picture:
    columns, wide, high, top = 4, 150, 118, 72
    figure, axes = blank(columns * wide + 16, top + high * (len(EVERY) // columns) + 8)
    title = f"All {len(EVERY)} settings of the switches, on real processes"
    heading(axes, title, "S: sends first · R: receives first")
    for number, setting in enumerate(EVERY):
        left, y = 16 + number % columns * wide, top + number // columns * high
        right = runs.arrived[setting]
        edge, fill = (RIGHT, CARD) if right else (WRONG, WRONG_FILL)
        rectangle(axes, left, y, wide - 14, high - 14, fill, edgecolor=edge, linewidth=1.2 if right else 2.6)
        for rank, first in enumerate(setting):
            x = left + 10 + 30 * rank
            frame, letter = (x, y + 12, 26, 30), first[0].upper()
            picture.tile(axes, frame, rank_colour(rank), letter, 11.5, linewidth=0.9, weight="bold")
        moments = len(moments_of(setting))
        word = f"✓ {moments} moments" if right else "✗ stuck"
        centred(axes, left + (wide - 14) / 2, y + 74, word, color=edge, weight="bold")
    stuck = [setting for setting, arrived in runs.arrived.items() if not arrived]
    said = " and ".join(f"{', '.join(setting)}" for setting in stuck)
    alt = (
        f"All {len(EVERY)} settings of {SWITCHES} switches, each run on real processes. {len(stuck)} of them "
        f"stand still: {said}. In all others every message arrives, in 2 to {SWITCHES} moments."
    )
    return finish(figure, "collectives-every-setting", alt)
