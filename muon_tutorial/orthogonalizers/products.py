"""Matrix products into buffers that are there already; large symmetric ones compute half, and mirror it.

Knows tensors alone: [rows, columns], or a stack [matrices, rows, columns].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .kernels import onednn_is_faster

LEAST_SYMMETRIC = 384
"""Below this many rows a symmetric product is computed whole: its many calls would cost what they save."""

BLOCKS, LEAST_BLOCK = 6, 128
"""A symmetric product is computed in about six block columns, 128 wide or more: 7/12 of the operations."""


@contextmanager
def full_float32() -> Iterator[None]:
    """Have fp32 products computed in fp32, whatever ``torch.set_float32_matmul_precision`` was told.

    In TF32 or bf16 an iteration on a Gram matrix explodes: a largest singular value of 3 to 30,000 on k^−2.
    """
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    ways = "ieee", "bf16" if onednn_is_faster() else "ieee"
    try:
        for backend, precision in zip(backends, ways, strict=True):
            backend.fp32_precision = precision
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def multiply(out: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Replace ``out`` by ``alpha·A·B + beta·out``; it must not share memory with ``A`` and ``B``.

    Where ``beta`` is 0, what ``out`` held before does not matter, not even NaN.
    """
    if alpha == 1.0 and beta == 0.0:
        torch.matmul(A, B, out=out)
    else:
        (out.addmm_ if out.ndim == 2 else out.baddbmm_)(A, B, beta=beta, alpha=alpha)


def symmetric_multiply(out: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Replace ``out`` by ``alpha·A·B + beta·out``, where ``A·B`` is symmetric, and ``out`` too if it counts.

    ``B`` is ``Aᵀ``, or both are symmetric and commute. Block columns are computed down to the diagonal. In
    fp32 the result is symmetric to the bit; in bf16 but for its diagonal blocks, which rounding spoils more.
    """
    n = out.size(-1)
    width = block_width(n)
    for left in range(0, n, width):
        right = min(left + width, n)
        above = out[..., :right, left:right]
        multiply(above, A[..., :right, :], B[..., :, left:right], alpha, beta)
        if width < n and out.dtype is torch.float32:  # below the diagonal there is room until the end
            size = right - left
            spare = out[..., left:right, :size] if left else out[..., right : right + size, :size]
            _mirror(out[..., left:right, left:right], spare)
    for left in range(width, n, width):
        right = min(left + width, n)
        out[..., left:right, :left].copy_(out[..., :left, left:right].mT)


def _mirror(block: Tensor, spare: Tensor) -> None:
    """Replace what lies below a block's diagonal by what lies above; ``spare`` is another one.

    A product of two matrices that only nearly commute is only nearly symmetric, and iterations on a Gram
    matrix double what is not: on k^−2 the largest singular value came to 1.35 in place of 1.14.
    """
    spare.copy_(block.mT).tril_(-1)
    block.triu_().add_(spare)


def block_width(n: int) -> int:
    """Return how many columns of a symmetric n × n product are computed at once: all, where n is small.

    >>> block_width(768), block_width(3072), block_width(128)
    (128, 512, 128)
    """
    if n < LEAST_SYMMETRIC:
        return n
    return max(LEAST_BLOCK, -(-n // BLOCKS))


def symmetric_share(n: int) -> float:
    """Return which part of its operations a symmetric n × n product computes.

    >>> round(symmetric_share(768), 3), symmetric_share(128)
    (0.583, 1.0)
    """
    width = block_width(n)
    return sum(min(left + width, n) * min(width, n - left) for left in range(0, n, width)) / n**2
