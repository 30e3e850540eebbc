"""Prepares a saved state for loading: matches parameters by name, keeps precision, checks what it holds.

Momentum from other packages is converted before it gets here (``other_packages``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from ..guard.changed_parameters import widened
from ..parameters.describe_matrices import all_named
from ..step.parameter_state import local_part
from .split_parameters import WRAPPERS

Group = Mapping[str, Any]


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
    """A pre-hook of ``load_state_dict()``: checks DTensors, and puts saved parameters into this order."""
    ordered = in_order(state_dict["param_groups"], optimizer.param_groups)
    for group, own in zip(ordered, optimizer.param_groups, strict=False):
        for index, param in zip(group["params"], own["params"], strict=False):
            entry = state_dict["state"].get(index)
            for key, held in entry.items() if isinstance(entry, Mapping) else ():
                _check_piece(key, held, param)
    return {**state_dict, "param_groups": ordered}


def _check_piece(key: str, held: Any, param: Tensor) -> None:
    """Refuse a DTensor that ``torch.save`` has saved on a rank with another piece of the parameter."""
    if not isinstance(held, DTensor) or not isinstance(param, DTensor) or held.placements != param.placements:
        return
    there, here = (it.device_mesh.get_coordinate() or () for it in (held, param))
    pairs = zip(held.placements, there, here, strict=False)  # a rank outside a mesh has no coordinate
    if any(one != other and not placement.is_replicate() for placement, one, other in pairs):
        raise UsageError(
            f"the loaded {key} is the piece of the rank at {there} on the mesh, and this rank is at {here}: "
            "torch.save saves only its own rank's pieces of DTensors. Save by save_checkpoint() or "
            "torch.distributed.checkpoint, or load on each rank what it has saved itself"
        )


def in_order(saved: Sequence[Group], own: Sequence[Group]) -> Sequence[Group]:
    """Return the saved groups with their parameters in the order of this optimizer's own groups.

    Parameters are matched by name, without the words that wrappers insert. If no name is on both sides, for
    example because all have another prefix, parameters are matched by position.

    Raises:
        UsageError: a group has other names than the saved group, but some names are on both sides; or it has
            other ``parts`` or another ``transposed``.
    """
    if len(saved) != len(own):
        return saved  # the stock method raises
    theirs, ours = ([_names(group) for group in groups] for groups in (saved, own))
    shared = {name for names in theirs for name in names} & {name for names in ours for name in names}
    ordered = []
    for number, (group, before, now) in enumerate(zip(saved, theirs, ours, strict=True)):
        for key in ("parts", "transposed"):
            mine = own[number].get(key)
            if _spelled(group.get(key, mine)) != _spelled(mine):
                raise UsageError(
                    f"group {number} was saved with {key}={group[key]!r} and has {mine!r} here: make the "
                    "optimizer with the saved value; if it was wrong, correct it after loading"
                )
        if before and now and len(before) == len(now) and before != now:
            if {*before} == {*now}:
                params = dict(zip(before, group["params"], strict=True))
                names = own[number]["param_names"]
                group = {**group, "params": [params[name] for name in now], "param_names": list(names)}
            elif shared & {*before, *now}:
                gone = min({*before} - {*now}, default=before[0])
                new = min({*now} - {*before}, default=now[0])
                raise UsageError(
                    f"group {number} was saved with {gone} and has {new} here, which would get the state of "
                    "another parameter: load into an optimizer with the same parameters in each group; if "
                    "a parameter was renamed, write its new name into the saved param_names"
                )
        ordered.append(group)
    return ordered


def _spelled(said: Any) -> Any:
    """Return ``parts`` in one form, even if it can be written in two; return ``transposed`` unchanged."""
    return ("heads", said) if type(said) is int else None if said == "flatten" else said


def _names(group: Group) -> list[str]:
    """Return the names of a group's parameters, without wrappers' words unless two would become equal."""
    names = list(group.get("param_names") or ())
    bare = [".".join(word for word in name.split(".") if word not in (*WRAPPERS, "module")) for name in names]
    return bare if len({*bare}) == len(bare) else names


def own_lr(group: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """If other groups share an ``lr`` tensor, copy it: a scheduler would scale a shared tensor twice."""
    if isinstance(group["lr"], Tensor) and any(group["lr"] is other["lr"] for other in others):
        group["lr"] = group["lr"].clone()


def check_momentum(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]) -> None:
    """Raise ``UsageError`` if a loaded momentum has another shape than its parameter.

    Steps that store slices of the momentum do not call this.
    """
    for name, param, _ in all_named(groups):
        entry = state.get(param, {})
        momentum = entry.get("momentum_buffer")
        if momentum is not None and momentum.shape != param.shape:
            whose = "one rank's slice, saved with a strategy" if "kept" in entry else "another parameter's"
            raise UsageError(
                f"{name} has shape {tuple(param.shape)}, but the loaded momentum has "
                f"{tuple(momentum.shape)}: it is {whose}; load_checkpoint() reads checkpoints from any grid"
            )


def check_moment_values(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    """Raise ``UsageError`` if a moment is not finite, or if a step count or average of squares is negative.

    This reads all moments, so it is called only after a load.
    """
    for name, param, _ in all_named(groups):
        entry = state.get(param, {})
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
            held = local_part(torch.as_tensor(entry.get(key, 0.0)))
            numbers = torch.view_as_real(held) if held.is_complex() else held
            if numbers.is_meta or not numbers.numel():
                continue
            least, most = (float(end) for end in numbers.aminmax())
            if not (math.isfinite(least) and most < math.inf and (least >= 0 or key == "exp_avg")):
                must = "must be finite" if key == "exp_avg" else "must be finite and not negative"
                raise UsageError(
                    f"AdamW's {key} of {name} {must}, but its elements go from {least:g} to {most:g}; "
                    "nothing was changed"
                )
