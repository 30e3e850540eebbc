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


def orthogonalized(matrix: Tensor) -> Tensor:
    return zeropower_via_newtonschulz(matrix).float()


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def gate_and_up(seed: int, larger: float = 1.0) -> tuple[float, float, float]:
    """Three figures of gate and up, 688 × 256 each, orthogonalized as one matrix: the distance of that update
    from the correct one (each alone), over its own norm; the correct norm over its norm; and up's norm over
    up's correct norm. Gate's gradient is ``larger`` times up's."""
    gate, up = gaussian(688, 256, seed) * larger, gaussian(688, 256, seed + 1000)
    due = torch.cat([orthogonalized(gate), orthogonalized(up)])
    found = orthogonalized(torch.cat([gate, up]))
    return (
        float((found - due).norm() / found.norm()),
        float(due.norm() / found.norm()),
        float(found[688:].norm() / due[688:].norm()),
    )


def shards(seed: int) -> float:
    """The relative error if the halves of a 256 × 256 matrix are orthogonalized alone (DeepSpeed 8437)."""
    whole = gaussian(256, 256, seed)
    due, found = orthogonalized(whole), torch.cat([orthogonalized(half) for half in whole.chunk(2)])
    return float((found - due).norm() / due.norm())


ROWS: dict[str, Callable[[int], float]] = {
    "gate and up of (688 + 688) × 256 as one matrix: "
    "distance from the correct update, over its own norm": lambda it: gate_and_up(it)[0],
    "the same: norm of the correct update over its norm": lambda it: gate_and_up(it)[1],
    "gate's gradient 5 times larger: up's norm over its correct norm": lambda it: gate_and_up(it, 5.0)[2],
    "256 × 256, each half of the rows orthogonalized alone (tp = 2): relative distance": shards,
}
"""What each row of the table says, and its figure for a seed."""


def said(figures: Callable[[int], float]) -> str:
    """The smallest and the largest value over the seeds."""
    found = [figures(seed) for seed in range(SEEDS)]
    return f"{min(found):.3f} to {max(found):.3f}"


def table() -> str:
    """The table of docs/evidence.md."""
    lines = (f"| {what} | {said(figures)} |" for what, figures in ROWS.items())
    return "\n".join([f"| Gaussian gradients, {SEEDS} seeds | least to largest |", "|---|---|", *lines])


if __name__ == "__main__":
    print(table())
