"""What a load makes of a saved state: parameters by name, momentum as precise as it was, complete groups.

Momentum from other packages is brought into this form before it comes here.
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
    """A saved tensor that the stock ``load_state_dict`` passes on as it is: it would cast a bare one."""

    tensor: Tensor


def hide_tensors(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before ``load_state_dict()``: hide each tensor of the state. ``show_tensors`` undoes it."""
    return {**state_dict, "state": {index: _hidden(entry) for index, entry in state_dict["state"].items()}}


def _hidden(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {key: _Hidden(value) if isinstance(value, Tensor) else value for key, value in entry.items()}


def show_tensors(state: Mapping[Any, Any]) -> None:
    """Put in the place of each hidden tensor a copy for its parameter, not less precise than before."""
    for param, entry in state.items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            entry[key] = widened(value.tensor, param) if isinstance(value, _Hidden) else value


def follow_names(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before ``load_state_dict()``: put a saved group's parameters into this optimizer's order.

    Where both name them; where names are others (a wrapper's prefix), places count.

    Raises:
        UsageError: some names are the same, in other places, and others are not there.
    """
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        return state_dict  # the stock method says so
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
            f"the saved state holds {moved[0]} in another place, and {missing}, which this optimizer does "
            "not have: load it into an optimizer over the same parameters, or use load_checkpoint()"
        )
    return saved


def fill_groups(groups: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
    """Give loaded groups what they do not say, as the groups before them had it: other Muons save less."""
    for group, old in zip(groups, before, strict=True):
        for key, value in old.items():
            group.setdefault(key, value)


def own_lr(group: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Give a group a tensor ``lr`` of its own where another group has the same: else it is scaled twice."""
    if isinstance(group["lr"], Tensor) and any(group["lr"] is other["lr"] for other in others):
        group["lr"] = group["lr"].clone()
