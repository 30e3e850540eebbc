"""A recipe (one way to orthogonalize) as plain data. A recipe that could explode raises an error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from ..errors import UsageError
from .completed_squares import completed_squares

Polynomial: TypeAlias = tuple[float, ...]
"""(a, b, c, …): an iteration replaces each singular value x by ax + bx³ + cx⁵ + …"""

Form = Literal["direct", "gram"]
Scaling = Literal["frobenius", "schatten", "rows"]

LARGEST = 1.45
"""No recipe may make a singular value larger than this."""

MARGIN = 1.01
"""After rounding to bf16, singular values may be as large as this, so polynomials are checked up to it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to orthogonalize: one polynomial per step (its coefficients), and how steps are computed.

    ``form``: ``"direct"`` iterates on the matrix; ``"gram"`` iterates on the small matrix XXᵀ and multiplies
    the large one once at the end, if that takes fewer operations. ``dtype``: the dtype of products and
    iterates. As in ``torch.optim.Muon``, the input is first rounded to bf16, and the result is rounded to
    bf16 too. In float32 the number of threads may change the last bits; in bfloat16 it does not. ``scaling``:
    the number by which the matrix is divided first. ``"frobenius"``: its Frobenius norm. ``"schatten"``: the
    Schatten 4-norm ‖XXᵀ‖^½, which is closer to the largest singular value. ``"rows"``: a different number for
    each row (arXiv 2208.03160, as in Turbo-Muon, arXiv 2512.04632), which also changes the singular vectors.
    ``source``: where the coefficients were published.

    Raises:
        UsageError: the recipe could explode, or cannot be computed in its form and dtype.
    """

    name: str
    source: str
    coefficients: tuple[Polynomial, ...]
    form: Form = "direct"
    dtype: torch.dtype = torch.bfloat16
    scaling: Scaling = "frobenius"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise UsageError(f"{self.name}: products are computed in bfloat16 or float32, not {self.dtype}")
        lengths = (3, 5, 9) if self.dtype is torch.float32 else (3, 4, 5)
        if not all(len(polynomial) in lengths for polynomial in self.coefficients):
            degrees = ", ".join(str(2 * length - 1) for length in lengths)
            raise UsageError(f"{self.name}: a step's degree is one of {degrees} in {self.dtype}")
        if self.dtype is torch.float32:
            for polynomial in self.coefficients:
                completed_squares(polynomial)  # raises an error if there are none
        if self.form == "gram" and self.dtype is torch.bfloat16:
            raise UsageError(
                f"{self.name}: iterating on XXᵀ in bfloat16 explodes on ill-conditioned matrices, and drifts "
                "even when restarted: use dtype=torch.float32 with form='gram'"
            )
        if not peak(self.coefficients) <= LARGEST:
            raise UsageError(
                f"{self.name}: its polynomials map a singular value in [0, {MARGIN}] to "
                f"{peak(self.coefficients):.3g}, which is above {LARGEST}: "
                "give them a safety factor (with_safety)"
            )

    def iterates_on_gram(self, rows: int, columns: int, share: float = 1.0) -> bool:
        """Whether the form allows iterating on the Gram matrix, and this saves operations for the shape.

        ``share``: the fraction of operations that is computed for a symmetric product.
        """
        if self.form == "direct":
            return False
        return flops(self, rows, columns, "gram", share) < flops(self, rows, columns, "direct", share)


def flops(recipe: Recipe, rows: int, columns: int, form: Form, share: float = 1.0) -> float:
    """Return the floating-point operations of all products for one matrix, in a given form."""
    n, steps = min(rows, columns), len(recipe.coefficients)
    square, long = 2 * n**3, 2 * n**2 * max(rows, columns)
    powers = sum(math.ceil(math.log2(len(polynomial) - 1)) for polynomial in recipe.coefficients)
    if form == "direct":
        return steps * (share * long + long) + share * powers * square
    return share * (long + (powers + 3 * (steps - 1)) * square) + long


def peak(coefficients: tuple[Polynomial, ...], points: int = 20_000) -> float:
    """Return the largest magnitude that the polynomials, applied in turn, give for values in [0, 1.01]."""
    values = torch.linspace(0, MARGIN, points, dtype=torch.float64)
    for polynomial in coefficients:
        values = sum((c * values ** (2 * i + 1) for i, c in enumerate(polynomial)), torch.zeros(()))
    return float(values.abs().nan_to_num(nan=torch.inf).max())
