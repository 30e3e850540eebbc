"""Pictures of lesson 02: a gradient's values in all steps, the path of 1, and the microscope."""

from __future__ import annotations

import math

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ..pictures.colours import INK, MUON, QUIET
from ..pictures.picture import Picture, finish
from ..pictures.spectra import card, style
from ..widgets.shell import Shell, choice, show, slider
from .singular_values import SCOPE_STEPS, SPECTRA, polynomial, spectra

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
    above = int((ends > 1).sum())
    said = (
        f"{_say_step(step)}, for {SPECTRA[spectrum]}: the {len(ends)} singular values, which began between "
        f"{starts.min():.2g} and {starts.max():.2g}, lie between {ends.min():.2g} and {ends.max():.2g}; "
        f"{above} of them lie above 1."
    )
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


def microscope(live: bool = True) -> Shell | Picture:
    """The polynomial and a spectrum, with a slider for the step and a button per spectrum."""
    spectrum = choice("spectrum", list(SPECTRA))
    still = draw_scope(SCOPE_STEPS, "gradient")
    return show(draw_scope, still, live, step=slider("step", last=SCOPE_STEPS), spectrum=spectrum)
