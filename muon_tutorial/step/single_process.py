"""The step of a single process. There is no plan: every matrix is whole, and nothing travels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from ..decay_and_add import adjusted_lr
from ..engine.collective import Walk
from ..orthogonalizers.iterate import runs_of_equals
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
        """Step parameters that are one matrix each. Neighbours of equal shape are stepped together."""
        lr, momentum = group["lr"], group["momentum"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        decay = 1 - lr * group["weight_decay"]
        keys = [(it.shape, self.state[it]["momentum_buffer"].dtype, it.device) for it in params]
        for places in runs_of_equals(keys, lambda key: _at_once(key[0], key[2], group)):
            its = [params[place] for place in places]
            sides = _sides(its[0].shape)
            buffers = [self.state[param]["momentum_buffer"] for param in its]
            grads = [param.grad.to(buffer.dtype) for param, buffer in zip(its, buffers, strict=True)]  # type: ignore[union-attr]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            inputs = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
            updates = self._newton_schulz(inputs, sides, group)
            full = sides[::-1] if group.get("transposed") else sides
            step = -adjusted_lr(lr, group["adjust_lr_fn"], full)
            for param in its:
                param.mul_(decay)  # _foreach_mul_ rounds the factor to bf16 first
            torch._foreach_add_(its, updates, alpha=step.item() if isinstance(step, Tensor) else step)

    def _newton_schulz(
        self, inputs: Sequence[Tensor], sides: tuple[int, int], group: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return the updates of matrices of one shape. Matrices are stacked if that does not change bits."""
        if len(inputs) > 1 and stack_size(sides, group, inputs[0].device) > 1:
            stack = torch.stack([each.reshape(sides) for each in inputs])
            stepped = newton_schulz_update(stack, stack.shape, group, self.workspace)
            return [each.view(inputs[0].shape) for each in stepped]
        return [newton_schulz_update(each, sides, group, self.workspace) for each in inputs]

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


AT_ONCE = 2**18
"""How many elements of momentum to update in one call. More would take more memory, but not less time."""


def _at_once(shape: Sequence[int], device: torch.device, group: Mapping[str, Any]) -> int:
    """How many parameters of one shape to step together: as many as can be stacked; without a stack, as many
    as ``AT_ONCE`` allows."""
    stacked = stack_size(_sides(shape), group, device)
    return stacked if stacked > 1 else max(1, AT_ONCE // max(1, math.prod(shape)))
