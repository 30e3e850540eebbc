"""Lesson 02: singular values bounce through five steps, with the reader's coefficients and published ones.

``draw_bounce`` is a pure function from coefficients, a rival and a moment to one picture. Between two steps
the dots glide, so that the eye can follow them; only whole steps are what Newton–Schulz computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets
import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...newton_schulz import KELLER_JORDAN, Coefficients, Triple, coefficients_per_step
from ..pictures.colours import INK, MUON, OTHER
from ..pictures.picture import Picture, finish
from ..pictures.spectra import card, style
from ..widgets.play import play
from ..widgets.shell import Shell, choice
from .singular_values import PUBLISHED, SCOPE_STEPS, mean_distance, polynomial, spectra

FRAMES = 3
"""Pictures from one step to the next."""
CLASSICAL: Triple = (2.0, -1.5, 0.5)
"""They sum to 1, so that 1 stays at 1; quiet values climb slowly."""
_TOP = 1.5
_KINDS = ("a", 2.0, 4.0, 0.25), ("b", -5.0, -1.5, 0.25), ("c", 0.5, 2.5, 0.25)


@dataclass(frozen=True, slots=True)
class _Player:
    name: str
    triples: Coefficients
    colour: str


def duel(live: bool = True) -> Shell | Picture:
    """Sliders for a, b and c beside a choice of published sets; one against the other, as a film."""
    last = FRAMES * SCOPE_STEPS
    sliders = {name: _fine_slider(number, *kind) for number, (name, *kind) in enumerate(_KINDS)}
    rival = choice("against", {name: name for name in PUBLISHED})
    rival.style.button_width = "116px"
    still = draw_still(CLASSICAL)
    return play(draw_bounce, last, still, live, interval=180, **sliders, rival=rival)


def _fine_slider(number: int, low: float, high: float, by: float) -> ipywidgets.SelectionSlider:
    """A slider over decimal numbers, Keller Jordan's own among them, where it begins."""
    count = round((high - low) / by) + 1
    values = sorted({*(round(low + by * each, 2) for each in range(count)), KELLER_JORDAN[number]})
    return ipywidgets.SelectionSlider(
        options=[(f"{value:g}", value) for value in values],
        value=KELLER_JORDAN[number],
        description="abc"[number],
        layout=ipywidgets.Layout(width="420px"),
        style={"description_width": "90px"},
    )


def draw_bounce(moment: int, a: float, b: float, c: float, rival: str) -> Picture:
    """Both players' dots at a moment, each where it is between two steps, below their scores."""
    players = _Player("yours", (a, b, c), OTHER), _Player(rival, PUBLISHED[rival], MUON)
    step, part = divmod(moment, FRAMES)
    figure = card(700, 320)
    said = []
    for number, player in enumerate(players):
        axes = figure.add_axes((0.07 + 0.49 * number, 0.1, 0.43, 0.78))
        said.append(_draw_player(axes, player, step, part / FRAMES))
    text = f"Step {moment / FRAMES:.3g}. With a = {a:g}, b = {b:g}, c = {c:g}: {said[0]}; {rival}: {said[1]}."
    return finish(figure, "five_products-bounce", text)


def draw_still(triple: Triple) -> Picture:
    """Where five steps end, for one triple and for every published set, with its score."""
    players = [_Player(", ".join(f"{x:g}" for x in triple), triple, OTHER)]
    players += [_Player(name, triples, MUON) for name, triples in PUBLISHED.items() if name != "CANS"]
    figure, said = card(700, 520), []
    for number, player in enumerate(players):
        axes = figure.add_subplot(2, 2, number + 1)
        said.append(f"{player.name}: {_draw_player(axes, player, SCOPE_STEPS, 0.0)}")
    figure.tight_layout()
    return finish(figure, "five_products-bounce-still", f"After {SCOPE_STEPS} steps. {'; '.join(said)}.")


def _draw_player(axes: Axes, player: _Player, step: int, part: float) -> str:
    """One player's dots; returns them in words."""
    starts = spectra()["gradient"]
    now, trail = _glide(starts, player.triples, step, part), _glide(starts, player.triples, step, 0.0)
    score = mean_distance(starts, player.triples)
    at_end = f"{score:.3f} from 1" if score < 100 else "flies off"
    style(axes, f"{player.name}: {at_end}", "", "")
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    places = range(1, len(starts) + 1)
    axes.vlines(places, _shown(trail), _shown(now), color=player.colour, linewidth=0.8, alpha=0.5)
    axes.plot(places, _shown(now), "o", color=player.colour, markersize=5.5, alpha=0.8, clip_on=False)
    axes.set(ylim=(0, _TOP), xlim=(-1, len(starts) + 2))
    off = int((now > _TOP).sum())
    axes.set_yticks([0, 0.5, 1, 1.5], ["0", "0.5", "1", "1.5"])
    axes.set_xticks([1, len(starts)], ["loudest", "quietest"])
    left, right = axes.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
    flown = f", {off} of them out of the picture" if off else ""
    between = f"{len(now)} values between {now.min():.3g} and {now.max():.3g}"
    return f"{between}{flown}, at the end {at_end} on average"


def _shown(values: Tensor) -> Sequence[float]:
    return values.clamp(0, _TOP).tolist()


def _glide(starts: Tensor, triples: Coefficients, step: int, part: float) -> Tensor:
    """Values between a step and the next: slowly off, fast in between, slowly to rest."""
    every = coefficients_per_step(triples, SCOPE_STEPS)
    here = polynomial(starts, step, every[:step]) if step else starts
    if part == 0:
        return here.nan_to_num(1e9, 1e9, 0).clamp(0, 1e9)
    there = polynomial(here, 1, every[step])
    eased = part * part * (3 - 2 * part)
    return torch.lerp(here, there, eased).nan_to_num(1e9, 1e9, 0).clamp(0, 1e9)
