"""Published figures: how far an update is off if shards, or fused matrices, are orthogonalized.

Our figures are computed on Gaussian matrices from a fixed seed, in float64, so that all machines agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muon_tutorial.newton_schulz import DEFAULT_STEPS, KELLER_JORDAN


def quintic(X: Tensor, steps: int = DEFAULT_STEPS) -> Tensor:
    """Newton–Schulz in the dtype of X. The norm of X must be at most 1."""
    a, b, c = KELLER_JORDAN
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def orthogonalized(G: Tensor, parts: int = 1) -> Tensor:
    """Orthogonalize each of ``parts`` blocks of rows on its own."""
    if parts > 1:
        return torch.cat([orthogonalized(part) for part in G.chunk(parts)])
    X = G / G.norm()
    return quintic(X.mT).mT if len(X) > X.shape[1] else quintic(X)


def gaussian(rows: int, columns: int) -> Tensor:
    """A Gaussian matrix in float64, the same each time."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def sharded_off() -> float:
    """The relative error of a 256² matrix's update if its halves are orthogonalized alone."""
    whole = orthogonalized(gaussian(256, 256))
    return float((orthogonalized(gaussian(256, 256), 2) - whole).norm() / whole.norm())


def gate_and_up(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The update of gate stacked on up, (688 + 688) × 256: orthogonalized as one matrix, and as two.

    Gate's gradient is multiplied by ``scale``.
    """
    G = gaussian(1376, 256)
    G[:688] *= scale
    return orthogonalized(G), orthogonalized(G, 2)


def fused_off() -> float:
    """The distance between the fused update and the separate updates, divided by the fused update's norm."""
    fused, apart = gate_and_up()
    return float((fused - apart).norm() / fused.norm())


def part_of_norm(scale: float, first: int) -> float:
    """The norm of the fused update's rows from ``first`` on, divided by these rows' norm in the separate
    updates."""
    fused, apart = gate_and_up(scale)
    return float(fused[first:].norm() / apart[first:].norm())


def norm_apart() -> float:
    """The norm of the two separate updates together, divided by the norm of the fused update."""
    return 1 / part_of_norm(1.0, 0)
