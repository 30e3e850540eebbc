"""Data recorded from real runs and shipped with the package, so that lessons start from the same numbers.

``python -m muon_tutorial.learn.inputs.recordings`` makes ``gradient.npz`` and ``gradient_down.npz`` again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .small_gpt import train

_FOLDER = Path(__file__).with_name("recorded")
_FILES = {"up": "gradient.npz", "down": "gradient_down.npz"}
_STEPS, _SEED = 300, 0


@dataclass(frozen=True, slots=True)
class RecordedGradient:
    """A recorded gradient, scaled to a largest absolute entry of 1; the parameter and run that it is from."""

    matrix: Tensor
    name: str
    steps: int
    seed: int

    def __str__(self) -> str:
        size = " × ".join(map(str, self.matrix.shape))
        what = f"the gradient of {self.name} ({size})"
        return f"{what}, recorded after {self.steps} steps with seed {self.seed}"


def real_gradient(which: Literal["up", "down"] = "up") -> RecordedGradient:
    """A training gradient in float64 whose largest absolute entry is 1; up is 256 × 64, down is 64 × 256."""
    with np.load(_FOLDER / _FILES[which]) as stored:
        matrix = torch.from_numpy(stored["matrix"].astype(np.float64))
        return RecordedGradient(matrix, str(stored["name"]), int(stored["steps"]), int(stored["seed"]))


def record() -> Path:
    """Train, write the recordings, and return their folder."""
    gradients = train(_STEPS, _SEED).gradients
    _FOLDER.mkdir(exist_ok=True)
    for which, file in _FILES.items():
        name = f"blocks.1.mlp.{which}.weight"
        matrix = (gradients[name] / gradients[name].abs().max()).half().numpy()
        np.savez_compressed(_FOLDER / file, matrix=matrix, name=name, steps=_STEPS, seed=_SEED)
    return _FOLDER


if __name__ == "__main__":
    print(record())
