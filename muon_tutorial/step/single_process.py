"""The step of one process without a plan: every matrix is whole here, and nothing travels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Walk
from ..learning_rate import adjusted_lr
from ..orthogonalizers.choices import check_orthogonalize
from ..orthogonalizers.iterate import runs_of_equals
from ..orthogonalizers.workspace import Workspace
from ..plan.grid import Grid
from ..plan.matrix import Matrix, Parts, split_parts
from .agreement import ALONE, NOTHING_TO_COMPARE, Fingerprint
from .momentum import momentum_update
from .orthogonalize import newton_schulz_update, stack_size
from .parameter_state import group_parts, write_back
from .write_parameters import apply_update

_HERE = Grid((), ()).at(0)


@dataclass(frozen=True, slots=True, eq=False)
class AloneStep:
    """Steps an optimizer's groups in this process alone: ``torch.optim.Muon`` to the bit."""

    groups: Sequence[dict[str, Any]]
    state: Mapping[Tensor, dict[str, Any]]
    workspace: Workspace = field(default_factory=Workspace)

    def agree(self, fingerprint: Fingerprint = NOTHING_TO_COMPARE, rest: Sequence[Tensor] = ()) -> Walk:
        """Refuse to step, before anything has changed.

        Raises:
            TutorialError: what keeps this process from stepping.
        """
        if fingerprint.error is not None:
            raise fingerprint.error
        return
        yield  # a generator that asks for nothing

    def step(self) -> Walk:
        """One optimizer step, group by group; equal small matrices together where bits are the same."""
        for group in self.groups:
            present = [param for param in group["params"] if param.grad is not None]
            for param in present:
                if "momentum_buffer" not in (state := self.state[param]):  # as the stock optimizer makes it
                    assert param.grad is not None
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
            parts, transposed = group_parts(group)
            if parts in (None, "flatten"):
                self._step_matrices(present, group)
            else:
                for param in present:
                    self._step_parts(param, parts, transposed, group)
        return
        yield  # a generator that asks for nothing

    def _step_matrices(self, params: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        """Step parameters that are one matrix each."""
        lr, momentum, nesterov = group["lr"], group["momentum"], group["nesterov"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        decay = 1 - lr * group["weight_decay"]
        keys = [(*param.shape, param.grad.dtype, param.device) for param in params]  # type: ignore[union-attr]
        for places in runs_of_equals(keys, lambda key: stack_size(_sides(key[:-2]), group, key[-1])):
            first = params[places[0]]
            sides = _sides(first.shape)
            inputs = []  # each [rows, columns]
            for place in places:
                buffer, grad = self.state[params[place]]["momentum_buffer"], params[place].grad
                moved = momentum_update(buffer, grad, momentum, nesterov)
                inputs.append(moved if moved.ndim == 2 else moved.reshape(sides))
            together = inputs[0] if len(inputs) == 1 else torch.stack(inputs)
            update = newton_schulz_update(together, together.shape, group, self.workspace)
            adjusted = adjusted_lr(
                lr, group["adjust_lr_fn"], sides[::-1] if group.get("transposed") else sides
            )
            for place, its in zip(places, [update] if len(inputs) == 1 else update, strict=True):
                param = params[place].detach()
                param.mul_(decay)
                param.add_(its if its.shape == param.shape else its.reshape(param.shape), alpha=-adjusted)

    def _step_parts(self, param: Tensor, parts: Parts, transposed: bool, group: Mapping[str, Any]) -> None:
        """Step each matrix within a parameter to the bits of a parameter of its own.

        A run of columns does not lie in one run of memory, and torch would round it otherwise.
        """
        stored, grad, whole = self.state[param]["momentum_buffer"], param.grad, param.detach()
        assert grad is not None
        for matrix in split_parts(Matrix(0, "", tuple(param.shape)), parts, 0, transposed):
            here = matrix.slices(_HERE)
            momentum, part = stored[here], whole[here]
            ns_input = momentum_update(momentum, grad[here], group["momentum"], group["nesterov"])
            stepped = part.contiguous()
            update = newton_schulz_update(ns_input.contiguous(), matrix.sides, group, self.workspace)
            apply_update(stepped, update, group, matrix.sides)
            if not part.is_contiguous():
                part.copy_(stepped)
            write_back(stored, here, momentum)
            write_back(whole, here, part)

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a recipe that is unknown."""
        for group in groups:
            check_orthogonalize(group)

    def trust(self) -> None:
        """There are no other ranks to ask."""

    ranks = ALONE

    averages = False
    """Gradients are taken as they are."""

    def forget(self) -> None:
        """Nothing is kept between steps."""


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter that is one matrix: dimensions after the first count as columns."""
    return shape[0], math.prod(shape[1:])
