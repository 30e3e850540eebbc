"""The recipes by name. ``"stock"`` is not a recipe, but ``newton_schulz.zeropower_via_newtonschulz``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..newton_schulz import CANS, DEFAULT_STEPS, KELLER_JORDAN, POLAR_EXPRESS, YOU_JIACHENG, with_safety
from .checked_recipe import Polynomial, Recipe
from .completed_squares import Squares

STOCK = "stock"
"""The bits of ``torch.optim.Muon``'s Newton–Schulz, with a group's own coefficients and number of steps."""

SAFE_POLAR_EXPRESS: tuple[Polynomial, ...] = (*with_safety(POLAR_EXPRESS[:-1], 1.01), POLAR_EXPRESS[-1])
"""The safety factor is 1.01 on all triples except the last one, as in the authors' code."""

SAFE_CANS: tuple[Polynomial, ...] = (*with_safety(CANS[:-1], 1.01), CANS[-1])
"""Triples with the same safety factor: without it, CANS lets a singular value of 1.01 grow without bound."""

TURBO: tuple[Polynomial, ...] = (
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Turbo-Muon's four triples: a Polar Express with safety factor 1.02, without its first triple."""

MINIMAX: tuple[Polynomial, ...] = (
    (8.339068, -24.186172, 17.582032),
    (4.064054, -2.96445, 0.546522),
    (3.655529, -2.68073, 0.514838),
    (3.686149, -7.109275, 6.401602, -2.436651, 0.326061),
)
"""Made like the Polar Express (arXiv 2505.16932), but with degrees 5, 5, 5, 9, on [0.0021, 1], safety 1.01.

On its interval, each polynomial is closer to 1 than any other odd polynomial of its degree. This is the
interval into which the previous polynomials map the singular values. Matrices are divided by the Schatten
norm, which is smaller than the Frobenius norm, so their singular values start higher than with the five stock
steps. Degree 9 costs one product more than degree 5 (``completed_squares``). Degree 9 comes last, because its
large coefficients would make the Gram form less accurate in an earlier step.
"""

MINIMAX_BF16: tuple[Polynomial, ...] = (
    (8.334784, -24.169594, 17.569105),
    (4.0572, -2.959758, 0.545998),
    (4.736027, -6.724893, 3.202065, -0.460851),
    (2.884092, -3.540152, 1.929214, -0.346476),
)
"""Made like ``MINIMAX``, with degrees 5, 5, 7, 7, on [0.0022, 1]. The last polynomial has smaller
coefficients than one of degree 9 would have, so rounding adds little error."""

THREE_STEPS: tuple[Polynomial, ...] = (
    Squares(-0.6875626862, ((17.6145424892, 0.0, 0.0208296586),)).polynomial(),
    Squares(
        -2.1422936814,
        (
            (1.0, 0.0, -1.8067100625),
            (1.0, 0.2758462603, -1.7094333438),
            (0.4091403238, 0.0614195096, 0.2290649197),
        ),
    ).polynomial(),
    Squares(
        -1.9756128757, ((1.0, 0.0, -0.80427011), (0.3344981379, -0.1620771999, 0.6129238252))
    ).polynomial(),
)
"""Polynomials of degrees 5, 17 and 9 that consist only of squarings. These polynomials take 12 products on a
square matrix; the five stock steps take 15. The 15 numbers were fitted by a sequence of linear programs, for
matrices of 16 to 4096 rows, under the condition that the error is larger than stock's on no spectrum of
``quality``."""

KELLER_JORDAN_FIVE = (KELLER_JORDAN,) * DEFAULT_STEPS
_KELLER_JORDAN_SOURCE = "https://github.com/KellerJordan/Muon, muon.py"

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("float32", _KELLER_JORDAN_SOURCE, KELLER_JORDAN_FIVE, dtype=torch.float32),
        Recipe("gram", _KELLER_JORDAN_SOURCE, KELLER_JORDAN_FIVE, "gram", torch.float32),
        Recipe("you_jiacheng", "https://github.com/KellerJordan/modded-nanogpt/pull/81", YOU_JIACHENG),
        Recipe(
            "polar_express", "https://github.com/NoahAmsel/PolarExpress, arXiv 2505.16932", SAFE_POLAR_EXPRESS
        ),
        Recipe("cans", "arXiv 2506.10935, as in NVIDIA's Transformer Engine, newton_schulz.py", SAFE_CANS),
        Recipe(
            "turbo",
            "arXiv 2512.04632, https://github.com/KellerJordan/modded-nanogpt/pull/155",
            TURBO,
            scaling="rows",
        ),
        Recipe("minimax", "arXiv 2505.16932, other degrees", MINIMAX, "gram", torch.float32, "schatten"),
        Recipe("minimax_bf16", "arXiv 2505.16932, other degrees", MINIMAX_BF16, scaling="schatten"),
        Recipe("three_steps", "fitted here", THREE_STEPS, "gram", torch.float32, "schatten"),
    )
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of a recipe's error on each kind of spectrum. ``largest`` bounds the singular values."""

    gaussian: float
    power_law: float
    rank_8: float
    cliff: float
    nearly_zero: float
    largest: float


BOUNDS: Mapping[str, Bounds] = {
    STOCK: Bounds(0.225, 0.295, 0.070, 0.48, 0.96, 1.21),
    "float32": Bounds(0.225, 0.295, 0.070, 0.48, 0.96, 1.21),
    "gram": Bounds(0.225, 0.295, 0.070, 0.48, 0.96, 1.21),
    "you_jiacheng": Bounds(0.095, 0.270, 0.015, 0.47, 0.96, 1.15),
    "polar_express": Bounds(0.120, 0.115, 0.060, 0.26, 0.91, 1.14),
    "cans": Bounds(0.110, 0.105, 0.105, 0.25, 0.91, 1.12),
    "turbo": Bounds(0.135, 0.580, 0.120, 0.43, 0.14, 1.15),
    "minimax": Bounds(0.120, 0.270, 0.075, 0.13, 0.86, 1.15),
    "minimax_bf16": Bounds(0.110, 0.270, 0.050, 0.12, 0.86, 1.13),
    "three_steps": Bounds(0.165, 0.295, 0.110, 0.17, 0.87, 1.25),
}
"""Errors as ``quality`` measures them against float64, on 128 × 128, 256 × 64 and 384 × 768.

The power laws are k^−1 to k^−3. Turbo-Muon scales each row by its own number, which changes the matrix. So if
singular values differ much, Turbo-Muon's result is far from the orthogonal factor. Turbo-Muon also makes a
nearly zero matrix (its norm is below ``eps``) large; with the other recipes it stays small, as with stock.
"""

LARGER_UPDATES = (1.03, 1.18)
"""Bounds of the ratio of two Frobenius norms: a recipe's update over stock's, on the same Gaussian matrix.
The ratio is above 1 because stock leaves most singular values below 1. Measured: 1.04 on 384 × 768 to 1.15 on
256 × 64. The bounds do not hold for ``"float32"`` and ``"gram"``, which have stock's coefficients."""

DROP_INS = tuple(name for name in RECIPES if name != "turbo")
"""The recipes that can replace stock without losing quality (``quality.shortfall``): the error is at most 1 %
above stock's on Gaussian and power-law spectra, and at most 0.15 on low rank. On every spectrum, the largest
singular value is at most 1.45."""


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name; raises ``UsageError`` if there is none."""
    if name not in RECIPES:
        raise UsageError(
            f"orthogonalize must be {STOCK!r}, 'auto' or one of {', '.join(RECIPES)}; got {name!r}"
        )
    return RECIPES[name]
