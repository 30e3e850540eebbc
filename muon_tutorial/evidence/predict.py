"""Predicts the bytes of a step from the plan alone: walks the package's own step for one rank, without data.

Parameters are on the meta device, where tensors have sizes but no values. So a prediction takes a few
milliseconds per bucket and almost no memory, whether the grid has 4 ranks or 16,384.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..newton_schulz import KELLER_JORDAN
from ..plan.grid import Coordinate
from ..plan.layout import Box
from ..plan.matrix import Matrix, held_box
from ..plan.rounds import IN_FLIGHT
from ..plan.strategies import Plan
from ..step.parameter_state import ParameterState
from ..step.step import PlanStep
from ..worlds.shadow import requests_of
from .ledger import Ledger, entry_of

SETTINGS = {
    "lr": 0.02,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.1,
    "adjust_lr_fn": None,
    "ns_steps": 5,
    "ns_coefficients": KELLER_JORDAN,
    "eps": 1e-7,
}


def predict(plan: Plan, at: Coordinate) -> Ledger:
    """The ledger of one rank's step, as a real run would fill it."""
    step = step_over_ones(plan, at, torch.device("meta"), IN_FLIGHT, ns_steps=0)  # iterations send nothing
    with torch.no_grad():
        return Ledger([entry_of(request, at) for request in requests_of(step.walk())])


def step_over_ones(
    plan: Plan, at: Coordinate, device: torch.device, window: int = 1, **settings: Any
) -> PlanStep:
    """One rank's step over parameters and gradients of ones; on the meta device, they have only sizes.

    All parameters are in one group, whose settings are ``SETTINGS``, overridden by ``settings``.
    """
    group = {**SETTINGS, **settings}
    parameters = [
        ParameterState(with_gradient(box.shape, matrix.dtype, matrix.grad_dtype, device), group, {})
        for matrix, box in held_parameters(plan, at)
    ]
    step = PlanStep(plan, at, parameters, window)
    step.fill_state()
    return step


def held_parameters(plan: Plan, at: Coordinate) -> list[tuple[Matrix, Box]]:
    """For each parameter, in the order of indices: one of its matrices, and the box that this rank holds."""
    found = {entry.matrix.param: entry.matrix for bucket in plan.buckets for entry in bucket.entries}
    wholes = [(m, m.shape if m.part is None else m.part.shape) for _, m in sorted(found.items())]
    return [(matrix, held_box(whole, matrix.cuts, at)) for matrix, whole in wholes]


def with_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A parameter of ones with a gradient of ones."""
    param = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
    if grad_dtype is not dtype:
        param.grad_dtype = grad_dtype
    param.grad = torch.ones(shape, dtype=grad_dtype, device=device)  # on meta, ones_like is much slower
    return param
