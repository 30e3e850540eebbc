"""The learning rate's schedule."""

from __future__ import annotations

WARMUP_SHARE = 0.1
FINAL_LR_SHARE = 0.1


def lr_share(step: int, steps: int) -> float:
    """The fraction of the peak learning rate at ``step`` (from 0): a short warmup, then linear to 0.1."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 1.0 - (1.0 - FINAL_LR_SHARE) * done
