"""The step of one process without a plan: every matrix is whole here, and nothing travels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..engine.collective import Walk
from ..orthogonalizers.choices import check_orthogonalize
from ..orthogonalizers.workspace import Workspace
from ..plan.grid import Grid
from ..plan.matrix import Index, Matrix, Parts, split_parts
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
        """One optimizer step, matrix by matrix; equal small ones together where bits are the same."""
        for group in self.groups:
            waiting: dict[object, list[_Waiting]] = {}
            present = [param for param in group["params"] if param.grad is not None]
            alike = Counter(param.shape for param in present)
            for param in present:
                others = waiting if alike[param.shape] > 1 else None
                grad, state = param.grad, self.state[param]
                _step_parameter(param.detach(), grad, group, state, self.workspace, others)
            for its in waiting.values():
                _step_together(its, group, self.workspace)
        return
        yield  # a generator that asks for nothing

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


_Waiting: TypeAlias = tuple[Tensor, Tensor, tuple[int, int]]
"""A parameter, its Newton–Schulz input, and the sides that both are seen as."""


def _step_parameter(
    param: Tensor,
    grad: Tensor,
    group: Mapping[str, Any],
    state: dict[str, Any],
    workspace: Workspace,
    waiting: dict[object, list[_Waiting]] | None,
) -> None:
    """Step a parameter, or let it wait with those like it, if there are any, until a stack is full."""
    if (
        "momentum_buffer" not in state
    ):  # zeros in the gradient's layout and dtype, as the stock optimizer makes
        state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    for here, sides in _matrices(tuple(param.shape), *group_parts(group)):
        momentum = state["momentum_buffer"][here]
        ns_input = momentum_update(momentum, grad[here], group["momentum"], group["nesterov"])
        if here is not ...:
            part = param[here]
            _step_part(part, ns_input, group, sides, workspace)
            write_back(state["momentum_buffer"], here, momentum)
            write_back(param, here, part)
        elif waiting is not None and (size := stack_size(sides, group, ns_input.device)) > 1:
            its = waiting.setdefault((sides, ns_input.dtype, ns_input.device), [])
            its.append((param, ns_input, sides))
            if len(its) == size:
                _step_together(its, group, workspace)
                its.clear()
        else:
            apply_update(param, newton_schulz_update(ns_input, sides, group, workspace), group, sides)


def _step_together(its: Sequence[_Waiting], group: Mapping[str, Any], workspace: Workspace) -> None:
    """Step parameters of equal sides as one stack, to the bits of one by one."""
    if not its:
        return
    stack = torch.stack([ns_input.reshape(sides) for _, ns_input, sides in its])
    updates = newton_schulz_update(stack, stack.shape, group, workspace)
    for (param, _, sides), update in zip(its, updates, strict=True):
        apply_update(param, update.view(param.shape), group, sides)


def _step_part(
    part: Tensor, ns_input: Tensor, group: Mapping[str, Any], sides: tuple[int, int], workspace: Workspace
) -> None:
    """Step a matrix of its own within a parameter to the bits of a parameter of its own.

    A run of columns does not lie in one run of memory, and torch would round it otherwise.
    """
    stepped = part.contiguous()
    update = newton_schulz_update(ns_input.contiguous(), sides, group, workspace)
    apply_update(stepped, update, group, sides)
    if not part.is_contiguous():
        part.copy_(stepped)


def _matrices(
    shape: tuple[int, ...], parts: Parts, transposed: bool
) -> Iterator[tuple[EllipsisType | Index, tuple[int, int]]]:
    """Where each matrix lies in a parameter, and its rows and columns."""
    if parts in (None, "flatten"):
        yield ..., (shape[0], math.prod(shape[1:]))
    else:
        for matrix in split_parts(Matrix(0, "", shape), parts, 0, transposed):
            yield matrix.slices(_HERE), matrix.sides
