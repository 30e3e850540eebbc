"""What notebook 02 imports: Newton–Schulz as a polynomial of singular values, a microscope, exercises.

Everything but the timings is float64: the same pictures on every machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from ...newton_schulz import (
    CANS,
    KELLER_JORDAN,
    POLAR_EXPRESS,
    YOU_JIACHENG,
    Coefficients,
    coefficients_per_step,
    with_safety,
    zeropower_via_newtonschulz,
)
from ..checks.exercise import Exercise, MistakeError, numbers, value_of
from ..inputs import measure
from ..inputs.recordings import real_gradient
from ..lesson01 import svd_muon
from ..pictures.picture import INK, QUIET, Picture, finish
from ..pictures.spectra import BLUE, GREEN, ORANGE, PLUM, Curve, card, draw_spectra, style
from ..widgets.shell import Shell, choice, show, slider

SCOPE_STEPS = 5
QUIET_START = 0.01
_START = 1e-4

Step = Callable[[Tensor, float, float, float], Tensor]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest of some singular values."""

    lowest: float
    highest: float


def polynomial(values: Tensor, steps: int, coefficients: Coefficients = KELLER_JORDAN) -> Tensor:
    """Where ``steps`` steps of Newton–Schulz bring singular values, by plain arithmetic.

    >>> polynomial(torch.tensor([1.0]), 1)
    tensor([0.7010])
    """
    for a, b, c in coefficients_per_step(coefficients, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def newton_schulz_step(X: Tensor, a: float, b: float, c: float) -> Tensor:
    """One step: ``aX + (bA + cA²)X`` for ``A = XXᵀ``. The reference of the exercise."""
    A = X @ X.T
    return a * X + (b * A + c * A @ A) @ X


@functools.cache
def spectra() -> Mapping[str, Tensor]:
    """Singular values to put under the microscope, each divided by its Frobenius norm."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(64, 256, generator=generator, dtype=torch.float64)
    square = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    steep = torch.arange(1, 65, dtype=torch.float64) ** -1.5
    found = {
        "gradient": torch.linalg.svdvals(real_gradient().matrix),
        "random": torch.linalg.svdvals(gaussian),
        "square": torch.linalg.svdvals(square),
        "steep": steep,
    }
    return MappingProxyType({name: values / values.norm() for name, values in found.items()})


SPECTRA = {
    "gradient": "a recorded gradient",
    "random": "a random 64 × 256 matrix",
    "square": "a random 64 × 64 matrix",
    "steep": "values that fall as 1 / k to the power 1.5",
}


# --- the exercises


def guess_one() -> Exercise:
    """The prediction: where does a singular value of exactly 1 go in one step?"""
    right = sum(KELLER_JORDAN)

    def judge(where: object) -> str | None:
        if not isinstance(where, (int, float)):
            return "Give a number."
        if math.isclose(where, right, abs_tol=0.006):
            return None
        if where == 1:
            return "It would stay at 1 only if a + b + c were 1."
        return f"{where:g} is not it."

    return Exercise(
        judge,
        ("Put s = 1 into a·s + b·s³ + c·s⁵.",),
        "Even a perfect value is pushed away from 1. Nothing in this polynomial aims at 1 exactly.",
    )


def write_step() -> Exercise:
    """The exercise: one step of Newton–Schulz, for wide and square matrices and any coefficients."""

    def judge(function: Step) -> str | None:
        generator = torch.Generator().manual_seed(0)
        for shape in ((3, 5), (4, 4)):
            for triple in (KELLER_JORDAN, (2.0, -1.5, 0.5)):
                X = torch.randn(shape, generator=generator, dtype=torch.float64)
                wrong = _judge_step(X / X.norm(), function, triple)
                if wrong:
                    return wrong
        return None

    hints = (
        "a * X is the first part. What stands before X in the other two can be added up first.",
        "A² is A @ A, not A * A. Then (b * A + c * A @ A) @ X.",
    )
    return Exercise(
        judge,
        hints,
        "No direction was ever looked for. Written with A, a step is three products of matrices.",
    )


def _judge_step(X: Tensor, function: Step, triple: tuple[float, float, float]) -> str | None:
    given = X.clone()
    rows, columns = X.shape
    try:
        value = value_of(function, given, *triple)
    except MistakeError as mistake:
        sizes = f"Here X is {rows} × {columns}, and A = X @ X.T is {rows} × {rows}."
        raise MistakeError(f"{mistake} {sizes}") from None
    if value is None:
        return "The function returns nothing. Is there a return?"
    if not isinstance(value, Tensor) or value.shape != X.shape:
        shape = " × ".join(map(str, getattr(value, "shape", ()))) or type(value).__name__
        return f"X is {rows} × {columns}, and so must the result be. Yours is {shape}."
    if not torch.equal(given, X):
        return "The function has changed X itself. Make a new matrix."
    if torch.allclose(value, newton_schulz_step(X, *triple)):
        return None
    return next((said for wrong, said in _wrong_steps(X, *triple) if torch.allclose(value, wrong)), _OTHER)


_OTHER = "The values are not those of aX + bAX + cA²X."


def _wrong_steps(X: Tensor, a: float, b: float, c: float) -> list[tuple[Tensor, str]]:
    A = X @ X.T
    return [
        (a * X + (b * A + c * A * A) @ X, "A * A squares each number. A² is the matrix product A @ A."),
        (a * X + b * A @ X, "The last part, with c, is missing."),
        ((b * A + c * A @ A) @ X, "The first part, a * X, is missing."),
        (a * X + (c * A + b * A @ A) @ X, "b and c have changed places: b goes with A, c with A @ A."),
        (a * X + (b * A + c * A @ A @ A) @ X, "That is A³, which makes seventh powers. c goes with A @ A."),
        (a * X + b * X**3 + c * X**5, "X**3 cubes each number. X³ here is X @ X.T @ X."),
    ]


def bounds_after(steps: int, start: float = QUIET_START) -> Bounds:
    """Between which values everything ends that began between ``start`` and 1."""
    ends = polynomial(torch.linspace(start, 1, 200_001, dtype=torch.float64), steps)
    return Bounds(ends.min().item(), ends.max().item())


def bound_values(steps: int) -> Exercise:
    """The exercise: the tightest bounds, after ``steps`` steps, of what began at ``QUIET_START`` or above."""
    right = bounds_after(steps)
    starts = torch.linspace(QUIET_START, 1, 200_001, dtype=torch.float64)
    ends = polynomial(starts, steps)

    def judge(lowest: object, highest: object) -> str | None:
        low, high = _number(lowest), _number(highest)
        if low > right.lowest + 0.006:
            start = starts[ends.argmin()]
            return f"A value that begins at {start:.3f} ends at {right.lowest:.3f}, below {low:g}."
        if high < right.highest - 0.006:
            start = starts[ends.argmax()]
            return f"A value that begins at {start:.3f} ends at {right.highest:.3f}, above {high:g}."
        if low < right.lowest - 0.006:
            return f"Nothing that began at {QUIET_START} or above ends near {low:g}. lowest can be larger."
        if high > right.highest + 0.006:
            return f"Nothing that began at {QUIET_START} or above ends near {high:g}. highest can be smaller."
        return None

    hints = (
        "You need no matrix: take many numbers s and put them through the polynomial, again and again.",
        f"s = torch.linspace({QUIET_START}, 1, 100_001), then for each step s = a * s + b * s**3 + c * s**5.",
    )
    praise = (
        f"Whatever began at {QUIET_START} or above is now between {right.lowest:.2f} and {right.highest:.2f}."
    )
    return Exercise(judge, hints, praise)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise MistakeError("Give two numbers.") from None


def quiz(steps: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    expected = {"one": sum(KELLER_JORDAN), "growth": KELLER_JORDAN[0] ** steps, "products": 3.0 * steps}
    why = {
        "one": "Put s = 1 into the polynomial, once.",
        "growth": "For a tiny s only a·s counts: each step multiplies it by a.",
        "products": "Count the @ in your step: X @ X.T, A @ A, (...) @ X. Then count the steps.",
    }
    return numbers(expected, why, within=0.01)


# --- the pictures


def picture_before_after(G: Tensor, steps: int, step: Step = newton_schulz_step) -> Picture:
    """The spectrum of a matrix before and after ``steps`` steps, and what an SVD would make of it."""
    X = (G if G.shape[0] <= G.shape[1] else G.T) / G.norm()
    before, Y = torch.linalg.svdvals(X), X
    for _ in range(steps):
        Y = step(Y, *KELLER_JORDAN)
    curves = [
        Curve.of("before", before, BLUE),
        Curve.of(f"after Newton–Schulz, {steps} steps", torch.linalg.svdvals(Y), PLUM),
        Curve.of("U Vᵀ, by SVD", torch.ones(len(before)), GREEN, "--"),
    ]
    return draw_spectra(
        [("The singular values of a real gradient", curves)], f"lesson02-before-after-{steps}"
    )


def draw_scope(step: int, spectrum: str) -> Picture:
    """The polynomial after ``step`` steps with a spectrum's values on it, and beside it that spectrum."""
    starts = spectra()[spectrum]
    ends = polynomial(starts, step)
    figure = card(810, 370)
    left = style(
        figure.add_axes((0.075, 0.14, 0.5, 0.74)), _say_step(step), "where a value began", "where it is now"
    )
    _draw_polynomial(left, starts, step)
    right = style(
        figure.add_axes((0.65, 0.14, 0.33, 0.74)), "The spectrum now", "direction, the loudest first", ""
    )
    _draw_dots(right, starts, ends)
    return finish(figure, f"lesson02-scope-{step}-{spectrum}", _describe_scope(step, spectrum, starts, ends))


def _say_step(step: int) -> str:
    return {0: "Before the first step", 1: "After 1 step"}.get(step, f"After {step} steps")


def _draw_polynomial(axes: Axes, starts: Tensor, step: int) -> None:
    x = _starts()
    band = Rectangle((_START, 0.68), 1, 0.52, facecolor="#e3f1ea", edgecolor="none", zorder=0)
    axes.add_patch(band)
    axes.axhline(1, color=GREEN, linewidth=1.2, linestyle="--")
    axes.plot(x.tolist(), polynomial(x, step).tolist(), color=INK, linewidth=1.4)
    shown = starts.clamp(min=_START)
    axes.plot(
        shown.tolist(),
        polynomial(shown, step).tolist(),
        "o",
        color=BLUE,
        markersize=5,
        alpha=0.7,
    )
    _scale(axes)


def _draw_dots(axes: Axes, starts: Tensor, ends: Tensor) -> None:
    places = list(range(1, len(starts) + 1))
    axes.plot(places, starts.tolist(), color=QUIET, linewidth=1.4, linestyle=":")
    axes.text(3, starts[2].item() + 0.03, "before", size=8.5, color=QUIET)
    axes.axhspan(0.68, 1.2, color="#e3f1ea", zorder=0)
    axes.axhline(1, color=GREEN, linewidth=1.2, linestyle="--")
    axes.plot(places, ends.sort(descending=True).values.tolist(), "o", color=BLUE, markersize=5, alpha=0.7)
    axes.set(ylim=(0, 1.3))


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
    figure = card(820, 490)
    for step in range(SCOPE_STEPS + 1):
        axes = style(
            figure.add_subplot(2, 3, step + 1), _say_step(step), "", "where it is now" * (step % 3 == 0)
        )
        _draw_polynomial(axes, starts, step)
        if step >= 3:
            axes.set_xlabel("where a value began", fontsize=9, color=QUIET)
    figure.tight_layout()
    said = [
        _describe_scope(step, spectrum, starts, polynomial(starts, step)) for step in range(SCOPE_STEPS + 1)
    ]
    return finish(figure, "lesson02-film", " ".join(said))


def microscope(live: bool = True) -> Shell | Picture:
    """A slider through the steps and a button for each spectrum, over the polynomial and the spectrum."""
    spectrum = choice("spectrum", {name: name for name in SPECTRA})
    return show(draw_scope, draw_film(), live, step=slider("step", last=SCOPE_STEPS), spectrum=spectrum)


VARIANTS: dict[str, tuple[Sequence[tuple[float, float, float]], str]] = {
    "Keller Jordan": ((KELLER_JORDAN,) * SCOPE_STEPS, BLUE),
    "YouJiacheng": (YOU_JIACHENG, ORANGE),
    "Polar Express": (with_safety(POLAR_EXPRESS, 1.01), GREEN),
    "CANS": (CANS, PLUM),
}


def picture_of_variants() -> Picture:
    """Where five steps bring a value, for four published sets of coefficients."""
    figure = card(820, 460)
    x = torch.logspace(math.log10(_START), 0, 1201, dtype=torch.float64)
    said = []
    for number, (name, (triples, colour)) in enumerate(VARIANTS.items()):
        y = polynomial(x, SCOPE_STEPS, triples)
        axes = style(figure.add_subplot(2, 2, number + 1), name, "where a value began", "where it ends")
        axes.axhline(1, color=GREEN, linewidth=1.2, linestyle="--")
        axes.plot(x.tolist(), y.tolist(), color=colour, linewidth=1.4)
        _scale(axes)
        common = y[x >= QUIET_START]
        said.append(f"{name}: from {QUIET_START} on, between {common.min():.2f} and {common.max():.2f}")
    figure.tight_layout()
    return finish(figure, "lesson02-variants", f"Where five steps bring a singular value. {'; '.join(said)}.")


def _starts() -> Tensor:
    """Points for a curve: close where it swings most."""
    quiet = torch.logspace(math.log10(_START), -1, 241, dtype=torch.float64)
    return torch.cat((quiet, torch.linspace(0.1, 1, 301, dtype=torch.float64)[1:]))


def _scale(axes: Axes) -> None:
    axes.set(xscale="log", xlim=(_START, 1.15), ylim=(0, 1.3))
    axes.set_xticks([1e-4, 1e-3, 1e-2, 0.1, 1], ["0.0001", "0.001", "0.01", "0.1", "1"])
    axes.minorticks_off()


class Fold:
    """A picture behind a line that opens it."""

    def __init__(self, title: str, picture: Picture) -> None:
        self.title, self.picture = title, picture

    def _repr_html_(self) -> str:
        return f"<details><summary>{self.title}</summary>{self.picture.html}</details>"

    def __repr__(self) -> str:
        return repr(self.picture)


# --- the measurement


@dataclass(frozen=True, slots=True)
class Row:
    """After some steps: how far from ``U Vᵀ`` (as a part of its norm), and seconds from the start."""

    steps: int
    error: float
    seconds: float


def measure_steps(G: Tensor, last: int, times: int = 5) -> list[Row]:
    """Error and time of bf16 Newton–Schulz on ``G`` after 0 to ``last`` steps, on one thread."""
    exact, G = svd_muon(G).float(), G.float()
    rows = []
    with measure.one_thread():
        for steps in range(last + 1):
            work = _work(G, steps)
            error = (work().float() - exact).norm() / exact.norm()
            rows.append(Row(steps, error.item(), measure.median_seconds(work, times)))
    return rows


def _work(G: Tensor, steps: int) -> Callable[[], Tensor]:
    return lambda: zeropower_via_newtonschulz(G, steps)


def say_steps(rows: Sequence[Row], G: Tensor) -> str:
    """The measurement as a table, with the SVD's time below."""
    with measure.one_thread():
        svd = measure.median_seconds(lambda: svd_muon(G.float()), 3)
    lines = ["steps   distance from U Vᵀ   time"]
    lines += [f"{row.steps:>5}   {row.error:>18.2f}   {row.seconds * 1e3:.2f} ms" for row in rows]
    return "\n".join([*lines, f"  SVD   {0:>18.2f}   {svd * 1e3:.2f} ms"])


def only_values_moved(X: Tensor, Y: Tensor) -> bool:
    """Whether ``Y`` has the directions of ``X``: between them, it is diagonal."""
    U, _, Vt = torch.linalg.svd(X, full_matrices=False)
    inside = U.T @ Y @ Vt.T
    return torch.allclose(inside, torch.diag(inside.diag()), atol=1e-9)


def say_bounds(X: Tensor, Y: Tensor, bounds: Bounds) -> str:
    """How many of the values that began at ``QUIET_START`` or above are within the bounds now."""
    before, after = (torch.linalg.svdvals(matrix) for matrix in (X, Y))
    loud = int((before >= QUIET_START).sum())
    inside = int(((after >= bounds.lowest - 1e-6) & (after <= bounds.highest + 1e-6)).sum())
    return (
        f"{loud} of {len(before)} values began at {QUIET_START} or above;\n"
        f"{inside} of {len(after)} are between {bounds.lowest:.2f} and {bounds.highest:.2f} now."
    )
