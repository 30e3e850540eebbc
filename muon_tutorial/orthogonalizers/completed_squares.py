"""Evaluates a polynomial of a symmetric matrix by a few squarings, without other passes over its elements.

    U₀ = aA + s      U₁ = c₁U₀² + t₁      Uᵢ = cᵢUᵢ₋₁² + bᵢUᵢ₋₂ + tᵢ

By completing squares, every polynomial of A of degree 0, 1, 2 or 4 can be written this way, and so can some
of degree 8. The factor a is 1, except in a polynomial without squares. Each square is added to the buffer of
Uᵢ₋₂, and tᵢ only to the diagonal. In bfloat16 these sums would lose too many digits, so this module is for
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from torch import Tensor

from ..errors import UsageError
from .symmetric_products import symmetric_multiply

Coefficients = tuple[float, ...]
"""Coefficients of a polynomial in A, the constant first."""


@dataclass(frozen=True, slots=True)
class Squares:
    """``shift`` is s, and ``slope`` is a. Each of ``rounds`` is (c, b, t); b is 0 in the first round."""

    shift: float
    rounds: tuple[tuple[float, float, float], ...] = ()
    slope: float = 1.0

    def polynomial(self) -> Coefficients:
        """Return the coefficients of the polynomial that these squares evaluate, the constant first.

        >>> Squares(1.0, ((2.0, 0.0, 0.0), (1.0, 4.0, 0.5))).polynomial()  # (2(A + 1)²)² + 4(A + 1) + ½
        (8.5, 20.0, 24.0, 16.0, 4.0)
        """
        before: Coefficients = (0.0,)
        now: Coefficients = (self.shift, self.slope)
        for c, b, t in self.rounds:
            square = _times(now, now)
            padded = (*before, *(0.0,) * (len(square) - len(before)))
            after = [c * x + b * y for x, y in zip(square, padded, strict=True)]
            before, now = now, (after[0] + t, *after[1:])
        return now


@cache
def completed_squares(polynomial: Coefficients) -> Squares:
    """Write a polynomial of A of degree 0, 1, 2, 4 or 8 as squares.

    Raises:
        UsageError: the degree is another, or this polynomial of degree 8 cannot be written as squares.

    >>> completed_squares((1.0, 2.0, 1.0))
    Squares(shift=1.0, rounds=((1.0, 0.0, 0.0),), slope=1.0)
    >>> completed_squares((1.0, 4.0, 6.0, 4.0, 2.0)).polynomial()
    (1.0, 4.0, 6.0, 4.0, 2.0)
    """
    length = max((index + 1 for index, value in enumerate(polynomial) if value), default=0)
    if length <= 2:
        constant, slope = (*polynomial[:length], 0.0, 0.0)[:2]
        return Squares(constant, slope=slope)
    polynomial = polynomial[:length]
    root = _root(polynomial)
    inner = completed_squares(root)
    previous = Squares(inner.shift, inner.rounds[:-1]).polynomial() if inner.rounds else (1.0,)
    c = polynomial[-1]
    rest = [x - c * y for x, y in zip(polynomial, _times(root, root), strict=False)][: len(root) - 1]
    b = rest[len(previous) - 1] / previous[-1] if inner.rounds else 0.0
    found = Squares(inner.shift, (*inner.rounds, (c, b, rest[0] - b * previous[0])))
    off = [abs(x - y) for x, y in zip_longest(found.polynomial(), polynomial, fillvalue=0.0)]
    if max(off) > 1e-9 * max(map(abs, polynomial)):
        raise UsageError(
            f"the polynomial {polynomial} of degree {len(polynomial) - 1} cannot be written as a chain of "
            "squares"
        )
    return found


def evaluate(polynomial: Coefficients, A: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate at ``A``, fp32 and symmetric, [.., n, n]; both buffers are written to.

    Returns the buffer that holds the value, and the other buffer.
    """
    squares = completed_squares(polynomial)
    before, now = spare, A
    if squares.slope != 1.0:
        now.mul_(squares.slope)
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
    """The polynomial r, with leading coefficient 1, such that ``p[-1]`` · r² and ``p`` agree in the upper
    half of the degrees."""
    half = (len(p) - 1) // 2
    root = [0.0] * half + [1.0]
    for k in range(half - 1, -1, -1):
        known = sum(root[i] * root[half + k - i] for i in range(k + 1, half))
        root[k] = (p[half + k] / p[-1] - known) / 2
    return tuple(root)
