"""Evaluates a polynomial of a symmetric matrix by a few squarings, without other passes over its elements.

    U₀ = A + s      U₁ = c₁U₀² + t₁      Uᵢ = cᵢUᵢ₋₁² + bᵢUᵢ₋₂ + tᵢ

By completing squares, every polynomial of A of degree 2 or 4 can be written this way, and so can some of
degree 8. Each square is added to the buffer of Uᵢ₋₂, and tᵢ only to the diagonal. In bfloat16 these sums
would lose too many digits, so this module is for float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from ..errors import UsageError
from .products import symmetric_multiply

Coefficients = tuple[float, ...]
"""Coefficients of a polynomial in A, the constant first."""


@dataclass(frozen=True, slots=True)
class Squares:
    """``shift`` is s. Each of ``rounds`` is (c, b, t). The first round has no Uᵢ₋₂, so its b is 0."""

    shift: float
    rounds: tuple[tuple[float, float, float], ...] = ()

    def polynomial(self) -> Coefficients:
        """Return the coefficients of the polynomial that these squares evaluate, the constant first.

        >>> Squares(1.0, ((2.0, 0.0, 0.0), (1.0, 4.0, 0.5))).polynomial()  # (2(A + 1)²)² + 4(A + 1) + ½
        (8.5, 20.0, 24.0, 16.0, 4.0)
        """
        before: Coefficients = (0.0,)
        now: Coefficients = (self.shift, 1.0)
        for c, b, t in self.rounds:
            square = _times(now, now)
            padded = (*before, *(0.0,) * (len(square) - len(before)))
            after = [c * x + b * y for x, y in zip(square, padded, strict=True)]
            before, now = now, (after[0] + t, *after[1:])
        return now


@cache
def completed_squares(polynomial: Coefficients) -> Squares:
    """Write a polynomial of A of degree 2, 4 or 8 as squares.

    Raises:
        UsageError: a polynomial of degree 8 cannot be written as squares.

    >>> completed_squares((1.0, 2.0, 1.0))
    Squares(shift=1.0, rounds=((1.0, 0.0, 0.0),))
    >>> completed_squares((1.0, 4.0, 6.0, 4.0, 2.0)).polynomial()
    (1.0, 4.0, 6.0, 4.0, 2.0)
    """
    root = _root(polynomial)
    inner = Squares(root[0]) if len(root) == 2 else completed_squares(root)
    previous = Squares(inner.shift, inner.rounds[:-1]).polynomial() if inner.rounds else (1.0,)
    c = polynomial[-1]
    rest = [x - c * y for x, y in zip(polynomial, _times(root, root), strict=True)][: len(root) - 1]
    b = rest[len(previous) - 1] / previous[-1] if inner.rounds else 0.0
    found = Squares(inner.shift, (*inner.rounds, (c, b, rest[0] - b * previous[0])))
    largest = max(map(abs, polynomial))
    if any(abs(x - y) > 1e-9 * largest for x, y in zip(found.polynomial(), polynomial, strict=True)):
        raise UsageError(
            f"the polynomial {polynomial} of degree {len(polynomial) - 1} cannot be written as a chain of "
            "squares"
        )
    return found


def check_polynomial(polynomial: Coefficients) -> None:
    """Raise ``UsageError`` if ``evaluate`` cannot evaluate a polynomial: if its degree is 3, 5, 6 or 7, or if
    it has degree 8 and cannot be written as squares."""
    kept = _without_zeros(polynomial)
    if len(kept) > 2:
        completed_squares(kept)


def evaluate(polynomial: Coefficients, A: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate at ``A``, fp32 and symmetric, [.., n, n]; both buffers are written to.

    Returns the buffer that holds the value, and the other buffer.
    """
    kept = _without_zeros(polynomial)
    if len(kept) > 2:
        return evaluate_squares(completed_squares(kept), A, spare)
    constant, slope = (*kept, 0.0, 0.0)[:2]
    _add_to_diagonal(A.mul_(slope), constant)
    return A, spare


def _without_zeros(polynomial: Coefficients) -> Coefficients:
    length = max((index + 1 for index, value in enumerate(polynomial) if value), default=0)
    return polynomial[:length]


def evaluate_squares(squares: Squares, A: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Like ``evaluate``, for a polynomial that is written as squares."""
    before, now = spare, A
    _add_to_diagonal(now, squares.shift)
    for c, b, t in squares.rounds:
        symmetric_multiply(before, now, now, alpha=c, beta=b)
        before, now = now, before
        _add_to_diagonal(now, t)
    return now, before


def _add_to_diagonal(A: Tensor, value: float) -> None:
    if value:
        A.diagonal(dim1=-2, dim2=-1).add_(value)


def _times(p: Sequence[float], q: Sequence[float]) -> Coefficients:
    product = [0.0] * (len(p) + len(q) - 1)
    for i, x in enumerate(p):
        for j, y in enumerate(q):
            product[i + j] += x * y
    return tuple(product)


def _root(p: Sequence[float]) -> Coefficients:
    """A polynomial with leading coefficient 1. Its square times the leading coefficient of ``p`` has the
    coefficients of ``p`` in the upper half of the degrees."""
    half = (len(p) - 1) // 2
    root = [0.0] * half + [1.0]
    for k in range(half - 1, -1, -1):
        known = sum(root[i] * root[half + k - i] for i in range(k + 1, half))
        root[k] = (p[half + k] / p[-1] - known) / 2
    return tuple(root)
