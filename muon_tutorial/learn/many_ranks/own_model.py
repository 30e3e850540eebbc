"""Lesson 14: the reader's own model, a config or a module on the meta device, planned on a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import GridError, UsageError
from ...timing.commands import find_machine
from ...timing.model_configs import shape_from_config
from ...timing.model_shape import ModelShape
from ...timing.module_shapes import shape_from_module
from ...timing.report import ModelPlan, plan_model, read_sizes, say_bytes, say_seconds
from .scaling import MACHINE, REPEATED

OwnModel = Mapping[str, Any] | Callable[[], nn.Module]
LEAST_ENTRIES, LEAST_RANKS, MOST_SHARES, MOST_OVER = 10**9, 1024, 1.25, 2.0
"""What the hard exercise asks: entries in matrices and ranks, at least; fair shares of the busiest owner and
the step, in times AdamW's, at most."""


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What the planner says of the reader's model on the reader's grid, with ``layerwise``."""

    plan: ModelPlan

    @property
    def shares(self) -> float:
        """Fair shares of the busiest owner."""
        return self.plan.estimates[0].fair_shares

    @property
    def over_adamw(self) -> float:
        """The step, in times AdamW's on the same grid."""
        return self.plan.estimates[0].seconds / self.plan.adamw

    def __repr__(self) -> str:
        one, shape = self.plan.estimates[0], self.plan.shape
        return (
            f"{shape.hidden:,} entries in {sum(family.count for family in shape.families):,} matrices on "
            f"{self.plan.ranks:,} ranks: {say_seconds(one.seconds)} a step, {self.over_adamw:.2f} times "
            f"AdamW's; the busiest owner has {self.shares:.2f} fair shares; {say_bytes(one.memory)} a rank\n"
            f"(predicted, by the file of {self.plan.machine.name})"
        )


def shape_of(model: OwnModel) -> ModelShape:
    """The matrices of a config, or of what a function returns with the meta device as default.

    Raises:
        UsageError: it is neither, or lacks a size.
    """
    if isinstance(model, Mapping):
        return shape_from_config(dict(model), "yours", "written by you", "your config")
    if not callable(model):
        raise UsageError("give a config as a dict, or a function that returns an nn.Module")
    with torch.device("meta"):
        made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(f"your function is to return an nn.Module; it returned {type(made).__name__}")
    return shape_from_module(made, "yours", "written by you")


def plan_mine(model: OwnModel, grid: str) -> OwnPlan:
    """The planner's word on a model of yours, on a grid such as ``"dp=128,tp=8"``.

    Raises:
        UsageError: the model or the grid is none.
        GridError: the grid does not divide the model.
    """
    shape = shape_of(model)
    if not shape.families:
        raise GridError("your model has no hidden matrix for Muon")
    found = plan_model(shape, read_sizes(grid), find_machine(MACHINE), strategies={"layerwise": REPEATED})
    return OwnPlan(found)


MY_MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 160,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
MY_GRID = "dp=256,tp=8"
"""The reference of the hard exercise: deep enough for all owners, wide enough for few messages."""
