"""What this CPU's kernels for products do, found out by trying, once a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

TRIED = 2**19
"""Elements compared of each kind of product: where kernels differ, some in 100,000 bf16 results do."""

TRIED_AT_ONCE = 2**16
"""Elements of a product that are in memory at a time."""


@cache
def onednn_is_faster() -> bool:
    """Whether fp32 products go to oneDNN on this CPU: one of AMD's, where MKL leaves AVX-512 unused.

    Measured on an AMD EPYC with AVX-512: 230 GFLOP/s in place of 100. PyTorch gives oneDNN an fp32 product
    only where bf16 would be allowed. It has no kernel that makes use of that but with AMX, which those CPUs
    lack; a product is held against float64 all the same.
    """
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "AMD" in str(known.get("cpu_name")) and not known.get("amx_tile") and _onednn_keeps_float32()


def _onednn_keeps_float32() -> bool:
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    A, B = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    exact = A.double() @ B.double()
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "bf16"
        off = torch.mm(A, B).double() - exact
    finally:
        backend.fp32_precision = before
    return bool(off.norm() < 1e-5 * exact.norm())  # fp32: 2e-7, bf16: 2e-3


def batches_keep_bits(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether products of a batch on this CPU come out as those of each member alone, bit for bit.

    Some CPUs round a few bf16 results otherwise, and oneDNN the smallest fp32 ones. Tried out, once for a
    shape and a number of threads, on the products that an iteration has.
    """
    n, length = sorted((rows, columns))
    return _batches_keep_bits(n, length, dtype, torch.get_num_threads())


@cache
def _batches_keep_bits(n: int, length: int, dtype: torch.dtype, threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    count = max(3, TRIED_AT_ONCE // n**2)
    for _ in range(max(1, TRIED // (count * n**2))):
        shapes = (count, n, n), (count, n, length)
        A, X = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        if not all(_keeps_bits(product, A, X) for product in PRODUCTS):
            return False
    return True


def _keeps_bits(product: Callable[[Tensor, Tensor], Tensor], A: Tensor, X: Tensor) -> bool:
    """Whether all members together, and the first two, come out as each one alone."""
    alone = torch.stack([product(member, its) for member, its in zip(A, X, strict=True)])
    return torch.equal(product(A, X), alone) and torch.equal(product(A[:2], X[:2]), alone[:2])


def _scaled_square(A: Tensor, X: Tensor) -> Tensor:
    return (torch.addmm if A.ndim == 2 else torch.baddbmm)(A, A, A, alpha=2.0315, beta=-4.775)


def _update(A: Tensor, X: Tensor) -> Tensor:
    return (torch.addmm if A.ndim == 2 else torch.baddbmm)(X, A, X, beta=3.4445)


PRODUCTS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda A, X: X @ X.mT,
    lambda A, X: A @ A,
    lambda A, X: A @ X,
    _scaled_square,
    _update,
)
"""What an iteration multiplies, of [n, n] and [n, length], or of a stack of each."""
