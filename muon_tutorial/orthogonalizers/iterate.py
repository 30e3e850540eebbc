"""Applies a recipe to a matrix or a stack of matrices, in a workspace's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..newton_schulz import DEFAULT_EPS, check_matrix
from .checked_recipe import Polynomial, Recipe
from .completed_squares import evaluate
from .full_float32 import full_float32
from .stack_sizes import buffer_shapes, run_length
from .symmetric_products import multiply, symmetric_multiply, symmetric_share
from .workspace import Workspace

TILE = 32
"""With AMX, oneDNN's bf16 products read rows in tiles of this many elements, and so past a row's end. They
multiply what they read there by 0, but 0 times NaN is NaN."""


def orthogonalize(
    G: Tensor,
    recipe: Recipe,
    eps: float = DEFAULT_EPS,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the approximate orthogonal factor of a matrix, in bfloat16; never writes to its input.

    ``G`` is a matrix [rows, columns], or a stack of equal shapes [matrices, rows, columns]. Each matrix of
    a stack gets the same bits as it would alone. The result has the shape of ``G`` and is row-major, however
    ``G`` lies in memory. ``eps`` is the least norm that a matrix is divided by. With a ``workspace`` that has
    seen the shape before, only the result is newly allocated; with ``out``, nothing is.

    Raises:
        UsageError: ``G`` is not a real matrix or stack.

    >>> import torch
    >>> from .named import RECIPES
    >>> G = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> X = orthogonalize(G, RECIPES["gram"])
    >>> X.dtype, bool((X.float().diag() - 1).abs().max() < 0.35)
    (torch.bfloat16, True)
    """
    check_matrix(G)
    workspace = workspace or Workspace()
    if out is None:
        out = torch.empty(G.shape, dtype=torch.bfloat16, device=G.device)
    if out.numel() == 0:
        return out
    runs: Iterable[tuple[Tensor, Tensor]] = [(out, G)]
    if out.ndim == 3:
        _, rows, columns = out.shape
        size = run_length(rows, columns, recipe, out.device) if len(out) > 1 else 1
        runs = zip(out, G, strict=True) if size == 1 else zip(out.split(size), G.split(size), strict=True)
    for results, matrices in runs:
        orthogonalize_into(results, matrices, recipe, eps, workspace)
    return out


@full_float32()
def orthogonalize_into(
    out: Tensor,  # [rows, columns], or [matrices, rows, columns]; bf16
    G: Tensor,  # shape of ``out``, any dtype
    recipe: Recipe,
    eps: float,
    workspace: Workspace,
) -> None:
    """Write the orthogonal factor of a matrix, or of each matrix in a stack, into ``out``.

    A tall matrix is transposed first. In bf16 the transpose is copied into row-major order, because products
    on a transposed view would take longer than the copy; in fp32 the view is used.
    """
    tall = out.size(-2) > out.size(-1)
    wide = out.mT if tall else out  # [.., n, l]
    n, length = wide.shape[-2:]
    gram = recipe.iterates_on_gram(n, length, symmetric_share(n))
    stored = wide if recipe.dtype is torch.bfloat16 else out
    X, Y, *padded = workspace.buffers(buffer_shapes(tuple(stored.shape), recipe), recipe.dtype, out.device)
    if stored is not wide:
        X, Y = X.mT, Y.mT
    if n % TILE and padded[0].size(-1) > n and recipe.dtype is torch.bfloat16:
        for buffer in padded:
            buffer[..., n:].zero_()
    square = [buffer[..., :n] for buffer in padded]  # [.., n, n]
    out.copy_(G)  # rounded, as torch.optim.Muon does
    X.copy_(wide)
    X.div_(_norms(X).clamp(min=eps))
    A = square[0]
    symmetric_multiply(A, X, X.mT)
    _scale(X, A, recipe)
    if gram:
        multiply(Y, gram_polynomial(recipe.coefficients, square), X)
        wide.copy_(Y)
    elif recipe.dtype is torch.float32:
        wide.copy_(_iterate(recipe.coefficients, X, Y, square))
    else:
        wide.copy_(_iterate_rounding(recipe.coefficients, X, Y, square))


def _iterate(coefficients: Sequence[Polynomial], X: Tensor, Y: Tensor, square: Sequence[Tensor]) -> Tensor:
    """``X ← PX`` with ``P = a + bA + cA² + …`` for every polynomial, in fp32.

    ``square[0]`` holds ``A = XXᵀ`` of the first step. Returns the buffer with the result: ``X`` or ``Y``.
    """
    A, spare = square
    for step, polynomial in enumerate(coefficients):
        if step:
            symmetric_multiply(A, X, X.mT)
        P, spare = evaluate(polynomial, A, spare)
        multiply(Y, P, X)  # [n, n] @ [n, l]
        X, Y, A = Y, X, P
    return X


def _iterate_rounding(
    coefficients: Sequence[Polynomial], X: Tensor, Y: Tensor, square: Sequence[Tensor]
) -> Tensor:
    """``X ← aX + (bA + cA² + …)X`` for every polynomial, in bf16. A large ``a`` inside the parentheses
    would round the other terms away."""
    A, B, *spare = square
    for step, (a, *higher) in enumerate(coefficients):
        if step:
            symmetric_multiply(A, X, X.mT)
        _without_constant(B, higher, A, spare)
        multiply(Y.copy_(X), B, X, beta=a)  # [n, n] @ [n, l]
        X, Y = Y, X
    return X


def _without_constant(out: Tensor, coefficients: Sequence[float], A: Tensor, spare: Sequence[Tensor]) -> None:
    """Write ``bA + cA² + dA³ + eA⁴`` into ``out``: two products, or one product if d and e are missing."""
    b, c, *rest = coefficients
    if not rest:
        symmetric_multiply(out.copy_(A), A, A, alpha=c, beta=b)
        return
    (S, W), (d, e) = spare, (*rest, 0.0)[:2]
    symmetric_multiply(S, A, A)
    torch.mul(A, d, out=W).add_(S, alpha=e)  # dA + eA²
    torch.mul(A, b, out=out).add_(S, alpha=c)
    symmetric_multiply(out, S, W, beta=1.0)


def gram_polynomial(coefficients: Sequence[Polynomial], square: Sequence[Tensor]) -> Tensor:
    """The n × n matrix Q for which ``QX`` is the iteration's result; ``square[0]`` holds ``R = XXᵀ``.

    A step multiplies X from the left by ``P = a + bR + cR² + …``, so Q becomes ``PQ``, and R becomes ``PRP``.
    P, Q and R are polynomials in the first R, so they are symmetric and commute. Without steps, Q is the
    identity.
    """
    R, *free, Q = square
    if not coefficients:
        Q.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
    last = len(coefficients) - 1
    for step, polynomial in enumerate(coefficients):
        argument = R if step == last else free.pop().copy_(R)
        P, spare = evaluate(polynomial, argument, free.pop())
        if step < last:
            symmetric_multiply(spare, R, P)  # RP
            symmetric_multiply(R, spare, P)  # RPP
        if step == 0:
            Q, free = P, [spare, Q]
        else:
            symmetric_multiply(spare, Q, P)
            Q, free = spare, [Q, P]
    return Q


def _norms(X: Tensor) -> Tensor:
    """The Frobenius norm of each matrix, fp32, [.., 1, 1].

    Each row is summed first, so the order of additions is the same for one matrix and a stack, and for any
    number of threads.
    """
    rows = torch.linalg.vector_norm(X, dim=-1, dtype=torch.float32)  # [.., n]
    return torch.linalg.vector_norm(rows, dim=-1)[..., None, None]


def _scale(X: Tensor, A: Tensor, recipe: Recipe) -> None:
    """Scale ``X``, whose Frobenius norm is 1, as the recipe says, and scale ``A = XXᵀ`` to match."""
    if recipe.scaling == "schatten":
        # ‖A‖ ≥ ‖X‖²/√n = 1/√n. If the input's norm was below eps, ‖A‖ is less, and the clamp keeps X small.
        squares = _norms(A).clamp(min=A.size(-1) ** -0.5 * 0.99)
        X.div_(squares.sqrt())
        A.div_(squares)
    elif recipe.scaling == "rows":
        rows = torch.linalg.vector_norm(A, 1, dim=-1, keepdim=True, dtype=torch.float32)  # [.., n, 1]
        rows = rows.clamp(min=1e-7).rsqrt()
        X.mul_(rows)
        A.mul_(rows).mul_(rows.mT)
