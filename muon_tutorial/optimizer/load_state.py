"""Prepares a saved state for loading: matches parameters by name, keeps precision, completes groups.

Momentum from other packages is converted before it gets here (``other_packages``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..guard.changed_parameters import widened


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Wraps a saved tensor, so that the stock ``load_state_dict`` does not cast it."""

    tensor: Tensor


def hide_tensors(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A pre-hook of ``load_state_dict()``: wraps each tensor of the state. ``show_tensors`` unwraps them."""
    return {**state_dict, "state": {index: _hidden(entry) for index, entry in state_dict["state"].items()}}


def _hidden(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {key: _Hidden(value) if isinstance(value, Tensor) else value for key, value in entry.items()}


def show_tensors(state: Mapping[Any, Any]) -> None:
    """Replace each ``_Hidden`` by a copy of its tensor, on the parameter's device and never less precise."""
    for param, entry in state.items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            entry[key] = widened(value.tensor, param) if isinstance(value, _Hidden) else value


def follow_names(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A pre-hook of ``load_state_dict()``: puts a saved group's parameters into this optimizer's order.

    If both sides have the same names, parameters are matched by name. If names differ, for example by a
    prefix, they are matched by position.

    Raises:
        UsageError: only some names are on both sides, and one of these is at another position here.
    """
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        return state_dict  # the stock method raises
    pairs = zip(groups, optimizer.param_groups, strict=True)
    return {**state_dict, "param_groups": [_in_order(saved, own) for saved, own in pairs]}


def _in_order(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    theirs, ours = saved.get("param_names"), own.get("param_names")
    if not theirs or not ours or list(theirs) == list(ours) or len(theirs) != len(ours):
        return saved
    places = {name: place for place, name in enumerate(theirs)}
    if set(theirs) == set(ours):
        return {**saved, "params": [saved["params"][places[it]] for it in ours], "param_names": list(ours)}
    moved = [name for place, name in enumerate(ours) if places.get(name, place) != place]
    if moved:
        missing = next(name for name in theirs if name not in ours)
        raise UsageError(
            f"in the saved state, {moved[0]} is at another position, and {missing} is not in this optimizer: "
            "load the state into an optimizer over the same parameters, or use load_checkpoint()"
        )
    return saved


def own_lr(group: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """If other groups share an ``lr`` tensor, copy it: a scheduler would scale a shared tensor twice."""
    if isinstance(group["lr"], Tensor) and any(group["lr"] is other["lr"] for other in others):
        group["lr"] = group["lr"].clone()
