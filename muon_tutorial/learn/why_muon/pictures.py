"""Pictures of lesson 01: circles, spectra of updates, the fall of the loss, and the race."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..inputs.small_gpt import GPT_SHAPE, TrainedGPT
from ..pictures.colours import ADAMW, EMPTY, INK, MARKED, MUON, OTHER, QUIET, SGD
from ..pictures.picture import Picture, centred, finish, write
from ..pictures.spectra import Curve, card, decades, draw_spectra, plot, style
from ..widgets.shell import Shell, choice, play, show, slider
from .exercises import loudest
from .race import MUON_TOO, RACERS, SEEDS, Race
from .updates import EXAMPLE, KINDS, LossDrop, Orthogonalize, svd_muon, updates_of

LOOKS = {
    "SGD": (SGD, "-"),
    "Adam": (ADAMW, "-"),
    "Muon, exact": (MUON, "-"),
    "Muon, as it runs": (OTHER, "--"),
}
_RELATIVE = "loudness (the loudest is 1)"
_LEGEND: dict[str, Any] = {"fontsize": 11, "frameon": False, "labelcolor": INK, "loc": "upper right"}


def hero() -> Picture:
    """The circle of all inputs of length 1, mapped by two updates: to an ellipse, and to a circle."""
    loud, quiet = 1.5, 0.25
    turn_in, turn_out = _rotation(0.5), _rotation(0.85)
    update = turn_out @ torch.diag(torch.tensor([loud, quiet], dtype=torch.float64)) @ turn_in.T
    figure = card(660, 244)
    panels = {
        "all inputs of length 1": torch.eye(2, dtype=torch.float64),
        "moved by a gradient": update,
        "moved by Muon": svd_muon(update),
    }
    for number, (title, matrix) in enumerate(panels.items()):
        axes = figure.add_axes((0.005 + 0.333 * number, 0.01, 0.325, 0.86))
        angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
        x, y = (matrix @ torch.stack((angles.cos(), angles.sin()))).tolist()
        axes.set(xlim=(-1.9, 1.9), ylim=(-1.3, 1.85), aspect="equal")
        axes.axis("off")
        axes.set_title(title, fontsize=13, fontweight="bold", color=INK)
        axes.fill(x, y, facecolor=MARKED, edgecolor=INK, linewidth=1.4)
        for width, label, column in ((3.2, "loud", 0), (1.8, "quiet", 1)):
            right, up = (matrix @ turn_in[:, column]).tolist()
            look = {"arrowstyle": "-|>", "color": INK, "linewidth": width}
            axes.annotate("", (right, up), (0, 0), arrowprops=look)
            length = math.hypot(right, up)
            beyond = 1 + 0.36 / length
            centred(axes, right * beyond, up * beyond, f"{label}\n{length:.2g}", 12)
    alt = (
        "All inputs of length 1 form a circle, with a loud and a quiet direction marked. A gradient makes an "
        f"ellipse of it: {loud} long in the loud direction, {quiet} in the quiet one. Muon's update turns "
        "the two directions as the gradient does, but gives both the length 1: a circle again."
    )
    return finish(figure, "why_muon-hero", alt)


def _rotation(angle: float) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def picture_of_gradient(G: Tensor) -> Picture:
    """The spectrum of one gradient, with the directions that carry half of the energy shaded."""
    curve = Curve.relative("the gradient", torch.linalg.svdvals(G), SGD)
    half = loudest(torch.linalg.svdvals(G.double()), 0.5)
    figure = card(640, 340)
    axes = style(figure.add_subplot(), EXAMPLE, "direction, the loudest first", _RELATIVE)
    decades(axes)
    plot(axes, [curve])
    axes.axvspan(0.5, half + 0.5, color=MARKED, zorder=0)
    axes.text(half + 1.5, 2e-4, f"shaded: {half} of {len(curve.values)} carry half of the energy", size=11)
    figure.tight_layout()
    said = f"{curve.say()}. The loudest {half} of {len(curve.values)} carry half of the energy."
    return finish(figure, "why_muon-gradient", said)


def spectra_of(run: TrainedGPT, name: str, orthogonalize: Orthogonalize) -> list[Curve]:
    """The spectra of all updates of one parameter, each relative to its loudest direction."""
    updates = updates_of(run, name, orthogonalize).items()
    return [Curve.relative(who, torch.linalg.svdvals(update), *LOOKS[who]) for who, update in updates]


def explore(run: TrainedGPT, orthogonalize: Orthogonalize, live: bool = True) -> Shell | Picture:
    """The spectra of a matrix's updates, with a button per kind of matrix and a slider for the layer."""

    def draw(matrix: str, layer: int) -> Picture:
        name = f"blocks.{layer}.{KINDS[matrix]}.weight"
        return draw_spectra([(name, spectra_of(run, name, orthogonalize))], "why_muon-updates", _RELATIVE)

    last = GPT_SHAPE.layers - 1
    matrix, layer = choice("matrix", ("up", "down", *"qkvo")), slider("layer", last=last, start=last)
    names = {f"{KINDS[kind]}, layer {last}": f"blocks.{last}.{KINDS[kind]}.weight" for kind in ("up", "q")}
    panels = [(title, spectra_of(run, name, orthogonalize)) for title, name in names.items()]
    still = draw_spectra(panels, "why_muon-all-updates", _RELATIVE)
    return show(draw, still, live, matrix=matrix, layer=layer)


def picture_of_drops(drops: Mapping[str, LossDrop]) -> Picture:
    """How far the loss falls for each optimizer at the same loudness, as a multiple of SGD's promise."""
    unit = drops["SGD"].promised
    figure = card(640, 300)
    title = "How far the loss falls, at the same largest singular value"
    axes = style(figure.add_axes((0.25, 0.19, 0.72, 0.68)), title, "", "")
    places = range(len(drops), 0, -1)
    promised = [drop.promised / unit for drop in drops.values()]
    measured = [drop.measured / unit for drop in drops.values()]
    told = ("promised by the gradient", promised, 0.19, EMPTY), ("measured", measured, -0.19, INK)
    for label, lengths, up, fill in told:
        axes.barh([p + up for p in places], lengths, 0.34, color=fill, edgecolor=INK, label=label)
    axes.set_yticks(list(places), list(drops), color=INK)
    axes.set_xlabel("times what SGD promises", fontsize=11, color=QUIET)
    axes.set_xlim(0, max(*promised, *measured) * 1.08)
    axes.legend(**_LEGEND)
    fell = zip(drops, promised, measured, strict=True)
    said = "; ".join(f"{who}: promised {p:.2f}, measured {m:.2f}" for who, p, m in fell)
    return finish(figure, "why_muon-drops", f"How far the loss falls, in units of SGD's promise. {said}.")


LINES = {"SGD": SGD, "AdamW": ADAMW, "Muon": MUON}


def explore_race(race: Race, live: bool = True) -> Shell | Picture:
    last = race.steps // race.every
    return play(partial(draw_race, race), last, draw_race(race, last), live, interval=250)


def draw_race(race: Race, moment: int) -> Picture:
    """The losses up to a moment, each racer at its tuned learning rate; thin lines are other seeds."""
    figure = card(660, 400)
    step = moment * race.every
    axes = style(figure.add_axes((0.1, 0.135, 0.76, 0.75)), f"Step {step}", "step", "")
    runs = {who: [race.best(who, seed).losses for seed in SEEDS] for who in RACERS}
    every = [losses for of_who in runs.values() for losses in of_who]
    axes.set(xlim=(0, race.steps), ylim=(min(map(min, every)) - 0.1, min(4.0, max(map(max, every)) + 0.1)))
    for who, of_who in runs.items():
        for seed, losses in enumerate(each[: moment + 1] for each in of_who):
            width, alpha = (0.9, 0.6) if seed else (2.6, 1.0)
            steps = [number * race.every for number in range(len(losses))]
            axes.plot(steps, losses, color=LINES[who], linewidth=width, alpha=alpha)
            if not seed:
                axes.plot(steps[-1], losses[-1], "o", markersize=9, color=LINES[who], clip_on=False)
    for place, who in enumerate(sorted(RACERS, key=lambda who: -race.best(who).losses[moment])):
        said = f"{who}\n{race.best(who).losses[moment]:.2f}"  # the highest loss on top, without overlap
        write(axes, 1.02, 0.9 - 0.17 * place, said, 12, transform=axes.transAxes, color=LINES[who],
              weight="bold", va="top", linespacing=1.25)  # fmt: skip
    centred(axes, 0.02, 0.5, "loss on held-out text", rotation=90, color=QUIET, va="center",
          transform=figure.transFigure)  # fmt: skip
    return finish(figure, "why_muon-race", say_race(race, moment))


def say_race(race: Race, moment: int) -> str:
    """A moment of the race in words; the last says when the winner reached the runner-up's last loss."""
    said = [f"{who} {race.best(who).losses[moment]:.2f}" for who in RACERS]
    text = f"Step {moment * race.every} of {race.steps}, loss on held-out text: {', '.join(said)}."
    if moment * race.every < race.steps:
        return text
    first, second, third = race.ranking()
    caught = ", ".join(str(race.caught_at(seed)) for seed in SEEDS)
    text += f" {first} has the lowest loss at the end, before {second} and {third}. It reaches {second}'s"
    return f"{text} last loss at step {race.caught_at()} (with {len(SEEDS)} seeds: {caught})."


def say_extra_lanes(race: Race) -> str:
    """The last losses of the lanes in which Muon steps one more matrix, compared with the race's."""
    rows = [f"{'hidden matrices alone':>22}  {race.best('Muon').last:.3f}"]
    rows += [f"{who.removeprefix('Muon, '):>22}  {race.best(who).last:.3f}" for who in MUON_TOO]
    others = [race.best("Muon", seed).last for seed in SEEDS[1:]]
    spread = ", ".join(f"{loss:.3f}" for loss in others)
    head, note = f"{'Muon updates':>22}  last loss", f"(hidden matrices alone, other seeds: {spread})"
    return "\n".join([head, *rows, note])
