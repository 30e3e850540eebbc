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
    """The update of a stack of matrices as one, and the stack of updates if each is orthogonalized alone."""
    alone = [zeropower_via_newtonschulz(part).float() for part in parts]
    return zeropower_via_newtonschulz(torch.cat(parts)).float(), torch.cat(alone)


def gate_and_up(seed: int, larger: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same for gate and up, 688 × 256 each. Gate's gradient is scaled to be ``larger`` times up's."""
    return updates(gaussian(688, 256, seed) * larger, gaussian(688, 256, seed + 1000))


def fused_off(seed: int) -> float:
    together, alone = gate_and_up(seed)
    return float((together - alone).norm() / together.norm())


def norm_apart(seed: int) -> float:
    together, alone = gate_and_up(seed)
    return float(alone.norm() / together.norm())


def norm_of_up(seed: int) -> float:
    together, alone = gate_and_up(seed, larger=5.0)
    return float(together[688:].norm() / alone[688:].norm())


def shards_off(seed: int) -> float:
    """DeepSpeed's issue 8437: the correct update is that of the whole matrix."""
    whole, halves = updates(*gaussian(256, 256, seed).chunk(2))
    return float((halves - whole).norm() / whole.norm())


ROWS: dict[str, Callable[[int], float]] = {
    "gate and up of (688 + 688) × 256 as one matrix: "
    "distance from the correct update, over its own norm": fused_off,
    "the same: norm of the correct update over its norm": norm_apart,
    "gate's gradient 5 times larger: up's norm over its correct norm": norm_of_up,
    "256 × 256, each half of the rows orthogonalized alone (tp = 2): relative distance": shards_off,
}
"""What each row of the table says, and its figure for a seed."""


def said(figures: Callable[[int], float]) -> str:
    """The smallest and the largest of a figure's values over the seeds, as text."""
    found = [figures(seed) for seed in range(SEEDS)]
    return f"{min(found):.3f} to {max(found):.3f}"


def table() -> str:
    """The table of docs/evidence.md."""
    lines = (f"| {what} | {said(figures)} |" for what, figures in ROWS.items())
    return "\n".join([f"| Gaussian gradients, {SEEDS} seeds | least to largest |", "|---|---|", *lines])


if __name__ == "__main__":
    print(table())
