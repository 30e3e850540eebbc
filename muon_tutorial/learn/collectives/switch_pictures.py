"""Pictures of lesson 03's switches: a setting as a film, and all settings at a glance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ..pictures.colours import CARD, INK, QUIET, RIGHT, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..widgets.play import play
from ..widgets.shell import Shell, choice
from .switches import EVERY, SWITCHES, First, Setting, SettingRuns, moments_of

_WIDE, _HIGH = 560, 420


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring of ranks with one setting of its switches, after some moments; where it is drawn."""

    setting: Setting
    moment: int
    left: float = 140
    right: float = 420

    @property
    def spots(self) -> tuple[tuple[float, float], ...]:
        """Where the ranks stand; messages go round clockwise."""
        return (self.left, 130), (self.right, 130), (self.right, 300), (self.left, 300)

    @property
    def now(self) -> list[int]:
        """The ranks whose message passes just now."""
        film = moments_of(self.setting)
        return film[self.moment - 1] if 0 < self.moment <= len(film) else []

    @property
    def done(self) -> list[int]:
        """The ranks whose message has passed."""
        return [rank for passing in moments_of(self.setting)[: self.moment] for rank in passing]

    def state(self, rank: int) -> str:
        """What a rank is doing."""
        sent, received = rank in self.done, (rank - 1) % SWITCHES in self.done
        if sent and received:
            return "done"
        sending = not sent and (received or self.setting[rank] == "send")
        return f"sends to {(rank + 1) % SWITCHES}" if sending else f"waits for {(rank - 1) % SWITCHES}"


def explore_switches(runs: SettingRuns, live: bool = True) -> Shell | Picture:
    """A switch for each rank, and a film of what comes of them; below it, what real ranks have made of it."""
    options: dict[str, First] = {"send first": "send", "receive first": "receive"}
    knobs = {f"rank_{rank}": choice(f"rank {rank}", options) for rank in range(SWITCHES)}
    for knob in knobs.values():
        knob.style.button_width = "120px"
    return play(partial(_draw, runs), SWITCHES, draw_flip(runs), live, interval=700, **knobs)


def _draw(runs: SettingRuns, moment: int, **firsts: First) -> Picture:
    return draw_setting(runs, tuple(firsts[f"rank_{rank}"] for rank in range(SWITCHES)), moment)


def draw_setting(runs: SettingRuns, setting: Setting, moment: int) -> Picture:
    """The ring after some moments: which messages have passed, what every rank is doing, and how it ended."""
    ring = _Ring(setting, moment)
    figure, axes = blank(_WIDE, _HIGH)
    _write_title(axes, f"After {moment} moment{'s' * (moment != 1)}")
    _draw_ring(axes, ring, runs)
    return finish(figure, "collectives-switches", _say(runs, ring))


def draw_flip(runs: SettingRuns) -> Picture:
    """A deadlock, and beside it the same ring with one switch flipped, on its way."""
    rings = _Ring(("send",) * 4, 2, 100, 330), _Ring(("receive", "send", "send", "send"), 2, 560, 790)
    figure, axes = blank(890, _HIGH)
    _write_title(axes, "After 2 moments: all send first, and the same with rank 0 flipped")
    for ring in rings:
        _draw_ring(axes, ring, runs)
    return finish(figure, "collectives-flip", " Beside it: ".join(_say(runs, ring) for ring in rings))


def _write_title(axes: Axes, title: str) -> None:
    write(axes, 16, 24, title, 13.5, weight="bold")
    write(axes, 16, 48, "dashed: not sent yet · bold: passes just now", 11, color=QUIET)


def _draw_ring(axes: Axes, ring: _Ring, runs: SettingRuns) -> None:
    for rank in range(SWITCHES):
        _draw_message(axes, ring, rank)
    for rank, (x, y) in enumerate(ring.spots):
        rectangle(axes, x - 76, y - 27, 152, 54, rank_colour(rank), linewidth=1.4, zorder=4)
        write(axes, x, y - 10, f"rank {rank}", 11.5, ha="center", weight="bold", zorder=5)
        write(axes, x, y + 12, ring.state(rank), 11, ha="center", zorder=5)
    right = runs.arrived[ring.setting]
    fill, edge, sign = (RIGHT_FILL, RIGHT, "✓") if right else (WRONG_FILL, WRONG, "✗")
    left, wide = ring.left - 88, ring.right - ring.left + 176
    rectangle(axes, left, 364, wide, 40, fill, edgecolor=edge, linewidth=1.6)
    said = f"{sign} {_end(runs, ring.setting)}"
    write(axes, left + wide / 2, 384, said, 11, ha="center", weight="bold", color=edge)


def _draw_message(axes: Axes, ring: _Ring, rank: int) -> None:
    start, stop = ring.spots[rank], ring.spots[(rank + 1) % SWITCHES]
    off = (78 if start[1] == stop[1] else 30) / math.dist(start, stop)
    ends = [
        (start[0] + share * (stop[0] - start[0]), start[1] + share * (stop[1] - start[1]))
        for share in (off, 1 - off)
    ]
    passed = rank in ring.done
    line: Any = "-" if passed else (0, (4, 3))
    width = 3.4 if rank in ring.now else 1.6
    look: Any = {
        "linestyle": line,
        "linewidth": width,
        "mutation_scale": 20,
        "color": INK if passed else QUIET,
    }
    axes.add_patch(FancyArrowPatch(ends[0], ends[1], arrowstyle="-|>", shrinkA=0, shrinkB=0, **look))


def _end(runs: SettingRuns, setting: Setting) -> str:
    if runs.arrived[setting]:
        return "on real processes, all messages arrived"
    return f"on real processes, all stood still for {runs.patience:g} s"


def _say(runs: SettingRuns, ring: _Ring) -> str:
    firsts = ", ".join(f"rank {rank} {first}" for rank, first in enumerate(ring.setting))
    passing = ", ".join(f"{rank} to {(rank + 1) % SWITCHES}" for rank in ring.now) or "none"
    states = ", ".join(f"rank {rank} {ring.state(rank)}" for rank in range(SWITCHES))
    return (
        f"First of all, {firsts}. After moment {ring.moment}, messages that pass just now: {passing}. "
        f"{states}. In the end, {_end(runs, ring.setting)}."
    )


def draw_every_setting(runs: SettingRuns) -> Picture:
    """Every setting of the switches, and what came of it on real ranks."""
    columns, wide, high, top = 4, 150, 118, 72
    figure, axes = blank(columns * wide + 16, top + high * (len(EVERY) // columns) + 8)
    write(axes, 16, 24, f"All {len(EVERY)} settings of the switches, on real processes", 13.5, weight="bold")
    write(axes, 16, 50, "S: sends first · R: receives first", 11, color=QUIET)
    for number, setting in enumerate(EVERY):
        left, y = 16 + number % columns * wide, top + number // columns * high
        right = runs.arrived[setting]
        edge, fill = (RIGHT, CARD) if right else (WRONG, WRONG_FILL)
        rectangle(axes, left, y, wide - 14, high - 14, fill, edgecolor=edge, linewidth=1.2 if right else 2.6)
        for rank, first in enumerate(setting):
            x = left + 10 + 30 * rank
            rectangle(axes, x, y + 12, 26, 30, rank_colour(rank), linewidth=0.9)
            write(axes, x + 13, y + 27, first[0].upper(), 11.5, ha="center", weight="bold")
        moments = len(moments_of(setting))
        word = f"✓ {moments} moments" if right else "✗ stuck"
        write(axes, left + (wide - 14) / 2, y + 74, word, 11, ha="center", color=edge, weight="bold")
    stuck = [setting for setting, arrived in runs.arrived.items() if not arrived]
    said = " and ".join(f"{', '.join(setting)}" for setting in stuck)
    alt = (
        f"All {len(EVERY)} settings of {SWITCHES} switches, each run on real processes. {len(stuck)} of them "
        f"stand still: {said}. In all others every message arrives, in 2 to {SWITCHES} moments."
    )
    return finish(figure, "collectives-every-setting", alt)
