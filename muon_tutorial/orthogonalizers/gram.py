"""Newton–Schulz of a matrix that nobody holds whole: by its Gram matrix, a sum over shards.

Where X, n × l, is cut along l, ``XXᵀ`` is the sum of every shard's own product. The iteration takes place on
that n × n matrix, as in ``iterate``, and leaves Q with ``QX`` what it makes of X: so each shard is multiplied
by Q on its own. Where the rows of a tall matrix are cut, all the same with ``XᵀX`` and ``XQ``.

The answer is not the single process's to the bit, since the sum of shards' products rounds otherwise:
``DIFFERENCE`` and ``QUALITY_DIFFERENCE`` bound how far it goes. Products and iterates are fp32, shards bf16,
results too. Knows no rank: others add up what ``packed_gram`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..newton_schulz import Triple, coefficients_per_step
from .choices import is_auto
from .iterate import gram_polynomial
from .named import RECIPES, STOCK, find_recipe
from .products import full_float32, multiply, symmetric_multiply
from .recipe import Recipe
from .workspace import Workspace

DIFFERENCE = 0.05
"""How far a result in shards may be from ``iterate``'s of the same recipe: ‖X − Y‖/‖Y‖ in Frobenius norm.

Measured on every spectrum of ``quality``, 96 × 384, 384 × 96 and 512 × 512, in 2, 4 and 8 shards: at most
0.008 with Keller Jordan's coefficients, 0.02 with minimax's, where rounding decides about the smallest
singular values (512 × 512); 0.0002 on Gaussian matrices with Keller Jordan's. No more in 8 shards than in 2.
"""

QUALITY_DIFFERENCE = 0.05
"""How far ``Quality``, its error and its largest singular value, may be from the single process's ``"stock"``
with the same coefficients, on those spectra and shards: measured, 0.003 and 0.016; 0.026 on 48 × 192, whose
cliff bf16 iterates blur. (From ``iterate``'s of the same recipe: 0.0002 and 0.005.) The matrices themselves
differ from stock's as those of ``orthogonalize="gram"`` in one process do: ‖X − Y‖/‖Y‖ is 0.01 on Gaussian
matrices, 0.02 on k^−1, and up to 0.32 where stock's rounding loses singular values and fills in others (k^−3,
rank 8).
"""


def gram_recipe(group: Mapping[str, Any]) -> Recipe:
    """Return the Gram form of what a parameter group asks for; ``"stock"``'s with its own coefficients.

    Raises:
        UsageError: the group's recipe has no such form, or its coefficients could explode.
    """
    name = group.get("orthogonalize", STOCK)
    if name == STOCK:
        coefficients = coefficients_per_step(group["ns_coefficients"], group["ns_steps"])
        default = RECIPES["gram"]
        return default if coefficients == default.coefficients else _gram_form(coefficients)
    if is_auto(name):
        raise UsageError('strategy "gram" does not choose: pass orthogonalize="stock", "gram" or "minimax"')
    recipe = find_recipe(name)
    if recipe.form != "gram":
        known = ", ".join(each.name for each in RECIPES.values() if each.form == "gram")
        raise UsageError(
            f"a matrix that stays cut is orthogonalized by its Gram matrix: orthogonalize must be {STOCK!r} "
            f"(for its coefficients) or one of {known}; got {name!r}"
        )
    return recipe


@lru_cache(maxsize=64)
def _gram_form(coefficients: tuple[Triple, ...]) -> Recipe:
    return Recipe("ns_coefficients", "the parameter group", coefficients, "gram", torch.float32)


def packed_size(n: int) -> int:
    """Elements of a packed symmetric n × n matrix: its upper triangle."""
    return n * (n + 1) // 2


def pack_symmetric(A: Tensor, packed: Tensor) -> None:
    """Write the upper triangle of a symmetric matrix into ``packed``, [n(n + 1)/2].

    In LAPACK's way (RFP, Gustavson et al. 2010): the upper right block whole, then a rectangle in which the
    two diagonal blocks' triangles lie side by side. That takes a few copies, where one a row would take n.

    >>> A, packed = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]]), torch.empty(6)
    >>> pack_symmetric(A, packed)
    >>> packed.tolist()
    [2.0, 3.0, 4.0, 5.0, 1.0, 6.0]
    """
    block, folded, half = _packed_parts(packed, A.size(-1))
    block.copy_(A[:half, half:])
    folded.zero_()
    torch.triu(A[half:, half:], out=folded[: A.size(-1) - half])
    folded[1:, :half] += A[:half, :half].tril()


def unpack_symmetric(packed: Tensor, A: Tensor) -> None:
    """Write the whole of a packed symmetric matrix into ``A``: the opposite of ``pack_symmetric``."""
    block, folded, half = _packed_parts(packed, A.size(-1))
    A[:half, half:] = block
    A[half:, :half] = block.mT
    upper, lower = folded[: A.size(-1) - half], folded[1:, :half]
    A[half:, half:] = upper.triu() + upper.triu(1).mT
    A[:half, :half] = lower.tril() + lower.tril(-1).mT


def _packed_parts(packed: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """Of a packed matrix, its upper right block, [half, n − half], and the rectangle of both triangles."""
    half = n // 2
    edge = half * (n - half)
    return packed[:edge].view(half, n - half), packed[edge:].view(half + 1, n - half), half


@full_float32()
def packed_gram(shard: Tensor, cut: int, packed: Tensor, workspace: Workspace) -> None:
    """Write a shard's part of the Gram matrix into ``packed``, fp32.

    ``shard`` is bf16, [rows, columns], perhaps none of those along dimension ``cut``, the one that is cut;
    the other one, n long, is whole, and ``packed`` is [n(n + 1)/2].
    """
    n = shard.size(1 - cut)
    wide, A = workspace.buffers([tuple(shard.shape), (n, n)], torch.float32, shard.device)
    wide.copy_(shard)
    X = wide if cut == 1 else wide.mT  # [n, those of the long side that the shard has]
    symmetric_multiply(A, X, X.mT)
    pack_symmetric(A, packed)


@full_float32()
def orthogonalize_shard(
    shard: Tensor, cut: int, packed: Tensor, recipe: Recipe, eps: float, workspace: Workspace
) -> Tensor:
    """Return this shard, bf16, of the orthogonal factor of the whole; ``packed`` is the whole's Gram matrix.

    ``eps`` is the least norm that the whole is divided by.
    """
    n = shard.size(1 - cut)
    shapes = [tuple(shard.shape)] * 2 + [(n, n)] * 4
    X, Y, *square = workspace.buffers(shapes, torch.float32, shard.device)
    X.copy_(shard)
    Q = _multiplier(packed, recipe, eps, square)
    multiply(Y, *((Q, X) if cut == 1 else (X, Q)))
    return Y.to(torch.bfloat16)


def _multiplier(packed: Tensor, recipe: Recipe, eps: float, square: list[Tensor]) -> Tensor:
    """The n × n matrix that every shard is multiplied by, of the Gram matrix before any scaling.

    The squared Frobenius norm is the Gram matrix's trace, and the Schatten 4-norm the root of its own norm.
    """
    A = square[0]
    unpack_symmetric(packed, A)
    norm = A.diagonal().sum().sqrt().clamp(min=eps)
    A.masked_fill_(norm.isinf(), 0.0)  # squares beyond fp32: then the update is zero, as stock's is
    A.div_(norm).div_(norm)
    if recipe.scaling == "schatten":
        # As in iterate: no less than this, so that a matrix of norm below eps stays small.
        root = torch.linalg.matrix_norm(A).clamp(min=A.size(-1) ** -0.5 * 0.99).sqrt()
        A.div_(root).div_(root)
        norm = norm * root
    Q = gram_polynomial(recipe.coefficients, square)
    return Q.div_(norm)
