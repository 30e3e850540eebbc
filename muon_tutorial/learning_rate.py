"""The learning rate of an orthogonalized update: scaled by the shape of the full matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .errors import UsageError

ADJUST_LR_FNS = (None, "original", "match_rms_adamw")


def adjusted_lr(lr: float | Tensor, adjust_lr_fn: str | None, full_shape: Sequence[int]) -> float | Tensor:
    """Return the learning rate of the orthogonalized update, from the shape of the full matrix.

    ``None`` and ``"original"``: ``lr·sqrt(max(1, rows/columns))`` (Keller Jordan). ``"match_rms_adamw"``:
    ``lr·0.2·sqrt(max(rows, columns))`` (Moonshot, arXiv 2502.16982). Never pass a shard's shape.

    >>> adjusted_lr(0.1, "original", (8, 2)), adjusted_lr(0.1, "original", (2, 8))
    (0.2, 0.1)
    """
    rows, columns = full_shape[:2]
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjust_lr_fn in ADJUST_LR_FNS:
        return lr * math.sqrt(max(1, rows / max(1, columns)))
    raise UsageError(f"adjust_lr_fn must be one of {ADJUST_LR_FNS}, got {adjust_lr_fn!r}")
