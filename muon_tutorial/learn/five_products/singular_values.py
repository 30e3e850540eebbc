"""Lesson 02: Newton–Schulz as a polynomial of singular values (in float64), its cost and error; spectra."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ... import newton_schulz as package
from ...newton_schulz import KELLER_JORDAN, Coefficients, coefficients_per_step, zeropower_via_newtonschulz
from ...plan.assign import newton_schulz_cost
from ..inputs import measure
from ..inputs.recordings import real_gradient
from ..my_muon.reference import newton_schulz as newton_schulz  # the exercise's reference
from ..why_muon.updates import svd_muon

SCOPE_STEPS = 5
QUIET_START = 0.01
Step = Callable[[Tensor, float, float, float], Tensor]


def polynomial(values: Tensor, steps: int, coefficients: Coefficients = KELLER_JORDAN) -> Tensor:
    """Singular values after ``steps`` steps of Newton–Schulz, by scalar arithmetic."""
    for a, b, c in coefficients_per_step(coefficients, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def newton_schulz_step(X: Tensor, a: float, b: float, c: float) -> Tensor:
    """The exercise's reference: one step, ``aX + (bA + cA²)X`` with ``A = XXᵀ``."""
    A = X @ X.T
    return a * X + (b * A + c * A @ A) @ X


def flops(m: int, n: int, steps: int = SCOPE_STEPS) -> int:
    """Floating-point operations of all products for an m × n matrix. A multiply-add counts as two."""
    return steps * newton_schulz_cost((m, n))


PUBLISHED: Mapping[str, Sequence[package.Triple]] = {
    "Keller Jordan": (KELLER_JORDAN,) * SCOPE_STEPS,
    "YouJiacheng": package.YOU_JIACHENG,
    "Polar Express": package.with_safety(package.POLAR_EXPRESS, 1.01),
    "CANS": package.CANS,
}
"""Published coefficients of five steps; ``newton_schulz.py`` names their sources."""


def say_published() -> str:
    """For each set of coefficients: the mean and largest distance of values from 1, and where 0.001 goes."""
    lines = [f"{'':>13}  {'mean gap to 1':>13}  {'farthest from 1':>15}  {'0.001 goes to':>13}"]
    starts = torch.logspace(math.log10(QUIET_START), 0, 2001, dtype=torch.float64)
    for name, triples in PUBLISHED.items():
        quiet = polynomial(torch.tensor(0.001, dtype=torch.float64), SCOPE_STEPS, triples)
        mean = (polynomial(spectra()["gradient"], SCOPE_STEPS, triples) - 1).abs().mean()
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


def bounds_after(steps: int) -> tuple[float, float]:
    """The smallest and largest values after ``steps`` steps, if all began between ``QUIET_START`` and 1."""
    ends = polynomial(torch.linspace(QUIET_START, 1, 200_001, dtype=torch.float64), steps)
    return ends.min().item(), ends.max().item()


def measure_steps(G: Tensor, last: int, times: int = 5) -> list[tuple[float, float]]:
    """Relative error and seconds of bf16 Newton–Schulz on ``G`` after 0 to ``last`` steps, on one thread."""
    exact, G = svd_muon(G).float(), G.float()
    rows = []
    with measure.one_thread():
        for steps in range(last + 1):
            work = functools.partial(zeropower_via_newtonschulz, G, steps)
            error = (work().float() - exact).norm() / exact.norm()
            rows.append((error.item(), measure.median_seconds(work, times)))
    return rows


def say_steps(rows: Sequence[tuple[float, float]], G: Tensor) -> str:
    with measure.one_thread():
        svd = measure.median_seconds(lambda: svd_muon(G.float()), 3)
    lines = ["steps   distance from U Vᵀ   time"]
    lines += [f"{steps:>5}   {row[0]:>18.2f}   {row[1] * 1e3:.2f} ms" for steps, row in enumerate(rows)]
    return "\n".join([*lines, f"  SVD   {0:>18.2f}   {svd * 1e3:.2f} ms"])


def only_values_moved(X: Tensor, Y: Tensor) -> bool:
    """Whether ``Y`` has the singular vectors of ``X``, that is, whether ``Y`` is diagonal in their bases."""
    U, _, Vt = torch.linalg.svd(X, full_matrices=False)
    inside = U.T @ Y @ Vt.T
    return torch.allclose(inside, torch.diag(inside.diag()), atol=1e-9)


def say_starts(starts: Sequence[float], steps: int) -> str:
    """Values that begin too large, and where they are after each of ``steps`` steps."""
    lines = []
    for start in starts:
        begun = torch.tensor(start, dtype=torch.float64)
        ends = (f"{polynomial(begun, step).item():.3g}" for step in range(1, steps + 1))
        lines.append(" → ".join([f"{start:g}", *ends]))
    return "\n".join(lines)


def say_speed(G: Tensor, steps: int) -> str:
    """FLOPs of Newton–Schulz for a matrix, and how many per second this machine computes."""
    with measure.one_thread():
        seconds = measure.fastest(2, lambda: zeropower_via_newtonschulz(G.float(), steps))
    rows, columns = G.shape
    count = flops(rows, columns, steps)
    speed = f"{count / 1e6:.1f} MFLOP in {seconds * 1e3:.2f} ms, {count / seconds / 1e9:.0f} GFLOP/s"
    return f"{rows} × {columns}: {speed}"
