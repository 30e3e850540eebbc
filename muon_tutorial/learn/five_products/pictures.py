"""Pictures of lesson 02: a spectrum before and after, the microscope, and published coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...newton_schulz import CANS, KELLER_JORDAN, POLAR_EXPRESS, YOU_JIACHENG, with_safety
from ..pictures.colours import ADAMW, INK, MUON, OTHER, QUIET, SGD
from ..pictures.picture import Picture, finish, rectangle
from ..pictures.spectra import Curve, card, draw_spectra, style
from ..widgets.reveal import FoldedPicture
from ..widgets.shell import Shell, choice, show, slider
from .singular_values import QUIET_START, SCOPE_STEPS, SPECTRA, Step, newton_schulz_step, polynomial, spectra

__all__ = ["FoldedPicture"]  # the notebook uses it, too

_START = 1e-4


def picture_before_after(G: Tensor, steps: int, step: Step = newton_schulz_step) -> Picture:
    """The spectrum of a matrix before and after ``steps`` steps, and what an SVD would make of it."""
    X = (G if G.shape[0] <= G.shape[1] else G.T) / G.norm()
    before, Y = torch.linalg.svdvals(X), X
    for _ in range(steps):
        Y = step(Y, *KELLER_JORDAN)
    curves = [
        Curve.of("before", before, ADAMW),
        Curve.of(f"after Newton–Schulz, {steps} steps", torch.linalg.svdvals(Y), OTHER),
        Curve.of("U Vᵀ, by SVD", torch.ones(len(before)), MUON, "--"),
    ]
    return draw_spectra(
        [("The singular values of a real gradient", curves)], f"five_products-before-after-{steps}"
    )


def draw_scope(step: int, spectrum: str) -> Picture:
    """The polynomial after ``step`` steps with a spectrum's values on it, and beside it that spectrum."""
    starts = spectra()[spectrum]
    ends = polynomial(starts, step)
    figure = card(810, 370)
    left, right = (figure.add_axes((x, 0.14, width, 0.74)) for x, width in ((0.075, 0.5), (0.65, 0.33)))
    style(left, _say_step(step), "where a value began", "where it is now")
    _draw_polynomial(left, starts, step)
    style(right, "The spectrum now", "direction, the loudest first", "")
    places = range(1, len(starts) + 1)
    right.plot(places, starts.tolist(), color=QUIET, linewidth=1.4, linestyle=":")
    right.text(3, starts[2].item() + 0.03, "before", size=8.5, color=QUIET)
    right.axhspan(0.68, 1.2, color="#e3f1ea", zorder=0)
    right.axhline(1, color=MUON, linewidth=1.2, linestyle="--")
    right.plot(places, ends.sort(descending=True).values.tolist(), "o", color=ADAMW, markersize=5, alpha=0.7)
    right.set(ylim=(0, 1.3))
    return finish(
        figure, f"five_products-scope-{step}-{spectrum}", _describe_scope(step, spectrum, starts, ends)
    )


def _say_step(step: int) -> str:
    return {0: "Before the first step", 1: "After 1 step"}.get(step, f"After {step} steps")


def _draw_polynomial(axes: Axes, starts: Tensor, step: int) -> None:
    quiet = torch.logspace(math.log10(_START), -1, 241, dtype=torch.float64)
    x = torch.cat((quiet, torch.linspace(0.1, 1, 301, dtype=torch.float64)[1:]))  # close where it swings most
    rectangle(axes, _START, 0.68, 1, 0.52, "#e3f1ea", edgecolor="none", zorder=0)
    axes.axhline(1, color=MUON, linewidth=1.2, linestyle="--")
    axes.plot(x.tolist(), polynomial(x, step).tolist(), color=INK, linewidth=1.4)
    shown = starts.clamp(min=_START)
    axes.plot(shown.tolist(), polynomial(shown, step).tolist(), "o", color=ADAMW, markersize=5, alpha=0.7)
    _scale(axes)


def _describe_scope(step: int, spectrum: str, starts: Tensor, ends: Tensor) -> str:
    inside = int(((ends >= 0.68) & (ends <= 1.21)).sum())
    return (
        f"{_say_step(step)}, for {SPECTRA[spectrum]}: the {len(ends)} singular values, which began between "
        f"{starts.min():.2g} and {starts.max():.2g}, lie between {ends.min():.2g} and {ends.max():.2g}; "
        f"{inside} of them lie between 0.68 and 1.2."
    )


def draw_film(spectrum: str = "gradient") -> Picture:
    """The polynomial with a spectrum's values on it, before and after each of the steps."""
    starts = spectra()[spectrum]
    figure, said = card(820, 490), []
    for step in range(SCOPE_STEPS + 1):
        x, y = "where a value began" * (step >= 3), "where it is now" * (step % 3 == 0)
        _draw_polynomial(style(figure.add_subplot(2, 3, step + 1), _say_step(step), x, y), starts, step)
        said.append(_describe_scope(step, spectrum, starts, polynomial(starts, step)))
    figure.tight_layout()
    return finish(figure, "five_products-film", " ".join(said))


def microscope(live: bool = True) -> Shell | Picture:
    """A slider through the steps and a button for each spectrum, over the polynomial and the spectrum."""
    spectrum = choice("spectrum", {name: name for name in SPECTRA})
    return show(draw_scope, draw_film(), live, step=slider("step", last=SCOPE_STEPS), spectrum=spectrum)


VARIANTS: dict[str, tuple[Sequence[tuple[float, float, float]], str]] = {
    "Keller Jordan": ((KELLER_JORDAN,) * SCOPE_STEPS, ADAMW),
    "YouJiacheng": (YOU_JIACHENG, SGD),
    "Polar Express": (with_safety(POLAR_EXPRESS, 1.01), MUON),
    "CANS": (CANS, OTHER),
}


def picture_of_variants() -> Picture:
    """Where five steps bring a value, for four published sets of coefficients."""
    figure = card(820, 460)
    x = torch.logspace(math.log10(_START), 0, 1201, dtype=torch.float64)
    said = []
    for number, (name, (triples, colour)) in enumerate(VARIANTS.items()):
        y = polynomial(x, SCOPE_STEPS, triples)
        axes = style(figure.add_subplot(2, 2, number + 1), name, "where a value began", "where it ends")
        axes.axhline(1, color=MUON, linewidth=1.2, linestyle="--")
        axes.plot(x.tolist(), y.tolist(), color=colour, linewidth=1.4)
        _scale(axes)
        common = y[x >= QUIET_START]
        said.append(f"{name}: from {QUIET_START} on, between {common.min():.2f} and {common.max():.2f}")
    figure.tight_layout()
    return finish(
        figure,
        "five_products-variants",
        f"Where five steps bring a singular value. {'; '.join(said)}.",
    )


def _scale(axes: Axes) -> None:
    axes.set(xscale="log", xlim=(_START, 1.15), ylim=(0, 1.3))
    axes.set_xticks([1e-4, 1e-3, 1e-2, 0.1, 1], ["0.0001", "0.001", "0.01", "0.1", "1"])
    axes.minorticks_off()
