"""Lesson 01: the race as a film, and the learning rates that were tried, as a picture.

``draw_race`` is a pure function from a recorded race and a moment to one picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from ..pictures.colours import ADAMW, INK, MUON, QUIET, SGD
from ..pictures.picture import Picture, finish, write
from ..pictures.spectra import card, style
from ..widgets.play import play
from ..widgets.shell import Shell
from .race import MUON_TOO, RACERS, SEEDS, Race

LINES = {"SGD": SGD, "AdamW": ADAMW, "Muon": MUON}


def explore_race(race: Race, live: bool = True) -> Shell | Picture:
    """The film of a race; its last picture where no kernel runs."""
    last = race.steps // race.every
    draw = partial(_draw_moment, race)
    return play(draw, last, draw(last), live, interval=250)


def _draw_moment(race: Race, moment: int) -> Picture:
    return draw_race(race, moment)


def draw_race(race: Race, moment: int) -> Picture:
    """The losses up to a moment, each racer at its tuned learning rate; thin lines are other seeds."""
    figure = card(660, 400)
    step = moment * race.every
    axes = style(figure.add_axes((0.1, 0.135, 0.76, 0.75)), f"Step {step}", "step", "")
    every = [curve.losses for who in RACERS for curve in _runs(race, who)]
    axes.set(xlim=(0, race.steps), ylim=(min(map(min, every)) - 0.1, min(4.0, max(map(max, every)) + 0.1)))
    for who in RACERS:
        for thin, curve in enumerate(_runs(race, who)):
            _draw_run(axes, race, curve.losses[: moment + 1], LINES[who], bool(thin))
    _label_ends(axes, race, moment)
    write(axes, 0.02, 0.5, "loss on held-out text", 11, rotation=90, color=QUIET, va="center", ha="center",
          transform=figure.transFigure)  # fmt: skip
    return finish(figure, "why_muon-race", say_race(race, moment))


def _runs(race: Race, who: str) -> list:
    return [race.best(who, seed) for seed in SEEDS]


def _draw_run(axes: Axes, race: Race, losses: Sequence[float], colour: str, is_thin: bool) -> None:
    steps = [number * race.every for number in range(len(losses))]
    axes.plot(steps, losses, color=colour, linewidth=0.9 if is_thin else 2.6, alpha=0.6 if is_thin else 1.0)
    if not is_thin:
        axes.plot(steps[-1], losses[-1], "o", markersize=9, color=colour, clip_on=False)


def _label_ends(axes: Axes, race: Race, moment: int) -> None:
    """Names and losses at the right edge, from top to bottom as they stand, and not on one another."""
    now = sorted(RACERS, key=lambda who: -race.best(who).losses[moment])
    for place, who in enumerate(now):
        loss = race.best(who).losses[moment]
        write(axes, 1.02, 0.9 - 0.17 * place, f"{who}\n{loss:.2f}", 12, transform=axes.transAxes,
              color=LINES[who], weight="bold", va="top", linespacing=1.25)  # fmt: skip


def say_race(race: Race, moment: int) -> str:
    """A moment of the race in words; at its end, when the winner caught up with the second's last loss."""
    said = [f"{who} {race.best(who).losses[moment]:.2f}" for who in RACERS]
    text = f"Step {moment * race.every} of {race.steps}, loss on held-out text: {', '.join(said)}."
    if moment * race.every < race.steps:
        return text
    first, second, third = race.ranking()
    caught = ", ".join(str(race.caught_at(seed)) for seed in SEEDS)
    return (
        f"{text} {first} is the first at the end, before {second} and {third}. It catches up at step "
        f"{race.caught_at()} with {second}'s last loss (with {len(SEEDS)} seeds: {caught})."
    )


def say_extra_lanes(race: Race) -> str:
    """The last loss where Muon steps one more matrix, beside that of the race."""
    rows = [f"{'hidden matrices alone':>22}  {race.best('Muon').last:.3f}"]
    rows += [f"{who.removeprefix('Muon, '):>22}  {race.best(who).last:.3f}" for who in MUON_TOO]
    others = [race.best("Muon", seed).last for seed in SEEDS[1:]]
    spread = ", ".join(f"{loss:.3f}" for loss in others)
    return "\n".join(
        [f"{'Muon steps':>22}  last loss", *rows, f"(hidden matrices alone, other seeds: {spread})"]
    )


def picture_of_tuning(race: Race) -> Picture:
    """The last loss of each racer at every learning rate that was tried."""
    figure = card(640, 300)
    axes = style(figure.add_subplot(), "Every learning rate that was tried", "learning rate", "last loss")
    said = []
    for who in RACERS:
        tried = race.tried(who)
        rates, losses = [curve.rate for curve in tried], [curve.last for curve in tried]
        axes.plot(rates, losses, "o-", color=LINES[who], linewidth=1.8, markersize=5)
        best = race.best(who)
        axes.plot(best.rate, best.last, "o", markersize=13, markerfacecolor="none", color=INK)
        write(axes, rates[-1] * 1.1, losses[-1], who, 12, color=LINES[who], weight="bold")
        said.append(f"{who}: from {rates[0]:g} to {rates[-1]:g}, best at {best.rate:g}")
    axes.set(xscale="log", xlim=(8e-4, 1.0))
    axes.set_xticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    axes.minorticks_off()
    figure.tight_layout()
    return finish(
        figure, "why_muon-tuning", f"The learning rates tried for the hidden matrices. {'; '.join(said)}."
    )
