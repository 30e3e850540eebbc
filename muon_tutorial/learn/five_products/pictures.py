"""Pictures of lesson 02: a gradient's values in all steps, the path of 1, the microscope, a duel."""

from __future__ import annotations

import math

import ipywidgets
import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...newton_schulz import KELLER_JORDAN, Coefficients, Triple, coefficients_per_step
from ..pictures.colours import INK, MUON, OTHER, QUIET
from ..pictures.picture import Picture, finish
from ..pictures.spectra import card, style
from ..widgets.shell import Shell, choice, play, show, slider, slider_look
from .singular_values import PUBLISHED, SCOPE_STEPS, SPECTRA, mean_distance, polynomial, spectra

_START = 1e-4


def hero() -> Picture:
    """The singular values of the recorded gradient, before and after each step, on a logarithmic scale."""
    values = spectra()["gradient"]
    columns = torch.stack([polynomial(values, step) for step in range(SCOPE_STEPS + 1)])
    figure = card(660, 330)
    axes = style(figure.add_axes((0.1, 0.14, 0.87, 0.76)), "", "", "")
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    steps = list(range(SCOPE_STEPS + 1))
    axes.plot(steps, columns.numpy(), color=MUON, linewidth=0.7, alpha=0.45)
    axes.plot(steps, columns.numpy(), "o", color=MUON, markersize=5, alpha=0.6)
    axes.set(yscale="log", ylim=(0.004, 2.2), xlim=(-0.25, SCOPE_STEPS + 0.25))
    axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes.set_xticks(steps, ["before", *(f"step {step}" for step in steps[1:])])
    axes.minorticks_off()
    axes.tick_params(labelsize=12)
    axes.set_title(f"{len(values)} singular values of a real gradient", fontsize=13, loc="left",
                   fontweight="bold", color=INK)  # fmt: skip
    quiet = int((columns[0] < 0.1).sum())
    alt = (
        f"The {len(values)} singular values of a recorded gradient, before and after each of {SCOPE_STEPS} "
        f"steps. Before, they lie between {values.min():.1g} and {values.max():.1g}, {quiet} below a tenth. "
        "Step by step the quiet ones climb, and at the end all lie near 1."
    )
    return finish(figure, "five_products-hero", alt)


def picture_of_one() -> Picture:
    steps, one = 12, torch.tensor(1.0, dtype=torch.float64)
    path = [polynomial(one, step).item() for step in range(steps + 1)]
    figure = card(640, 290)
    axes = style(figure.add_subplot(), "A value that begins at exactly 1", "step", "where it is")
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    axes.plot(range(steps + 1), path, "o-", color=MUON, linewidth=1.6, markersize=7)
    axes.set(ylim=(0.5, 1.3))
    figure.tight_layout()
    said = ", ".join(f"{value:.2f}" for value in path[2:7])
    alt = f"1 goes to {path[1]:.3f}, then {said}. It never settles: {path[-1]:.2f} at step {steps}."
    return finish(figure, "five_products-one", alt)


def draw_scope(step: int, spectrum: str) -> Picture:
    """Left, the polynomial after ``step`` steps, with marks at a spectrum's values; right, that spectrum."""
    starts = spectra()[spectrum]
    ends = polynomial(starts, step)
    figure = card(740, 370)
    left, right = (figure.add_axes((x, 0.15, width, 0.74)) for x, width in ((0.085, 0.5), (0.665, 0.32)))
    style(left, _say_step(step), "where a value began", "where it is now")
    _draw_polynomial(left, starts, step)
    style(right, "The spectrum now", "direction, the loudest first", "")
    places = range(1, len(starts) + 1)
    right.plot(places, starts.tolist(), color=QUIET, linewidth=1.4, linestyle=":")
    right.text(3, starts[2].item() + 0.03, "before", size=11, color=QUIET)
    right.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    right.plot(places, ends.sort(descending=True).values.tolist(), "o", color=MUON, markersize=5, alpha=0.7)
    right.set(ylim=(0, 1.3))
    said = _describe_scope(step, spectrum, starts, ends)
    return finish(figure, f"five_products-scope-{step}-{spectrum}", said)


def _say_step(step: int) -> str:
    return {0: "Before the first step", 1: "After 1 step"}.get(step, f"After {step} steps")


def _draw_polynomial(axes: Axes, starts: Tensor, step: int) -> None:
    quiet = torch.logspace(math.log10(_START), -1, 241, dtype=torch.float64)
    x = torch.cat((quiet, torch.linspace(0.1, 1, 301, dtype=torch.float64)[1:]))  # dense where it swings
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    axes.plot(x.tolist(), polynomial(x, step).tolist(), color=INK, linewidth=1.4)
    shown = starts.clamp(min=_START)
    axes.plot(shown.tolist(), polynomial(shown, step).tolist(), "o", color=MUON, markersize=5, alpha=0.7)
    axes.set(xscale="log", xlim=(_START, 1.15), ylim=(0, 1.3))
    axes.set_xticks([1e-4, 1e-3, 1e-2, 0.1, 1], ["0.0001", "0.001", "0.01", "0.1", "1"])
    axes.minorticks_off()


def _describe_scope(step: int, spectrum: str, starts: Tensor, ends: Tensor) -> str:
    above = int((ends > 1).sum())
    return (
        f"{_say_step(step)}, for {SPECTRA[spectrum]}: the {len(ends)} singular values, which began between "
        f"{starts.min():.2g} and {starts.max():.2g}, lie between {ends.min():.2g} and {ends.max():.2g}; "
        f"{above} of them lie above 1."
    )


def draw_film() -> Picture:
    starts = spectra()["gradient"]
    figure, said = card(820, 530), []
    for step in range(SCOPE_STEPS + 1):
        x, y = "where a value began" * (step >= 3), "where it is now" * (step % 3 == 0)
        axes = style(figure.add_subplot(2, 3, step + 1), _say_step(step), x, y)
        _draw_polynomial(axes, starts, step)
        axes.set_xticks([1e-4, 1e-2, 1], ["0.0001", "0.01", "1"])
        said.append(_describe_scope(step, "gradient", starts, polynomial(starts, step)))
    figure.tight_layout()
    return finish(figure, "five_products-film", " ".join(said))


def microscope(live: bool = True) -> Shell | Picture:
    """The polynomial and a spectrum, with a slider for the step and a button per spectrum."""
    spectrum = choice("spectrum", list(SPECTRA))
    return show(draw_scope, draw_film(), live, step=slider("step", last=SCOPE_STEPS), spectrum=spectrum)


FRAMES = 3
"""Frames per step."""
_TOP = 1.5
_KINDS = ("a", 2.0, 4.0, 0.25), ("b", -5.0, -1.5, 0.25), ("c", 0.5, 2.5, 0.25)
Players = list[tuple[str, Coefficients, str]]
"""Names, coefficients and colours."""


def duel(live: bool = True) -> Shell | Picture:
    """A film: the reader's a, b and c, chosen by sliders, against published ones."""
    sliders = {}
    for start, (name, low, high, by) in zip(KELLER_JORDAN, _KINDS, strict=True):
        steps = (round(low + by * each, 2) for each in range(round((high - low) / by) + 1))
        options = [(f"{value:g}", value) for value in sorted({*steps, start})]
        look = {"options": options, "value": start, "description": name, **slider_look()}
        sliders[name] = ipywidgets.SelectionSlider(**look)
    rival = choice("against", list(PUBLISHED), width=116)
    classical = (2.0, -1.5, 0.5)  # they sum to 1, so 1 stays at 1; quiet values grow slowly
    still, last = draw_still(classical), FRAMES * SCOPE_STEPS
    return play(draw_bounce, last, still, live, interval=180, **sliders, rival=rival)


def draw_bounce(moment: int, a: float, b: float, c: float, rival: str) -> Picture:
    """Both players' values at a moment, which may lie between two steps, and their scores."""
    players: Players = [("yours", (a, b, c), OTHER), (rival, PUBLISHED[rival], MUON)]
    step, part = divmod(moment, FRAMES)
    figure = card(700, 320)
    said = []
    for number, player in enumerate(players):
        axes = figure.add_axes((0.07 + 0.49 * number, 0.1, 0.43, 0.78))
        said.append(_draw_player(axes, *player, step, part / FRAMES))
    text = f"Step {moment / FRAMES:.3g}. With a = {a:g}, b = {b:g}, c = {c:g}: {said[0]}; {rival}: {said[1]}."
    return finish(figure, "five_products-bounce", text)


def draw_still(triple: Triple) -> Picture:
    """Where values are after five steps, for one triple and for every published set, with scores."""
    players: Players = [(", ".join(f"{x:g}" for x in triple), triple, OTHER)]
    players += [(name, triples, MUON) for name, triples in PUBLISHED.items() if name != "CANS"]
    figure, said = card(700, 520), []
    for number, player in enumerate(players):
        axes = figure.add_subplot(2, 2, number + 1)
        said.append(f"{player[0]}: {_draw_player(axes, *player, SCOPE_STEPS, 0.0)}")
    figure.tight_layout()
    return finish(figure, "five_products-bounce-still", f"After {SCOPE_STEPS} steps. {'; '.join(said)}.")


def _draw_player(axes: Axes, name: str, triples: Coefficients, colour: str, step: int, part: float) -> str:
    starts = spectra()["gradient"]
    now, trail = _glide(starts, triples, step, part), _glide(starts, triples, step, 0.0)
    score = mean_distance(starts, triples)
    at_end = f"{score:.3f} from 1" if score < 100 else "flies off"
    style(axes, f"{name}: {at_end}", "", "")
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    places = range(1, len(starts) + 1)
    shown, begun = (values.clamp(0, _TOP).tolist() for values in (now, trail))
    axes.vlines(places, begun, shown, color=colour, linewidth=0.8, alpha=0.5)
    axes.plot(places, shown, "o", color=colour, markersize=5.5, alpha=0.8, clip_on=False)
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


def _glide(starts: Tensor, triples: Coefficients, step: int, part: float) -> Tensor:
    """Values between one step and the next; they start and stop slowly."""
    every = coefficients_per_step(triples, SCOPE_STEPS)
    here = polynomial(starts, step, every[:step]) if step else starts
    if part == 0:
        return here.nan_to_num(1e9, 1e9, 0).clamp(0, 1e9)
    there = polynomial(here, 1, every[step])
    eased = part * part * (3 - 2 * part)
    return torch.lerp(here, there, eased).nan_to_num(1e9, 1e9, 0).clamp(0, 1e9)
