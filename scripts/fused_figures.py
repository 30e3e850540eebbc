"""Measures how far an update is off if matrices are orthogonalized together, or shard by shard.

python scripts/fused_figures.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from muon_tutorial import zeropower_via_newtonschulz

SEEDS = 5


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def updates(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonalize each matrix alone and stack the updates; then stack first, and orthogonalize as one."""
    alone = [zeropower_via_newtonschulz(part).float() for part in parts]
    return torch.cat(alone), zeropower_via_newtonschulz(torch.cat(parts)).float()


def gate_and_up(seed: int, larger: float = 1.0) -> tuple[Tensor, Tensor]:
    """The ``updates`` for gate and up, 688 × 256 each. Gate's gradient is scaled by ``larger``."""
    return updates(gaussian(688, 256, seed) * larger, gaussian(688, 256, seed + 1000))


def off(found: Tensor, other: Tensor) -> float:
    return float((found - other).norm() / other.norm())


def times(found: Tensor, other: Tensor) -> float:
    return float(found.norm() / other.norm())


ROWS: dict[str, Callable[[int], float]] = {
    "gate and up of (688 + 688) × 256 as one matrix: "
    "distance from the correct update, over its own norm": lambda seed: off(*gate_and_up(seed)),
    "the same: norm of the correct update over its norm": lambda seed: times(*gate_and_up(seed)),
    "gate's gradient 5 times larger: up's norm over its correct norm": lambda seed: times(
        *(each[688:] for each in reversed(gate_and_up(seed, larger=5.0)))
    ),
    "256 × 256, each half of the rows orthogonalized alone (tp = 2): relative distance": lambda seed: off(
        *updates(*gaussian(256, 256, seed).chunk(2))  # DeepSpeed's issue 8437
    ),
}
"""For each row of the table: its text, and a function that computes its figure from a seed."""


if __name__ == "__main__":  # the table of docs/evidence.md
    print(f"| Gaussian gradients, {SEEDS} seeds | least to largest |", "|---|---|", sep="\n")
    for what, figure in ROWS.items():
        found = [figure(seed) for seed in range(SEEDS)]
        print(f"| {what} | {min(found):.3f} to {max(found):.3f} |")
