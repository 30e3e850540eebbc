"""Converts momentum between this package and others. Each package has its own keys and kind of average.

The formats were read from each package's published code:

- ``torch``: ``torch.optim.Muon`` keeps a moving average, ``lerp(gradient, 1 - momentum)``, as
  ``momentum_buffer``.
- ``muon-optimizer``: Keller Jordan's PyPI classes keep the same momentum and AdamW's moments. The distributed
  classes sort parameters by shape, and each rank's file has only the momentum of its own parameters.
- ``dion``: ``Muon`` of microsoft/dion keeps a sum, ``momentum * mu + gradient``, as ``momentum``. AdamW's
  second moment is ``variance``, AdamW's step ``step_dev`` (the group's ``step`` before August 2026).
- ``megatron``: Megatron-LM's ``TensorParallelMuon`` and NVIDIA's emerging-optimizers use torch's format.
- ``deepspeed``: ``MuonWithAuxAdam`` at ZeRO stage 0 uses Keller Jordan's format. Stages 1 to 3 flatten
  parameters, so their state cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UsageError
from ..parameters.describe_matrices import all_named
from ..step.agreement import Fingerprint, compare_fingerprints
from ..step.step import PlanStep
from ..worlds.live import LiveWorld
from .muon import Muon
from .muon_with_adamw import MuonWithAdamW

Package = Literal["torch", "muon-optimizer", "dion", "megatron", "deepspeed"]


@dataclass(frozen=True, slots=True)
class Format:
    """A package's keys for the momentum, AdamW's moments and step. ``is_sum``: the momentum adds up gradients
    instead of averaging them.
    """

    momentum: str = "momentum_buffer"
    first: str = "exp_avg"
    second: str = "exp_avg_sq"
    step: str = "step"
    is_sum: bool = False


FORMATS: dict[str, Format] = {
    **dict.fromkeys(("torch", "muon-optimizer", "megatron", "deepspeed"), Format()),
    "dion": Format("momentum", "momentum", "variance", "step_dev", is_sum=True),
}


@dataclass(frozen=True, slots=True)
class MomentumReport:
    """Names of parameters in three lists: those that got a momentum, AdamW's moments, or neither."""

    package: str
    momenta: tuple[str, ...]
    moments: tuple[str, ...]
    anew: tuple[str, ...]

    def __str__(self) -> str:
        matrices = f"{self.package}: momentum of {len(self.momenta)} matrices"
        neither = f"; nothing for {', '.join(self.anew)}" if self.anew else ""
        return f"{matrices}, moments of {len(self.moments)} others{neither}"


def load_momentum(
    optimizer: Muon | MuonWithAdamW,
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    package: Package,
    names: Sequence[str] | None = None,
) -> MomentumReport:
    """Load the momentum, and AdamW's moments, from another package's ``state_dict()``.

    This optimizer keeps its hyperparameters. If each rank saved the momentum of only some parameters, pass
    the list of all ranks' dictionaries as ``saved``. Every rank must call this, with the whole list.

    Args:
        names: the names of the other optimizer's parameters in the order of its groups:
            ``[names[p] for g in optimizer.param_groups for p in g["params"]]``. By default, the
            ``param_names`` of the other optimizer's groups.

    Raises:
        UsageError: an entry matches no parameter of this optimizer, or has another shape, or two entries of
            one parameter differ. Nothing is changed.
        MismatchError: ranks that step together passed the momentum of different matrices of a plan. All of
            them raise it, and nothing is changed.
    """
    format_of = _format(package)
    own = {name: (param, group) for name, param, group in all_named(optimizer.param_groups)}
    taken: dict[str, dict[str, Any]] = {}
    refused: UsageError | None = None
    try:
        for name, entry in _entries(saved if isinstance(saved, Sequence) else [saved], names):
            made = _taken(name, entry, own, format_of)
            first = taken.setdefault(name, made)
            if first is not made and not all(torch.equal(value, made[key]) for key, value in first.items()):
                raise UsageError(
                    f"two states of {name} were passed, and they differ: if tensor parallelism cuts it, pass "
                    "only the files of this rank's own position; otherwise names= may list it twice"
                )
    except UsageError as error:  # the other ranks must not wait for this one
        refused = error
    _compare_names(optimizer, {own[name][0]: name for name in taken}, refused)
    if refused is not None:
        raise refused
    state = optimizer.state_dict()
    state["state"] |= {number: taken[name] for number, name in enumerate(own) if name in taken}
    optimizer.load_state_dict(state)
    momenta = tuple(name for name, entry in taken.items() if "momentum_buffer" in entry)
    others = tuple(name for name, entry in taken.items() if "momentum_buffer" not in entry)
    return MomentumReport(package, momenta, others, tuple(name for name in own if name not in taken))


def momentum_for(
    optimizer: Muon | MuonWithAdamW, package: Package, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return this optimizer's momentum and moments in the format of another package's ``state_dict()``.

    ``names`` lists the parameters in the other optimizer's order. The default is this optimizer's order. Put
    the result into a new ``state_dict()`` of the other optimizer: ``{**theirs.state_dict(),
    **momentum_for(…)}``. DTensors become whole tensors, so all ranks of their meshes must call this.

    Raises:
        UsageError: each rank has only a slice of a momentum. Load the checkpoint in one process first.
    """
    format_of = _format(package)
    own = {name: (param, group) for name, param, group in all_named(optimizer.param_groups)}
    order = list(own) if names is None else list(names)
    if unknown := sorted(set(order) - set(own)):
        raise UsageError(f"this optimizer does not step {', '.join(unknown)}")
    made = {i: dict(_given(name, *own[name], optimizer, format_of)) for i, name in enumerate(order)}
    return {"state": {i: entry for i, entry in made.items() if entry}}


def _format(package: str) -> Format:
    if package not in FORMATS:
        raise UsageError(f"package must be one of {', '.join(FORMATS)}, got {package!r}")
    return FORMATS[package]


def _entries(
    saved: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each non-empty entry of the saved states with its parameter's name."""
    for state in saved:
        groups = state["param_groups"]
        order = {number: group for group in groups for number in group["params"]}
        said = [name for group in groups for name in group.get("param_names", ())]
        known = said if names is None else list(names)
        if len(known) != len(order):
            raise UsageError(
                f"the state has {len(order)} parameters, and {len(known)} names: pass names=, in the order "
                "of the groups of the optimizer that saved it"
            )
        for name, (number, group) in zip(known, order.items(), strict=True):
            if state["state"].get(number):
                in_group = {key: group[key] for key in ("step", "mu") if key in group}
                yield name, {**in_group, **state["state"][number]}


def _taken(
    name: str, entry: Mapping[str, Any], own: Mapping[str, tuple[Tensor, dict[str, Any]]], its: Format
) -> dict[str, Any]:
    """Convert an entry to this optimizer's format."""
    if name not in own:
        raise UsageError(f"the state has {name}, which this optimizer does not step")
    param, group = own[name]
    is_muons = "ns_steps" in group
    keys = {its.momentum: "momentum_buffer"} if is_muons else {its.first: "exp_avg", its.second: "exp_avg_sq"}
    missing = [key for key in keys if not isinstance(entry.get(key), Tensor)]
    if missing or (is_muons and its.second in entry):
        whose = "AdamW's" if its.second in entry else "Muon's"
        raise UsageError(
            f"the saved state of {name} is {whose}, but here {'Muon' if is_muons else 'AdamW'} steps it"
        )
    made: dict[str, Any] = {ours: _whole(entry[key]).clone() for key, ours in keys.items()}
    wrong = next((it for it in made.values() if it.shape != param.shape), None)
    if wrong is not None:
        flat = ": ZeRO has flattened it, and its shape is lost" if wrong.ndim == 1 != param.ndim else ""
        raise UsageError(f"{name} is {tuple(param.shape)}, but its saved state is {tuple(wrong.shape)}{flat}")
    if is_muons:
        rate = entry.get("mu", group["momentum"])
        return {"momentum_buffer": made["momentum_buffer"].mul_(_share(rate, its))}
    if isinstance(param, DTensor):
        made = {key: distribute_tensor(it, param.device_mesh, param.placements) for key, it in made.items()}
    step = entry.get(its.step, entry.get("step"))
    if step is None:  # with a step of 0, AdamW would correct the moments' bias again
        raise UsageError(f"the saved state of {name} does not say how many steps AdamW has taken")
    return {"step": torch.tensor(float(step)), **made}


def _given(
    name: str, param: Tensor, group: Mapping[str, Any], optimizer: torch.optim.Optimizer, its: Format
) -> Iterator[tuple[str, Any]]:
    entry = optimizer.state.get(param) or {}
    if "kept" in entry:
        raise UsageError(
            f"{name}: each rank keeps a slice of its momentum: call save_checkpoint(), then "
            "load_checkpoint() in one process, which has the whole momentum"
        )
    if "momentum_buffer" in entry:
        yield its.momentum, _whole(entry["momentum_buffer"]) / _share(group["momentum"], its)
    elif "exp_avg" in entry:
        yield its.first, _whole(entry["exp_avg"]).clone()
        yield its.second, _whole(entry["exp_avg_sq"]).clone()
        yield its.step, torch.tensor(float(entry["step"])) if its.is_sum else int(entry["step"])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _share(rate: Any, its: Format) -> float:
    """The factor that turns a package's momentum (``rate`` of it is kept) into a moving average."""
    return 1 - float(rate) if its.is_sum else 1.0


def _compare_names(
    optimizer: Muon | MuonWithAdamW, taken: Mapping[Tensor, str], refused: UsageError | None = None
) -> None:
    """Raise ``MismatchError`` if ranks of a plan load the momentum of different matrices."""
    muon = optimizer.muon if isinstance(optimizer, MuonWithAdamW) else optimizer
    for mesh in muon.steps:
        if isinstance(mesh.step, PlanStep) and isinstance(mesh.world, LiveWorld):
            found = sorted(taken[it.param] for it in mesh.step.parameters if it.param in taken)
            alike = Fingerprint({"the list of matrices whose momentum is loaded": ", ".join(found)}, refused)
            mesh.world.run(compare_fingerprints(mesh.step.ranks, alike))
