"""Packs a symmetric matrix into half as many elements, so that ranks send only one triangle."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_symmetric(A: Tensor, packed: Tensor) -> None:
    """Write the upper triangle of a symmetric matrix into ``packed``, [n(n + 1)/2].

    The format is like LAPACK's (RFP, Gustavson et al. 2010): first the upper right block, then a rectangle
    that holds the triangles of both diagonal blocks. Packing takes a few copies, not one for each row.

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
    """Write a packed symmetric matrix into ``A`` in full: the inverse of ``pack_symmetric``."""
    block, folded, half = _packed_parts(packed, A.size(-1))
    A[:half, half:] = block
    A[half:, :half] = block.mT
    upper, lower = folded[: A.size(-1) - half], folded[1:, :half]
    A[half:, half:] = upper.triu() + upper.triu(1).mT
    A[:half, :half] = lower.tril() + lower.tril(-1).mT


def _packed_parts(packed: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """Views of both parts of a packed matrix (``pack_symmetric``'s block and rectangle), and ``half``."""
    half = n // 2
    edge = half * (n - half)
    return packed[:edge].view(half, n - half), packed[edge:].view(half + 1, n - half), half
