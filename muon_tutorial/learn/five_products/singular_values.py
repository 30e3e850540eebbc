"""Lesson 02: Newton–Schulz as a polynomial of singular values, spectra to apply it to, its cost and error.

Everything except the timings is float64, so the pictures are the same on every machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ...newton_schulz import (
    CANS,
    KELLER_JORDAN,
    POLAR_EXPRESS,
    YOU_JIACHENG,
    Coefficients,
    Triple,
    coefficients_per_step,
    with_safety,
    zeropower_via_newtonschulz,
)
from ..inputs import measure
from ..inputs.recordings import real_gradient
from ..my_muon.reference import newton_schulz as newton_schulz  # the exercise's reference
from ..why_muon.updates import svd_muon

SCOPE_STEPS = 5
QUIET_START = 0.01
Step = Callable[[Tensor, float, float, float], Tensor]


@dataclass(frozen=True, slots=True)
class ValueBounds:
    """The smallest and the largest of some singular values."""

    lowest: float
    highest: float


def polynomial(values: Tensor, steps: int, coefficients: Coefficients = KELLER_JORDAN) -> Tensor:
    """Singular values after ``steps`` steps of Newton–Schulz, by scalar arithmetic.

    >>> polynomial(torch.tensor([1.0]), 1)
    tensor([0.7010])
    """
    for a, b, c in coefficients_per_step(coefficients, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def newton_schulz_step(X: Tensor, a: float, b: float, c: float) -> Tensor:
    """The exercise's reference: one step, ``aX + (bA + cA²)X`` with ``A = XXᵀ``."""
    A = X @ X.T
    return a * X + (b * A + c * A @ A) @ X


def flops(m: int, n: int, steps: int = SCOPE_STEPS) -> int:
    """Floating-point operations of all products for an m × n matrix, with a multiply-add counted as two.

    >>> flops(64, 256, steps=1) == flops(256, 64, steps=1) == 4 * 64**2 * 256 + 2 * 64**3
    True
    """
    short, long = min(m, n), max(m, n)
    return steps * (4 * short**2 * long + 2 * short**3)


PUBLISHED: Mapping[str, Sequence[Triple]] = {
    "Keller Jordan": (KELLER_JORDAN,) * SCOPE_STEPS,
    "YouJiacheng": YOU_JIACHENG,
    "Polar Express": with_safety(POLAR_EXPRESS, 1.01),
    "CANS": CANS,
}
"""Published coefficients of five steps; ``newton_schulz.py`` names their sources."""


def mean_distance(values: Tensor, triples: Coefficients) -> float:
    """The mean distance of values from 1 after five steps."""
    return (polynomial(values, SCOPE_STEPS, triples) - 1).abs().mean().item()


def say_published() -> str:
    """The published sets on the recorded gradient's 64 values, on the worst from 0.01 to 1, and on 0.001."""
    lines = [f"{'':>13}  {'mean distance':>13}  {'farthest from 1':>15}  {'0.001 goes to':>13}"]
    starts = torch.logspace(math.log10(QUIET_START), 0, 2001, dtype=torch.float64)
    for name, triples in PUBLISHED.items():
        quiet = polynomial(torch.tensor(0.001, dtype=torch.float64), SCOPE_STEPS, triples)
        mean = mean_distance(spectra()["gradient"], triples)
        far = (polynomial(starts, SCOPE_STEPS, triples) - 1).abs().max()
        lines.append(f"{name:>13}  {mean:>13.3f}  {far:>15.3f}  {quiet:>13.2f}")
    return "\n".join(lines)


@functools.cache
def spectra() -> Mapping[str, Tensor]:
    """Spectra for the microscope: singular values, each divided by its matrix's Frobenius norm."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(64, 256, generator=generator, dtype=torch.float64)
    square = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    steep = torch.arange(1, 65, dtype=torch.float64) ** -1.5
    matrices = {"gradient": real_gradient().matrix, "random": gaussian, "square": square}
    found = {**{name: torch.linalg.svdvals(each) for name, each in matrices.items()}, "steep": steep}
    return MappingProxyType({name: values / values.norm() for name, values in found.items()})


SPECTRA = {
    "gradient": "a recorded gradient",
    "random": "a random 64 × 256 matrix",
    "square": "a random 64 × 64 matrix",
    "steep": "values that fall as 1 / k to the power 1.5",
}


def bounds_after(steps: int) -> ValueBounds:
    """The bounds after ``steps`` steps of all values that began between ``QUIET_START`` and 1."""
    ends = polynomial(torch.linspace(QUIET_START, 1, 200_001, dtype=torch.float64), steps)
    return ValueBounds(ends.min().item(), ends.max().item())


@dataclass(frozen=True, slots=True)
class StepsError:
    """The result of ``steps`` steps: its distance from ``U Vᵀ`` relative to the norm, and its seconds."""

    steps: int
    error: float
    seconds: float


def measure_steps(G: Tensor, last: int, times: int = 5) -> list[StepsError]:
    """Error and time of bf16 Newton–Schulz on ``G`` after 0 to ``last`` steps, on one thread."""
    exact, G = svd_muon(G).float(), G.float()
    rows = []
    with measure.one_thread():
        for steps in range(last + 1):
            work = functools.partial(zeropower_via_newtonschulz, G, steps)
            error = (work().float() - exact).norm() / exact.norm()
            rows.append(StepsError(steps, error.item(), measure.median_seconds(work, times)))
    return rows


def say_steps(rows: Sequence[StepsError], G: Tensor) -> str:
    """The measurement as a table, with the SVD's time in the last line."""
    with measure.one_thread():
        svd = measure.median_seconds(lambda: svd_muon(G.float()), 3)
    lines = ["steps   distance from U Vᵀ   time"]
    lines += [f"{row.steps:>5}   {row.error:>18.2f}   {row.seconds * 1e3:.2f} ms" for row in rows]
    return "\n".join([*lines, f"  SVD   {0:>18.2f}   {svd * 1e3:.2f} ms"])


def only_values_moved(X: Tensor, Y: Tensor) -> bool:
    """Whether ``Y`` has the singular vectors of ``X``: in their bases it is diagonal."""
    U, _, Vt = torch.linalg.svd(X, full_matrices=False)
    inside = U.T @ Y @ Vt.T
    return torch.allclose(inside, torch.diag(inside.diag()), atol=1e-9)


def say_starts(starts: Sequence[float], steps: int) -> str:
    """The paths of values that begin too large, after each of ``steps`` steps."""
    lines = []
    for start in starts:
        begun = torch.tensor(start, dtype=torch.float64)
        ends = (f"{polynomial(begun, step).item():.3g}" for step in range(1, steps + 1))
        lines.append(" → ".join([f"{start:g}", *ends]))
    return "\n".join(lines)


def say_speed(G: Tensor, steps: int) -> str:
    """FLOPs of Newton–Schulz for a matrix, and how many per second this machine computes."""
    with measure.one_thread():
        seconds = measure.median_seconds(lambda: zeropower_via_newtonschulz(G.float(), steps), 5)
    rows, columns = G.shape
    count = flops(rows, columns, steps)
    speed = f"{count / 1e6:.1f} MFLOP in {seconds * 1e3:.2f} ms, {count / seconds / 1e9:.0f} GFLOP/s"
    return f"{rows} × {columns}: {speed}"


def say_bounds(X: Tensor, Y: Tensor, bounds: ValueBounds) -> str:
    """How many values began at ``QUIET_START`` or above, and how many are within the bounds now."""
    before, after = (torch.linalg.svdvals(matrix) for matrix in (X, Y))
    loud = int((before >= QUIET_START).sum())
    inside = int(((after >= bounds.lowest - 1e-6) & (after <= bounds.highest + 1e-6)).sum())
    return (
        f"{loud} of {len(before)} values began at {QUIET_START} or above;\n"
        f"{inside} of {len(after)} are between {bounds.lowest:.2f} and {bounds.highest:.2f} now."
    )
