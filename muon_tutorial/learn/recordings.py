"""Data recorded from real runs and shipped with the package, so that lessons start from the same numbers.

``gradient.npz``, the gradient of one matrix of the small GPT after 300 steps, is made anew by

    python -m muon_tutorial.learn.recordings
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .small_gpt import train

_FILE = Path(__file__).with_name("recorded") / "gradient.npz"
_STEPS, _SEED, _NAME = 300, 0, "blocks.1.mlp.up.weight"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded gradient, divided by its largest number, and what it is of."""

    matrix: Tensor
    name: str
    steps: int
    seed: int

    def __str__(self) -> str:
        size = " × ".join(map(str, self.matrix.shape))
        return (
            f"the gradient of {self.name} ({size}), recorded after {self.steps} steps with seed {self.seed}"
        )


def real_gradient() -> Recorded:
    """A gradient from real training: a 256 × 64 matrix in float64, its largest number 1.

    >>> print(real_gradient())
    the gradient of blocks.1.mlp.up.weight (256 × 64), recorded after 300 steps with seed 0
    """
    with np.load(_FILE) as stored:
        matrix = torch.from_numpy(stored["matrix"].astype(np.float64))
        return Recorded(matrix, str(stored["name"]), int(stored["steps"]), int(stored["seed"]))


def record() -> Path:
    """Train, and write the recording; returns where."""
    gradient = train(_STEPS, _SEED).gradients[_NAME]
    matrix = (gradient / gradient.abs().max()).half().numpy()
    _FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(_FILE, matrix=matrix, name=_NAME, steps=_STEPS, seed=_SEED)
    return _FILE


if __name__ == "__main__":
    print(record())
