"""Trains a small GPT for a few steps on Python's standard library, so that lessons have real gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import Muon, split_parameters
from ...training.gpt import GPT, GPTShape, build_gpt, next_byte_loss
from ...training.text import Batch, batch_at, load_text
from . import measure

GPT_SHAPE = GPTShape(layers=2, width=64, heads=4, context=64)
BATCH = 16
LR = 0.01
MEMORY = 0.95


@dataclass(frozen=True, slots=True)
class TrainedGPT:
    """A trained model, its last batch and loss, and gradients, mean squares and momenta by parameter."""

    model: GPT
    batch: Batch
    loss: float
    gradients: Mapping[str, Tensor] = field(repr=False)
    squares: Mapping[str, Tensor] = field(repr=False)
    momenta: Mapping[str, Tensor] = field(repr=False)


def train(steps: int, seed: int) -> TrainedGPT:
    """Train a small GPT for ``steps`` steps, its hidden matrices with Muon, and compute one more gradient."""
    with measure.one_thread():
        text = load_text(None, GPT_SHAPE.context)
        model = build_gpt(GPT_SHAPE, seed)
        hidden, rest = split = split_parameters(model)
        muon = Muon(hidden, lr=LR, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([parameter for _, parameter in rest], lr=LR)
        squares = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for step in range(steps + 1):
            batch = batch_at(text, step, BATCH, GPT_SHAPE.context, seed)
            model.zero_grad()
            loss = next_byte_loss(model, batch.inputs, batch.targets)
            loss.backward()
            for name, gradient in _gradients(model).items():
                squares[name].lerp_(gradient**2, 1 - MEMORY)
            if step < steps:
                muon.step()
                adamw.step()
        corrected = {name: square / (1 - MEMORY ** (steps + 1)) for name, square in squares.items()}
        named = dict(model.named_parameters())
        kept = {name: muon.state[named[name]] for name in split.hidden_names}
        momenta = {n: state.get("momentum_buffer", torch.zeros_like(named[n])) for n, state in kept.items()}
        return TrainedGPT(model, batch, loss.item(), _gradients(model), corrected, momenta)


def _gradients(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
