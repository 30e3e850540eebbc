"""Matrix products into existing buffers. Only about half of a large symmetric product is computed.

Tensors are [rows, columns], or a stack [matrices, rows, columns].
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SYMMETRIC = 384
"""Below this many rows a symmetric product is computed whole, because several calls would save no time."""

BLOCKS, LEAST_BLOCK = 6, 128
"""A symmetric product is computed in about six block columns, 128 or wider, with 7/12 of the operations."""


def multiply(out: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Replace ``out`` by ``alpha·A·B + beta·out``; ``out`` must not share memory with ``A`` or ``B``.

    If ``beta`` is 0, the old contents of ``out`` do not matter, even if they are NaN.
    """
    if alpha == 1.0 and beta == 0.0:
        torch.matmul(A, B, out=out)
    else:
        (out.addmm_ if out.ndim == 2 else out.baddbmm_)(A, B, beta=beta, alpha=alpha)


def symmetric_multiply(out: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Replace ``out`` by ``alpha·A·B + beta·out``, if ``A·B`` is symmetric.

    If ``beta`` is not 0, ``out`` must be symmetric, too. ``B`` is ``Aᵀ``, or both are symmetric and commute.
    From ``LEAST_SYMMETRIC`` rows on, block columns are computed only down to the diagonal and then mirrored.
    The result is then exactly symmetric in fp32. In bf16 the diagonal blocks are not mirrored, because there
    rounding does more harm than asymmetry.
    """
    n = out.size(-1)
    width = block_width(n)
    for left in range(0, n, width):
        right = min(left + width, n)
        above = out[..., :right, left:right]
        multiply(above, A[..., :right, :], B[..., :, left:right], alpha, beta)
        if width < n and out.dtype is torch.float32:  # blocks below the diagonal are free until the end
            size = right - left
            spare = out[..., left:right, :size] if left else out[..., right : right + size, :size]
            _mirror(out[..., left:right, left:right], spare)
    for left in range(width, n, width):
        right = min(left + width, n)
        out[..., left:right, :left].copy_(out[..., :left, left:right].mT)


def _mirror(block: Tensor, spare: Tensor) -> None:
    """Mirror a block's upper triangle into its lower triangle; ``spare`` is scratch of the same shape.

    If two matrices only nearly commute, their product is only nearly symmetric, and each iteration on a Gram
    matrix doubles the asymmetry. For singular values k^−2, the largest singular value grew to 1.35 instead of
    1.14.
    """
    spare.copy_(block.mT).tril_(-1)
    block.triu_().add_(spare)


def block_width(n: int) -> int:
    """Return how many columns of a symmetric n × n product are computed at once: all n for a small n.

    >>> block_width(768), block_width(3072), block_width(128)
    (128, 512, 128)
    """
    if n < LEAST_SYMMETRIC:
        return n
    return max(LEAST_BLOCK, -(-n // BLOCKS))


def symmetric_share(n: int) -> float:
    """Return the fraction of a full product's operations that a symmetric n × n product computes.

    >>> round(symmetric_share(768), 3), symmetric_share(128)
    (0.583, 1.0)
    """
    width = block_width(n)
    return sum(min(left + width, n) * min(width, n - left) for left in range(0, n, width)) / n**2
