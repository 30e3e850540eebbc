"""The settings of a training run, and the checks that need no processes and no files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import GridError, UsageError
from ..launching.group_timeouts import check_timeout

Backend = Literal["gloo", "nccl"]

LARGEST_SEED = 2**43


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One training run. ``batch`` is the global batch on any grid, in sequences of ``context`` bytes."""

    dp: int = 2
    tp: int = 2
    strategy: str = "zero1"
    steps: int = 40
    lr: float = 0.02
    batch: int = 32
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    seed: int = 0
    text: str | None = None
    backend: Backend = "gloo"
    timeout: float = 30.0
    check: bool = True

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_fit(self)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step learns from, on all ranks together."""
        return self.batch * self.context


def check_numbers(options: object) -> None:
    """Refuse settings and options that are out of range; only ``lr`` and ``timeout`` must be present."""
    for name in ("dp", "tp", "steps", "batch", "context", "layers", "width", "heads", "save_every"):
        count = getattr(options, name, None)
        if count is not None and count < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {count}")
    lr, timeout = (getattr(options, name) for name in ("lr", "timeout"))
    if not (math.isfinite(lr) and lr > 0):
        raise UsageError(f"--lr must be a positive number, got {lr}")
    check_timeout(timeout, "--timeout")
    for name in ("grace", "max_seconds"):
        if getattr(options, name, None) is not None:
            check_timeout(getattr(options, name), f"--{name.replace('_', '-')}")


def _check_fit(s: TrainSettings) -> None:
    if not 0 <= s.seed < LARGEST_SEED:
        raise UsageError(f"--seed must lie between 0 and {LARGEST_SEED - 1}, got {s.seed}")
    if s.width % s.heads or (s.width // s.heads) % 2:
        raise UsageError(
            f"--width {s.width} must split into --heads {s.heads} of equal and even width; "
            f"try --width {max(1, s.width // (2 * s.heads)) * 2 * s.heads}"
        )
    if s.tp > s.heads:
        raise GridError(f"--tp {s.tp} is larger than --heads {s.heads}; every tp rank needs a head")
    if s.heads % s.tp:
        raise GridError(f"--tp {s.tp} cuts --heads {s.heads} unevenly; choose a tp that divides the heads")
    if s.batch % s.dp:
        raise GridError(
            f"--dp {s.dp} cuts --batch {s.batch} unevenly; choose a batch that is a multiple of dp, "
            f"for example --batch {-(-s.batch // s.dp) * s.dp}"
        )
