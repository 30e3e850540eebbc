"""Handles changes that a host makes without telling the optimizer.

Hosts replace, move, cast or reshape parameters, assign other groups and other state, and write to gradients
between ``ready_gradients()`` and ``step()``. The momentum is adapted to the change; where that is impossible,
an error says what happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..errors import UsageError
from ..parameters.describe_matrices import FLATTENED, all_named
from ..plan.matrix import Parts
from ..step.agreement import checksum
from ..step.parameter_state import group_parts, local_gradient, local_part, same_tensors
from .momentum_slice import MomentumSlice

TensorKind: TypeAlias = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""A parameter's dtype, device and shape. A plan or a momentum fits parameters of one kind only."""


def tensor_kind(param: Tensor) -> TensorKind:
    return param.dtype, param.device, tuple(param.shape)


class Changed(Flag):
    """What has changed since the steps were made."""

    NOTHING = 0
    GROUPS = auto()
    """A group, or the list of groups, was replaced by another object."""
    STATE = auto()
    """An entry of the state, or the momentum in it, was replaced, or the momentum's dtype has changed."""
    KINDS = auto()
    """A parameter's dtype, device, shape, ``grad_dtype`` or split into matrices has changed."""
    PARAMETERS = auto()
    """A parameter was replaced by another tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeParameter:
    """A parameter as it was when steps were made for it, with its group and its state."""

    param: Tensor
    kind: TensorKind
    group: Mapping[str, Any]
    parts: tuple[Parts, bool]
    entry: Any
    momentum: Any
    momentum_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class MadeFor:
    """The groups and the state for which the steps were made, and which they still use.

    A host may replace them, for example by ``optimizer.param_groups =`` or ``optimizer.state.clear()``.
    """

    groups: Sequence[Mapping[str, Any]] = ()
    state: Mapping[Tensor, Any] = field(default_factory=dict)
    each: Sequence[MadeParameter] = ()

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> MadeFor:
        """Record the current parameters of these groups."""
        each = []
        for group in groups:
            parts = group_parts(group)
            for param in group["params"]:
                entry = state.get(param)
                momentum = None if entry is None else entry.get("momentum_buffer")
                dtypes = getattr(momentum, "dtype", None), param.grad_dtype
                each.append(MadeParameter(param, tensor_kind(param), group, parts, entry, momentum, *dtypes))
        return cls(groups, state, each)

    def changes(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> Changed:
        """Return what has changed. This is one loop with little work per parameter; every step calls it."""
        same = groups is self.groups and state is self.state
        found = Changed.NOTHING if same else Changed.GROUPS
        index, count = 0, len(self.each)
        for group in groups:
            parts = group.get("parts"), group.get("transposed", False)
            for param in group["params"]:
                if index == count or (was := self.each[index]).param is not param:
                    return found | Changed.PARAMETERS | Changed.STATE
                index += 1
                dtype, device, shape = was.kind
                recast = param.dtype is not dtype or param.grad_dtype is not was.grad_dtype
                if recast or param.shape != shape or param.device != device:
                    found |= Changed.KINDS
                if group is not was.group:
                    found |= Changed.GROUPS | (Changed.KINDS if parts != was.parts else Changed.NOTHING)
                elif parts != was.parts:
                    found |= Changed.KINDS
                entry = state.get(param)
                momentum = None if entry is None else entry.get("momentum_buffer")
                now = getattr(momentum, "dtype", None)  # a host may cast the momentum in place
                if entry is not was.entry or momentum is not was.momentum or now != was.momentum_dtype:
                    found |= Changed.STATE
        return found if index == count else found | Changed.PARAMETERS | Changed.STATE


def drop_replaced(
    before: MadeFor, groups: Sequence[Mapping[str, Any]], state: MutableMapping[Tensor, Any]
) -> None:
    """Drop the state of replaced parameters. The new parameters start without momentum.

    Raises:
        UsageError: momentum would be lost.
    """
    old, now = {made.param for made in before.each}, {param for it in groups for param in it["params"]}
    gone = old - now
    if now - old and any(has_moved(state.get(param, {})) for param in gone):
        raise UsageError(
            f"{len(gone)} parameters were replaced after they had been stepped, and their momentum belongs "
            "to the old ones: construct the optimizer over the new parameters, then load its state"
        )
    for param in gone:
        if param in state and not has_moved(state[param]):
            del state[param]


def follow_changes(
    groups: Sequence[Mapping[str, Any]], before: MadeFor, state: MutableMapping[Tensor, Any]
) -> None:
    """Move each momentum to the parameter's device, and widen it to the parameter's dtype.

    A momentum that is still all zero is deleted instead. ``before`` describes the same parameters, in order,
    at the time when steps were last made.

    Raises:
        UsageError: a parameter has another shape than when its momentum began.
    """
    for (name, param, group), made in zip(all_named(groups), before.each, strict=True):
        entry, was = state.get(param, {}), made.kind
        is_cut = param.numel() != math.prod(was[2])  # a host may cut a parameter before the first step
        if was[2] != tuple(param.shape) and (not is_cut or has_moved(entry)):
            raise UsageError(
                f"{name} had shape {was[2]} when its momentum began, and has {tuple(param.shape)} now: "
                "construct a new optimizer over the current parameters"
            )
        now = tensor_kind(param), param.grad_dtype, group_parts(group)
        is_same = now == (was, made.grad_dtype, made.parts)
        if is_same or "momentum_buffer" not in entry:
            continue
        if not has_moved(entry):  # the step makes a new momentum
            del state[param]
            if "steps" in entry:
                state[param] = {"steps": entry["steps"]}
        else:
            entry["momentum_buffer"] = widened(entry["momentum_buffer"], param)


def check_alternation(
    groups: Sequence[Mapping[str, Any]], before: MadeFor, state: Mapping[Tensor, Any]
) -> None:
    """Raise ``UsageError`` if a parameter's interleaved ``parts`` have changed, and ranks keep slices of its
    momentum.

    A slice would then hold other elements. Other changes of ``parts`` also change ``kept`` in the state, so
    they are refused when the step is made.
    """
    known = {made.param: made.parts for made in before.each}
    for name, param, group in all_named(groups):
        entry, now = state.get(param, {}), group_parts(group)
        was = known.get(param, now)
        if was != now and "interleaved" in f"{was}{now}" and "kept" in entry and entry.get("steps"):
            raise UsageError(
                f"{name}: (parts, transposed) was changed from {was} to {now}, but ranks keep slices of its "
                "momentum in the old order: set it back, or change it under a strategy without slices, such "
                "as 'owner'"
            )


def check_flattened(groups: Sequence[Mapping[str, Any]], before: MadeFor) -> None:
    """Raise ``UsageError`` if a library has flattened a parameter. The message names the parameter."""
    for (name, param, _), made in zip(all_named(groups), before.each, strict=False):
        if param.ndim != len(made.kind[2]) and (param is made.param or param.ndim < 2):
            raise UsageError(
                f"{name} had shape {made.kind[2]} when this optimizer was made, and has {tuple(param.shape)} "
                f"now: {FLATTENED}"
            )


def check_moments(adamw: torch.optim.AdamW) -> None:
    """Raise ``UsageError`` if a parameter has another dtype, device or shape than its AdamW moments.

    AdamW would fail halfway through its step.
    """
    for name, param, _ in all_named(adamw.param_groups):
        moment = adamw.state[param].get("exp_avg") if param in adamw.state else None
        if moment is not None and tensor_kind(moment) != tensor_kind(param):
            remedy = "construct a new optimizer after model.to(…), and load the state_dict()"
            raise UsageError(
                f"{name} is {_say(param)} now, and AdamW's moments of it are {_say(moment)}: "
                f"{FLATTENED if hasattr(param, '_fsdp_flattened') else remedy}"
            )


def _say(tensor: Tensor) -> str:
    dtype, device, shape = tensor_kind(tensor)
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {device}"


def has_moved(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state contains momentum that is not zero."""
    held = local_part(state["momentum_buffer"]) if "momentum_buffer" in state else None
    return held is not None and not held.is_meta and bool(held.any())


def widened(saved: Tensor, param: Tensor | int) -> Tensor:
    """Copy a saved tensor to its parameter's device, in a dtype that holds the values of both dtypes."""
    saved = saved.as_subclass(Tensor) if isinstance(saved, MomentumSlice) else saved
    if not isinstance(param, Tensor):  # like torch's load_state_dict(), keep state that has no parameter
        return saved
    dtype = torch.promote_types(saved.dtype, param.dtype)
    return saved.detach().to(device=param.device, dtype=dtype, copy=True)


@dataclass(frozen=True, slots=True, eq=False)
class SeenGradients:
    """The gradients of some parameters at one moment, as weak references, perhaps with checksums.

    Only a checksum reveals every write, because old training loops write to ``p.grad.data``, which changes no
    version counter. ``changes_count`` says whether later changes matter. If nothing was averaged, it is
    False, and there are no checksums, because a step then uses whatever gradients it finds.
    """

    params: Sequence[Tensor] = ()
    tensors: Sequence[TensorWeakRef | None] = ()
    versions: Sequence[int] = ()
    bits: Tensor | None = None
    changes_count: bool = True

    @classmethod
    def of(cls, params: Sequence[Tensor], changes_count: bool = True) -> SeenGradients:
        """Record the current gradients. With ``changes_count``, every gradient is read once."""
        with torch._C.DisableTorchFunctionSubclass():  # skips UnreducedGradient's checks
            tensors = [None if param.grad is None else TensorWeakRef(param.grad) for param in params]
            versions = [0 if param.grad is None else param.grad._version for param in params]
        return cls(params, tensors, versions, _bits(params) if changes_count else None, changes_count)

    def were_skipped(self, params: Sequence[Tensor]) -> bool:
        """Whether ``backward()`` has produced or changed a gradient since this record was made."""
        if not same_tensors(self.params, params):
            return any(param.grad is not None for param in params)
        triples = zip(params, self.tensors, self.versions, strict=True)
        return any(
            param.grad is not None and (not _stands(param, tensor) or param.grad._version != version)
            for param, tensor, version in triples
        )

    def were_dropped(self) -> bool:
        """Whether all these gradients are gone. Another ``backward()`` may have produced new gradients."""
        pairs = list(zip(self.params, self.tensors, strict=True))
        if any(tensor is not None and _stands(param, tensor) for param, tensor in pairs):
            return False
        return any(tensor is not None or param.grad is not None for param, tensor in pairs)

    def have_changed(self) -> bool:
        """Whether any gradient was replaced or written to; always False without ``changes_count``."""
        if not self.changes_count:
            return False
        if not all(map(_stands, self.params, self.tensors)):
            return True
        now = _bits(self.params)
        return now is not None and self.bits is not None and not torch.equal(now, self.bits)


def _stands(param: Tensor, tensor: TensorWeakRef | None) -> bool:
    """Whether a parameter's gradient is the same tensor as before, or is still None."""
    if tensor is None or param.grad is None:
        return tensor is None and param.grad is None
    return tensor() is param.grad


def _bits(params: Sequence[Tensor]) -> Tensor | None:
    """Return a checksum of each gradient on this rank, [gradients]; None if there is nothing to read."""
    gradients = [grad for param in params if (grad := local_gradient(param)) is not None and not grad.is_meta]
    return torch.stack([checksum(grad) for grad in gradients]) if gradients else None
