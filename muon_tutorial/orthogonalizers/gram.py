"""Newton–Schulz of a matrix that no rank holds whole: the ranks sum the Gram matrices of its shards.

If X, n × l, is cut along l, ``XXᵀ`` is the sum of the shards' own products. The iteration runs on that n × n
matrix, as in ``iterate``, and gives a Q such that ``QX`` is the result. So a rank multiplies its shard by Q,
and needs no other shard. If instead a tall matrix is cut along its rows, the same is done with ``XᵀX`` and
``XQ``.

The sum of the shards' products rounds differently from a single process's product: ``DIFFERENCE`` and
``QUALITY_DIFFERENCE`` bound the effect. Products and iterates are fp32; shards and results are bf16. This
module knows no ranks: the caller sums what ``packed_gram`` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..newton_schulz import Triple, coefficients_per_step
from .checked_recipe import Recipe
from .full_float32 import full_float32
from .iterate import gram_polynomial
from .named import RECIPES, STOCK, find_recipe
from .orthogonalize_option import is_auto
from .packed_symmetric import pack_symmetric, unpack_symmetric
from .symmetric_products import multiply, symmetric_multiply
from .workspace import Workspace

DIFFERENCE = 0.05
"""How far a result X in shards may be from the result Y of ``iterate`` with the same recipe: ‖X − Y‖/‖Y‖
(Frobenius).

Measured on every spectrum of ``quality``, 96 × 384, 384 × 96 and 512 × 512, in 2, 4 and 8 shards: at most
0.008 with Keller Jordan's coefficients, and 0.02 with minimax's on 512 × 512, where rounding decides the
smallest singular values. The difference is no larger with 8 shards than with 2.
"""

QUALITY_DIFFERENCE = 0.05
"""How much the numbers of ``Quality`` (error and largest singular value) may differ from the numbers of
``"stock"`` in a single process, with the same coefficients, spectra and shards. Measured: 0.003 and 0.016. On
48 × 192, 0.026 was measured, because stock's bf16 iterates blur the step in the spectrum "cliff". On Gaussian
matrices, ‖X − Y‖/‖Y‖ is 0.01 between a result X and stock's result Y. On spectra that fall fast (k^−3, rank
8) this distance is up to 0.32, because stock's rounding changes the smallest singular values.
``orthogonalize="gram"`` in one process differs as much from stock.
"""


MOST_GROWTH = 2.0**22
"""The largest allowed product of all a²: the factor by which XXᵀ's smallest values, and rounding, grow.

On real momenta, updates with Keller Jordan's coefficients were off by 0.002 with 5 steps (a product of 2e5),
0.013 with 6 (3e6), 0.08 with 7 (3e7), and 700,000 with 10.
"""


def gram_recipe(group: Mapping[str, Any]) -> Recipe:
    """Return the Gram form of a parameter group's recipe. ``"stock"`` uses the group's coefficients. Raises
    ``UsageError`` if the recipe has no Gram form, or the coefficients could explode."""
    name = group.get("orthogonalize", STOCK)
    if name == STOCK:
        coefficients = coefficients_per_step(group["ns_coefficients"], group["ns_steps"])
        default = RECIPES["gram"]
        return default if coefficients == default.coefficients else _gram_form(coefficients)
    if is_auto(name):
        raise UsageError(
            'strategy "gram" does not support orthogonalize="auto": pass "stock", "gram" or "minimax"'
        )
    recipe = find_recipe(name)
    if recipe.form != "gram":
        known = ", ".join(each.name for each in RECIPES.values() if each.form == "gram")
        raise UsageError(
            f'strategy "gram" orthogonalizes cut matrices by their Gram matrix, so orthogonalize must be '
            f"{STOCK!r} (for its coefficients) or one of {known}; got {name!r}"
        )
    return recipe


@lru_cache(maxsize=64)
def _gram_form(coefficients: tuple[Triple, ...]) -> Recipe:
    recipe = Recipe("ns_coefficients", "the parameter group", coefficients, "gram", torch.float32)
    if (growth := math.prod(a * a for a, _, _ in coefficients)) > MOST_GROWTH:
        raise UsageError(
            'strategy "gram" would enlarge the rounding of XXᵀ too much with these ns_coefficients and '
            f"ns_steps: the product of all a² is {growth:.1e}, and {MOST_GROWTH:.1e} is allowed. Take fewer "
            "steps, or another strategy"
        )
    return recipe


@full_float32()
def packed_gram(shard: Tensor, cut: int, packed: Tensor, workspace: Workspace) -> None:
    """Write a shard's part of the Gram matrix into ``packed``, fp32, [n(n + 1)/2].

    ``shard`` is bf16, [rows, columns]. Its length along ``cut`` may be 0; the other dimension has its whole
    length n.
    """
    n = shard.size(1 - cut)
    wide, A = workspace.buffers([tuple(shard.shape), (n, n)], torch.float32, shard.device)
    wide.copy_(shard)
    X = wide if cut == 1 else wide.mT  # [n, the shard's part of the long side]
    symmetric_multiply(A, X, X.mT)
    pack_symmetric(A, packed)


@full_float32()
def orthogonalize_shard(
    shard: Tensor, cut: int, packed: Tensor, recipe: Recipe, eps: float, workspace: Workspace
) -> Tensor:
    """Return this shard of the whole matrix's orthogonal factor, bf16.

    ``packed``: the whole matrix's Gram matrix. ``eps``: the least norm that the matrix is divided by.
    """
    n = shard.size(1 - cut)
    shapes = [tuple(shard.shape)] * 2 + [(n, n)] * 4
    X, Y, *square = workspace.buffers(shapes, torch.float32, shard.device)
    X.copy_(shard)
    Q = _multiplier(packed, recipe, eps, square)
    multiply(Y, *((Q, X) if cut == 1 else (X, Q)))
    return Y.to(torch.bfloat16)


def _multiplier(packed: Tensor, recipe: Recipe, eps: float, square: list[Tensor]) -> Tensor:
    """Return the n × n matrix by which every shard is multiplied, from the unscaled Gram matrix."""
    A = square[0]
    unpack_symmetric(packed, A)
    norm = A.diagonal().sum().sqrt().clamp(min=eps)  # The trace is X's squared Frobenius norm.
    A.masked_fill_(norm.isinf(), 0.0)  # If the norm is infinite in fp32, the update is 0, as with stock.
    A.div_(norm).div_(norm)
    if recipe.scaling == "schatten":  # X's Schatten 4-norm is the root of the Gram matrix's norm.
        # The clamp is as in ``iterate._scale``: a matrix whose norm is below eps stays small.
        root = torch.linalg.matrix_norm(A).clamp(min=A.size(-1) ** -0.5 * 0.99).sqrt()
        A.div_(root).div_(root)
        norm = norm * root
    Q = gram_polynomial(recipe.coefficients, square)
    return Q.div_(norm)
