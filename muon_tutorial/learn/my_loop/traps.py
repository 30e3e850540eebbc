"""Lesson 16: five things that go wrong in real loops, with numbers computed here in one process."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...learning_rate import adjusted_lr
from . import tiny_job

PARTS = 64
"""The number of partial gradients that are summed to show the loss of a dtype."""


def say_traps(seed: int) -> str:
    """The traps, one per line, with their numbers."""
    return "\n".join(
        (
            f"learning rate      a 64 × 16 matrix: lr × {_factor(None):.2f} as Muon has it, "
            f"lr × {_factor('match_rms_adamw'):.2f} at AdamW's size",
            f"weight decay       unless you say it: Muon {_default(torch.optim.Muon):g}, "
            f"AdamW {_default(torch.optim.AdamW):g}",
            f"embedding, head    two dimensions, too: by shape alone, Muon would take {_by_shape()} "
            f"matrices, not {_hidden()}",
            f"reduce dtype       {PARTS} gradients added in bfloat16: off by {_lost(seed):.1%} of the norm",
            f"checkpoint keys    {_key()} becomes {_key(compiled=True)} under torch.compile",
        )
    )


def _factor(adjust: str | None) -> float:
    return float(adjusted_lr(1.0, adjust, (64, 16)))


def _default(kind: type[torch.optim.Optimizer]) -> float:
    return float(inspect.signature(kind).parameters["weight_decay"].default)


def _by_shape() -> int:
    return sum(parameter.ndim == 2 for parameter in tiny_job.TinyModel().parameters())


def _hidden() -> int:
    return sum(name.startswith("layers") for name, _ in tiny_job.TinyModel().named_parameters())


def _lost(seed: int) -> float:
    """The relative error of a sum of partial gradients in bfloat16."""
    parts = [_gradient(step, seed) for step in range(PARTS)]
    low = torch.zeros_like(parts[0], dtype=torch.bfloat16)
    for part in parts:
        low += part.bfloat16()
    whole = torch.stack(parts).sum(0)
    return float((low.float() - whole).norm() / whole.norm())


def _gradient(step: int, seed: int) -> Tensor:
    model = tiny_job.build(seed)
    symbols, following = tiny_job.batch_of(step, seed)
    nn.functional.cross_entropy(model(symbols), following).backward()
    gradient = model.get_parameter("layers.0.up.weight").grad
    assert gradient is not None
    return gradient


def _key(compiled: bool = False) -> str:
    model: nn.Module = tiny_job.TinyModel()
    found: Any = torch.compile(model) if compiled else model
    return next(iter(found.state_dict()))
