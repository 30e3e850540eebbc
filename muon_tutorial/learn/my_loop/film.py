"""Lesson 16: a run's life as a film. Ranks are lanes, steps are ticks, checkpoints are diamonds.

``draw_life`` is a pure function from a life and a moment to a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from ..pictures.colours import CARD, EMPTY, INK, QUIET, WRONG, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..widgets.shell import Shell, play
from .lives import Attempt, RunLife

_LEFT, _TOP, _LANE, _GAP, _CURVE = 190, 60, 24, 46, 150


@dataclass(frozen=True, slots=True)
class LifeMoment:
    """One event: its attempt, what happens, and after how many steps of the run."""

    attempt: int
    what: str
    step: int


def moments(life: RunLife) -> list[LifeMoment]:
    """The events of a life, in order: begin, step, save, kill."""
    return [moment for number, attempt in enumerate(life.attempts) for moment in _moments_of(number, attempt)]


def _moments_of(number: int, attempt: Attempt) -> Iterator[LifeMoment]:
    yield LifeMoment(number, "begin", attempt.begin)
    for step in attempt.losses:
        yield LifeMoment(number, "step", step + 1)
        if step + 1 in attempt.saved:
            yield LifeMoment(number, "save", step + 1)
    if attempt.killed is not None:
        yield LifeMoment(number, "kill", attempt.killed[1])


def explore_life(life: RunLife, undisturbed: RunLife, live: bool = True) -> Shell | Picture:
    """The film of a life; only its last picture if no kernel runs."""
    last = len(moments(life)) - 1
    draw = partial(_draw_moment, life, undisturbed)
    return play(draw, last, draw(last), live, interval=600)


def _draw_moment(life: RunLife, undisturbed: RunLife, moment: int) -> Picture:
    return draw_life(life, undisturbed, moment)


def draw_life(life: RunLife, undisturbed: RunLife, moment: int, name: str = "my_loop-life") -> Picture:
    """A life up to and including a moment, and its loss; the thin line is the undisturbed run's loss."""
    done = moments(life)[: moment + 1]
    tops = [_TOP]
    for attempt in life.attempts:
        tops.append(tops[-1] + attempt.ranks * _LANE + _GAP)
    tick = min(48.0, 590 / life.job.steps)
    figure, axes = blank(round(_LEFT + life.job.steps * tick + 110), round(tops[-1] + _CURVE + 36))
    for number, attempt in enumerate(life.attempts):
        mine = [each for each in done if each.attempt == number]
        if mine:
            _draw_attempt(axes, attempt, mine, tops[number], tick)
    _draw_losses(axes, life, undisturbed, done, tops[-1] - 6, tick)
    write(axes, 14, 20, _title(life, done[-1]), 12.5, weight="bold")
    return finish(figure, name, say_moment(life, undisturbed, moment))


def _title(life: RunLife, now: LifeMoment) -> str:
    attempt = life.attempts[now.attempt]
    grid = f"{attempt.grid[0]} × {attempt.grid[1]}"
    again = "again " if any(now.step <= before.end for before in life.attempts[: now.attempt]) else ""
    return {
        "begin": f"{attempt.ranks} ranks begin, dp × tp = {grid}, at step {now.step}",
        "step": f"step {now.step - 1} is done {again}on {grid}",
        "save": f"saved after {now.step} steps",
        "kill": f"rank {attempt.killed[0] if attempt.killed else ''} is killed after {now.step} steps",
    }[now.what]


def _draw_attempt(axes: Axes, attempt: Attempt, mine: list[LifeMoment], top: float, tick: float) -> None:
    dp, tp = attempt.grid
    grid = f"dp × tp = {dp} × {tp}"
    write(axes, 14, top - 12, grid, 11, color=QUIET)
    steps = [each.step - 1 for each in mine if each.what == "step"]
    is_dead = mine[-1].what == "kill"
    for rank in range(attempt.ranks):
        y = top + rank * _LANE
        write(axes, 14, y + _LANE / 2, f"rank {rank}  (dp {rank // tp}, tp {rank % tp})", 11)
        for step in steps:
            x = _LEFT + step * tick
            rectangle(axes, x, y + 2, tick - 3, _LANE - 4, rank_colour(rank), linewidth=0.7)
        if is_dead and attempt.killed is not None:
            x = _LEFT + attempt.killed[1] * tick + 9
            mark = "killed" if rank == attempt.killed[0] else "ended"
            colour = WRONG if rank == attempt.killed[0] else QUIET
            write(axes, x, y + _LANE / 2, f"✕ {mark}", 11, color=colour,
                  weight="bold" if rank == attempt.killed[0] else "normal")  # fmt: skip
    bottom = top + attempt.ranks * _LANE + 11
    begun_at = _LEFT + attempt.begin * tick - 3
    axes.plot([begun_at, begun_at], [top - 4, bottom], color=INK, linewidth=1.4)
    if attempt.begin:
        axes.plot(begun_at, top - 8, marker="D", markersize=6, color=INK)
        write(axes, begun_at + 8, top - 9, f"loads step {attempt.begin}", 11)
    for each in mine:
        if each.what == "save":
            x = _LEFT + each.step * tick - 3
            axes.plot(x, bottom, marker="D", markersize=7, color=INK)
            write(axes, x + 8, bottom, f"{each.step}", 11, color=QUIET)


def _draw_losses(
    axes: Axes, life: RunLife, undisturbed: RunLife, done: list[LifeMoment], top: float, tick: float
) -> None:
    reference = undisturbed.last.losses
    every = [*reference.values(), *(loss for each in life.attempts for loss in each.losses.values())]
    low, high = min(every), max(every)

    def at(step: int, loss: float) -> tuple[float, float]:
        share = (round(loss, 3) - low) / ((high - low) or 1.0)
        return _LEFT + (step + 0.5) * tick, top + 14 + (1 - share) * (_CURVE - 30)

    rectangle(axes, _LEFT - 3, top, life.job.steps * tick, _CURVE, CARD, linewidth=0.6, edgecolor=EMPTY)
    write(axes, 14, top + 18, "loss", 12, weight="bold")
    write(axes, 14, top + 40, "line: undisturbed", 11, color=QUIET)
    write(axes, 14, top + 60, "○ lost with the kill", 11, color=QUIET)
    write(axes, 14, top + 80, "● what counts", 11, color=QUIET)
    axes.plot(
        *zip(*(at(step, loss) for step, loss in reference.items()), strict=True), color=QUIET, linewidth=1
    )
    for each in done:
        if each.what == "step":
            attempt, step = life.attempts[each.attempt], each.step - 1
            is_lost = any(
                after.begin <= step for after in life.attempts[each.attempt + 1 : done[-1].attempt + 1]
            )
            x, y = at(step, attempt.losses[step])
            size = 9 if is_lost else 5
            axes.plot(x, y, "o", markersize=size, markerfacecolor="none" if is_lost else INK, color=INK)
    for step in range(life.job.steps):
        write(axes, _LEFT + (step + 0.5) * tick, top + _CURVE + 12, str(step), 11, ha="center", color=QUIET)
    write(axes, 14, top + _CURVE + 12, "step", 11, color=QUIET)


def say_moment(life: RunLife, undisturbed: RunLife, moment: int) -> str:
    """A moment in words, with the loss so far and the undisturbed run's."""
    done = moments(life)[: moment + 1]
    now = done[-1]
    saved = [each.step for each in done if each.what == "save"]
    text = f"Moment {moment}: {_title(life, now)}. "
    text += f"Checkpoints so far: {', '.join(map(str, saved)) or 'none'}. "
    steps = [each for each in done if each.what == "step"]
    if steps:
        mine = life.attempts[steps[-1].attempt].losses[steps[-1].step - 1]
        theirs = undisturbed.last.losses[steps[-1].step - 1]
        text += f"The latest loss is {mine:.2f}; undisturbed it was {theirs:.2f}."
    return text.strip()
