"""Finds out, once per process and by trying, what this CPU's kernels for matrix products do."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes


@cache
def onednn_is_faster() -> bool:
    """Whether fp32 products should go to oneDNN: on AMD CPUs, on which MKL does not use AVX-512.

    Measured on an AMD EPYC with AVX-512: 230 GFLOP/s instead of 100. PyTorch gives oneDNN an fp32 product
    only if it allows bf16 inside it. Without AMX, which these CPUs lack, oneDNN has no kernel that then uses
    bf16; to be sure, a product is compared with float64.
    """
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "AMD" in str(known.get("cpu_name")) and not known.get("amx_tile") and _onednn_keeps_float32()


def _onednn_keeps_float32() -> bool:
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    generator, before = torch.Generator("cpu").manual_seed(0), backend.fp32_precision
    with _disable_current_modes():  # ignores the program's default device, and is not counted by PeakMemory
        A, B = torch.randn(2, 32, 32, generator=generator, device="cpu", dtype=torch.float32)
        exact = A.double() @ B.double()
        try:
            backend.fp32_precision = "bf16"
            off = torch.mm(A, B).double() - exact
        finally:
            backend.fp32_precision = before
        return bool(off.norm() < 1e-5 * exact.norm())  # fp32: 2e-7, bf16: 2e-3
