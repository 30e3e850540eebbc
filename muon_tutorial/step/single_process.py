"""The step of a single process. There is no plan: every matrix is whole, and nothing travels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from ..adjusted_lr_and_decay import adjusted_lr
from ..engine.collective import Walk
from ..orthogonalizers.stack_sizes import runs_of_equals
from ..orthogonalizers.workspace import Workspace
from ..plan.grid import Grid
from ..plan.matrix import Index, Matrix, Parts, split_parts
from .agreement import ALONE, NOTHING_TO_COMPARE, Fingerprint
from .momentum import momentum_update
from .orthogonalize import newton_schulz_update, stack_size
from .parameter_state import group_parts, write_back
from .write_parameters import step_in_place

_HERE = Grid((), ()).at(0)


@dataclass(frozen=True, slots=True, eq=False)
class AloneStep:
    """Steps an optimizer's groups in this process alone, bitwise like ``torch.optim.Muon``."""

    groups: Sequence[dict[str, Any]]
    state: Mapping[Tensor, dict[str, Any]]
    workspace: Workspace = field(default_factory=Workspace)

    def agree(self, fingerprint: Fingerprint = NOTHING_TO_COMPARE, rest: Sequence[Tensor] = ()) -> Walk:
        """Raise the fingerprint's error, if there is one, before anything has changed."""
        if fingerprint.error is not None:
            raise fingerprint.error
        return
        yield  # never reached, but makes this function a generator

    def walk(self) -> Walk:
        """Take one optimizer step, group by group."""
        for group in self.groups:
            present = [param for param in group["params"] if param.grad is not None]
            for param in present:
                if "momentum_buffer" not in (state := self.state[param]):  # as in the stock optimizer
                    assert param.grad is not None
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
            parts, transposed = group_parts(group)
            if parts in (None, "flatten"):
                self._step_matrices(present, group)
            else:
                for param in present:
                    self._step_parts(param, parts, transposed, group)
        return
        yield  # never reached, but makes this function a generator

    def _step_matrices(self, params: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        """Step parameters that are one matrix each. A recipe takes small ones of equal shape together."""
        lr, momentum, nesterov = group["lr"], group["momentum"], group["nesterov"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        decay = 1 - lr * group["weight_decay"]
        keys = [(it.shape, self.state[it]["momentum_buffer"].dtype, it.device) for it in params]
        for places in runs_of_equals(keys, lambda _: len(params)):
            sides = _sides(keys[places[0]][0])
            full = sides[::-1] if group.get("transposed") else sides
            step = -adjusted_lr(lr, group["adjust_lr_fn"], full)
            alpha = step.item() if isinstance(step, Tensor) else step
            most = stack_size(sides, group, params[places[0]].device) if len(places) > 1 else 1
            if most > 1:
                self._step_stacks([params[place] for place in places], most, sides, decay, alpha, group)
                continue
            for place in places:
                param, grad = params[place], params[place].grad
                assert grad is not None
                ns_input = momentum_update(self.state[param]["momentum_buffer"], grad, momentum, nesterov)
                update = newton_schulz_update(ns_input, sides, group, self.workspace)
                param.mul_(decay)
                param.add_(update, alpha=alpha)

    def _step_stacks(
        self,
        params: Sequence[Tensor],
        most: int,
        sides: tuple[int, int],
        decay: float | Tensor,
        alpha: float,
        group: Mapping[str, Any],
    ) -> None:
        """Step matrices with equal ``sides``, stacks of at most ``most`` at a time."""
        for begin in range(0, len(params), most):
            its, inputs = params[begin : begin + most], []
            for param in its:
                assert param.grad is not None
                held = self.state[param]["momentum_buffer"], param.grad
                inputs.append(momentum_update(*held, group["momentum"], group["nesterov"]).reshape(sides))
            stack = torch.stack(inputs)
            updates = newton_schulz_update(stack, stack.shape, group, self.workspace)
            for param, update in zip(its, updates, strict=True):
                param.mul_(decay)
                param.add_(update.view(param.shape), alpha=alpha)

    def _step_parts(self, param: Tensor, parts: Parts, transposed: bool, group: Mapping[str, Any]) -> None:
        """Step each matrix within a parameter, with the same bits as if it were its own parameter."""
        stored, grad, whole = self.state[param]["momentum_buffer"], param.grad, param.detach()
        assert grad is not None
        for here, sides in matrices_in(tuple(param.shape), parts, transposed):
            assert not isinstance(here, EllipsisType)
            momentum = stored[here]
            ns_input = momentum_update(momentum, grad[here], group["momentum"], group["nesterov"])
            update = newton_schulz_update(ns_input.contiguous(), sides, group, self.workspace)
            step_in_place(whole, here, update, group, sides)
            write_back(stored, here, momentum)

    def trust(self) -> None:
        """Do nothing, because there are no other ranks."""

    ranks = ALONE

    averages = False
    """Whether the step averages gradients."""

    def forget(self) -> None:
        """Do nothing, because nothing is stored between steps."""


def matrices_in(
    shape: tuple[int, ...], parts: Parts, transposed: bool
) -> Iterator[tuple[EllipsisType | Index, tuple[int, int]]]:
    """Yield the index of each matrix in a parameter, and its rows and columns."""
    if parts in (None, "flatten"):
        yield ..., _sides(shape)
    else:
        for matrix in split_parts(Matrix(0, "", shape), parts, 0, transposed):
            yield matrix.slices(_HERE), matrix.sides


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a one-matrix parameter. Dimensions after the first count as columns."""
    return shape[0], math.prod(shape[1:])
