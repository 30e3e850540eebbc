"""Keeps fp32 products in full fp32, whatever precision the user has set, and at a good speed on AMD CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes


@cache
def onednn_is_faster() -> bool:
    """Whether fp32 products should go to oneDNN: on AMD CPUs, on which MKL does not use AVX-512.

    Measured on an AMD EPYC with AVX-512: 230 GFLOP/s instead of 100. PyTorch hands an fp32 product to
    oneDNN only if its settings allow bf16 inside the product. On CPUs without AMX, oneDNN computes in fp32
    anyway. To make certain, one product is compared with the same product in float64.
    """
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "AMD" in str(known.get("cpu_name")) and not known.get("amx_tile") and _onednn_keeps_float32()


def _onednn_keeps_float32() -> bool:
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    generator, before = torch.Generator("cpu").manual_seed(0), backend.fp32_precision
    with _disable_current_modes():  # no default device applies, and PeakMemory counts nothing
        A, B = torch.randn(2, 32, 32, generator=generator, device="cpu", dtype=torch.float32)
        exact = A.double() @ B.double()
        try:
            backend.fp32_precision = "bf16"
            off = torch.mm(A, B).double() - exact
        finally:
            backend.fp32_precision = before
        return bool(off.norm() < 1e-5 * exact.norm())  # fp32: 2e-7, bf16: 2e-3


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute fp32 products in fp32, whatever ``torch.set_float32_matmul_precision`` was set to.

    In TF32 or bf16 an iteration on a Gram matrix explodes. For matrices with the singular values k^−2, the
    largest singular value grew to between 3 and 30,000.
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
