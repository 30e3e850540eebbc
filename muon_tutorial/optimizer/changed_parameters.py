"""What hosts do to parameters behind an optimizer's back: replaced, moved, given another dtype or shape.

The momentum follows where it can; where it cannot, an error says what happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import UsageError
from ..parameters.describe_matrices import named_params
from ..step.parameter_state import local_part
from .momentum_slice import MomentumSlice

TensorKind: TypeAlias = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""What a plan and a momentum are made for: dtype, device, shape."""


def tensor_kind(param: Tensor) -> TensorKind:
    """What a plan and a momentum for this parameter must fit."""
    return param.dtype, param.device, tuple(param.shape)


def drop_replaced(before: list[Tensor], now: list[Tensor], state: dict[Tensor, Any]) -> None:
    """Drop the state of parameters that others have replaced.

    The others start without momentum: that is right before the first step, and wrong after.

    Raises:
        UsageError: momentum would be lost.
    """
    gone = set(before) - set(now)
    if set(now) - set(before) and any(has_moved(state.get(param, {})) for param in gone):
        raise UsageError(
            f"{len(gone)} parameters were replaced by others after they had been stepped, and their momentum "
            "belongs to the old ones: construct the optimizer over the new parameters, then load its state"
        )
    for param in gone:
        if param in state and not has_moved(state[param]):
            del state[param]


def follow_changes(
    groups: Sequence[Mapping[str, Any]], before: Sequence[TensorKind], state: dict[Tensor, Any]
) -> None:
    """Bring each momentum to its parameter's device, and to its dtype where that is wider; drop one of zeros.

    ``before`` are the kinds that the same parameters had, in order.

    Raises:
        UsageError: a parameter has another shape than its momentum began with.
    """
    named = [pair for number, group in enumerate(groups) for pair in named_params(group, number)]
    for (name, param), was in zip(named, before, strict=True):
        entry = state.get(param, {})
        if was == tensor_kind(param) or "momentum_buffer" not in entry:
            continue
        if not has_moved(entry):
            del state[param]  # made anew, for the parameter as it is
        elif was[2] == tuple(param.shape):
            entry["momentum_buffer"] = widened(entry["momentum_buffer"], param)
        else:
            raise UsageError(
                f"{name} had shape {was[2]} when its momentum began, and has {tuple(param.shape)} now: "
                "construct the optimizer anew, over the parameters as they are"
            )


def check_moments(adamw: torch.optim.AdamW) -> None:
    """Refuse to step parameters that no longer fit what AdamW keeps of them: it would fail halfway.

    Raises:
        UsageError: a parameter has another dtype, device or shape than its moments.
    """
    for number, group in enumerate(adamw.param_groups):
        for name, param in named_params(group, number):
            moment = adamw.state[param].get("exp_avg") if param in adamw.state else None
            if moment is not None and tensor_kind(moment) != tensor_kind(param):
                raise UsageError(
                    f"{name} is {_say(param)} now, and AdamW's moments of it are {_say(moment)}: after "
                    "model.to(…), construct the optimizer anew and load its state_dict()"
                )


def _say(tensor: Tensor) -> str:
    dtype, device, shape = tensor_kind(tensor)
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {device}"


def has_moved(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state holds momentum that is not zero."""
    return "momentum_buffer" in state and bool(local_part(state["momentum_buffer"]).any())


def widened(saved: Tensor, param: Tensor | int) -> Tensor:
    """A copy of a tensor of the state for its parameter: on its device, and not less precise than before."""
    saved = saved.as_subclass(Tensor) if isinstance(saved, MomentumSlice) else saved
    if not isinstance(param, Tensor):  # state of a parameter that is not ours: kept, as the stock method does
        return saved
    dtype = torch.promote_types(saved.dtype, param.dtype)
    return saved.detach().to(device=param.device, dtype=dtype, copy=True)
