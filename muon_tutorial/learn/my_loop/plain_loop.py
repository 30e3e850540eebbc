"""Lesson 16: a plain FSDP2 loop with AdamW, as readers may have it, shown with line numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR


# fmt: off
def train(
    rank: int, model: nn.Module, shard: Callable, loss_of: Callable[..., Tensor], steps: int, file: Path
) -> None:
    """The loop, on one rank. All ranks must call."""
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if rank == 0: torch.save(model.state_dict(), file)  # noqa: E701
# fmt: on
