"""What this CPU's kernels for products do, found out by trying, once a process."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes


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
    generator, before = torch.Generator("cpu").manual_seed(0), backend.fp32_precision
    with _disable_current_modes():  # nor on a device that the program prefers, nor in what is being counted
        A, B = torch.randn(2, 32, 32, generator=generator, device="cpu", dtype=torch.float32)
        exact = A.double() @ B.double()
        try:
            backend.fp32_precision = "bf16"
            off = torch.mm(A, B).double() - exact
        finally:
            backend.fp32_precision = before
        return bool(off.norm() < 1e-5 * exact.norm())  # fp32: 2e-7, bf16: 2e-3
