"""The small training job that every fault disturbs, and its oracle: ``torch.optim.Muon`` in one process.

Gradients are multiples of 2⁻⁶, so averages over 2, 3 or 4 ranks are exact, and every strategy must give the
oracle's bits. If a strategy averages gradients itself, dp positions get different gradients. ``gram`` is left
out, because it is not bitwise equal.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from muon_tutorial import Coordinate, DistributedConfig, LiveWorld, Muon, create_dtensor_config
from muon_tutorial.engine.collective import Collective, Label, Walk
from muon_tutorial.parameters.dtensor_placements import dtensor_cuts
from muon_tutorial.plan.layout import Placement, Replicate, Shard, shard_box
from muon_tutorial.plan.matrix import held_box
from muon_tutorial.plan.strategies import Builder, owner, owner_per_replica, replicated, round_robin, zero1
from muon_tutorial.step.parameter_state import local_part
from muon_tutorial.worlds.local import LocalMesh

SHAPES = ((8, 12), (12, 8), (4, 12), (12, 4), (8, 8), (8, 12))
CUTS: tuple[Placement, ...] = (Shard(0), Shard(1), Shard(1), Shard(0), Replicate(), Shard(0))
WHOLE = 4  # if parameters are plain tensors, every rank holds the matrix of this number whole
TWINS = (0, 5)  # two matrices of the same shape and cut
STEPS = 4
FAULT_AT = 1  # the step with the fault

PLANNED: Mapping[str, Builder] = {
    "zero1 all": partial(zero1, gather="all", round_bytes=400),
    "zero1 boundary": partial(zero1, gather="boundary", round_bytes=400),
    "owner": partial(owner, round_bytes=400),
    "owner_per_replica": partial(owner_per_replica, round_bytes=400),
    "round_robin": partial(round_robin, round_bytes=400),
    "replicated": partial(replicated, round_bytes=400),
}
_STOCK = inspect.signature(torch.optim.Muon).parameters
FSDP2, OWN_FUNCTIONS = "dtensors over FSDP2", "own functions"
STRATEGIES = (*PLANNED, FSDP2, OWN_FUNCTIONS)


@cache
def first_values() -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=made) for shape in SHAPES)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a rank builds; a fault gives one rank another blueprint.

    ``order``: the numbers of the matrices, in the order in which they are passed to Muon. ``averages``:
    whether the step averages gradients over dp.
    """

    strategy: str
    wholes: tuple[Tensor, ...] = field(default_factory=first_values)
    cuts: tuple[Placement, ...] = CUTS
    order: tuple[int, ...] = tuple(range(len(SHAPES)))
    settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    has_names: bool = True

    @property
    def averages(self) -> bool:
        return self.strategy.startswith("zero1")


@dataclass(frozen=True, slots=True, eq=False)
class Rig:
    """One rank's model and optimizer. ``params`` are indexed by the matrix's number, not by ``order``."""

    blueprint: Blueprint
    at: Coordinate
    params: Mapping[int, nn.Parameter]
    muon: Muon

    def give(self, step: int) -> None:
        for index, param in self.params.items():
            grad = gradient(self.blueprint, self.at, step, index)
            param.grad = like(param, held(param, grad, self.blueprint.cuts[index], self.at), grad)

    def digest(self) -> str:
        """A hash of everything that a step may change."""
        state = [value for entry in self.muon.state.values() for value in entry.values()]
        found = hashlib.sha256()
        for tensor in filter(torch.is_tensor, (*self.params.values(), *state)):
            found.update(raw_bytes(local_part(tensor.detach())))
        return found.hexdigest()

    def equals(self, wholes: Sequence[Tensor]) -> bool:
        """Whether this rank holds exactly its parts of these matrices."""
        return len(wholes) == len(self.params) and all(
            raw_bytes(local_part(param.detach()))
            == raw_bytes(held(param, wholes[index], self.blueprint.cuts[index], self.at))
            for index, param in self.params.items()
        )


def build(plan: Blueprint, world: LiveWorld | LocalMesh) -> Rig:
    """One rank's parameters and optimizer; TutorialError if a blueprint does not fit. All ranks must call."""
    params = _parameters(plan, world)
    named = [(f"w{index}", params[index]) for index in plan.order]
    given = named if plan.has_names else [param for _, param in named]
    muon = Muon(given, **plan.settings, **distribution(plan.strategy, world))
    return Rig(plan, world.at, params, muon)


def gradient(plan: Blueprint, at: Coordinate, step: int, index: int) -> Tensor:
    """The whole gradient of one matrix at a dp position."""
    mean, spread = _grains(step, index, tuple(plan.wholes[index].shape))
    places = at.size("dp")
    off = 2 * at["dp"] - (places - 1) if plan.averages else 0  # the offsets add up to zero over dp
    return (mean + off * spread) * 2.0**-6


@cache
def _grains(step: int, index: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1000 * step + index)
    mean, spread = (torch.randint(-most, most + 1, shape, generator=made) for most in (31, 8))
    return mean.float(), spread.float()


Given = Callable[[int, int, Tensor], Tensor]
"""Changes a mean gradient as a fault does, given the step, the matrix's number, and the gradient."""


def oracle(plan: Blueprint, given: Given | None = None) -> list[Tensor]:
    """The matrices after all steps of ``torch.optim.Muon`` on whole matrices."""
    params = [nn.Parameter(whole.clone()) for whole in plan.wholes]
    # Empty matrices are left out, because torch's Muon divides by the length of a side.
    known = {key: value for key, value in plan.settings.items() if key in _STOCK}
    muon = torch.optim.Muon([param for param in params if param.numel()], **known)
    for step in range(STEPS):
        for index, param in enumerate(params):
            mean = _grains(step, index, tuple(param.shape))[0] * 2.0**-6
            param.grad = given(step, index, mean) if given is not None and step == FAULT_AT else mean
        muon.step()
    return [param.detach() for param in params]


def without_share(rig: Rig, missing: int, at: Coordinate) -> Given:
    """Mean gradients if the rank at ``at`` has no gradient for the matrix ``missing``, so its part counts as
    zero.
    """
    whole = gradient(rig.blueprint, at, FAULT_AT, missing)
    box = shard_box(tuple(whole.shape), rig.blueprint.cuts[missing], at["tp"], at.size("tp"))

    def given(step: int, index: int, grad: Tensor) -> Tensor:
        if index == missing:
            grad[box.slices] -= whole[box.slices] / at.size("dp")
        return grad

    return given


def _parameters(plan: Blueprint, world: LiveWorld | LocalMesh) -> dict[int, nn.Parameter]:
    indices = sorted(plan.order)
    if plan.strategy != FSDP2:
        params = {i: nn.Parameter(_part(plan.wholes[i], plan.cuts[i], world.at)) for i in indices}
        for i, param in params.items():
            cut = plan.cuts[i]
            param.partition_dim = cut.dim if isinstance(cut, Shard) else -1  # type: ignore[attr-defined]
        return params
    assert isinstance(world, LiveWorld)
    model = nn.ParameterList()
    for whole, cut in ((plan.wholes[i].clone(), plan.cuts[i]) for i in indices):
        placement = TorchShard(cut.dim) if isinstance(cut, Shard) else TorchReplicate()
        model.append(nn.Parameter(distribute_tensor(whole, world.mesh["tp"], [placement])))
    fully_shard(model, mesh=world.mesh["dp"])
    return dict(zip(indices, model, strict=True))


def _part(whole: Tensor, cut: Placement, at: Coordinate) -> Tensor:
    return whole[shard_box(tuple(whole.shape), cut, at["tp"], at.size("tp")).slices].clone()


def distribution(strategy: str, world: LiveWorld | LocalMesh) -> dict[str, Any]:
    if strategy == FSDP2:
        return {"distributed_config": create_dtensor_config()}
    if strategy == OWN_FUNCTIONS:
        assert isinstance(world, LiveWorld)
        return {"distributed_config": own_functions(world)}
    return {"strategy": PLANNED[strategy], "mesh": world}


def own_functions(world: LiveWorld) -> DistributedConfig:
    """Functions that a user might write for replicated parameters; ranks own the matrices in turn."""

    def assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        return {index: index % world.grid.world_size for index in range(len(params))}

    def gather(momentum: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        return momentum if world.at.rank == dst_rank else None

    def redistribute(update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        shape = state["local_shape"]
        send = None if update is None else update.reshape(-1)
        count, label = shape[0] * shape[1], Label("update from its owner", f"w{state['param_idx']}")
        request = Collective("broadcast", ("dp",), torch.bfloat16, send, count, label, root=src_rank)
        return world.run(_ask(request)).view(shape)

    return DistributedConfig(assign, gather, redistribute)


def _ask(request: Collective) -> Walk:
    return (yield request)


def held(param: Tensor, whole: Tensor, cut: Placement, at: Coordinate) -> Tensor:
    """The part of a whole matrix that this rank's ``param`` holds."""
    if isinstance(param, DTensor):
        here = LiveWorld(param.device_mesh).at
        return whole[held_box(tuple(whole.shape), dtensor_cuts("", param), here).slices].contiguous()
    return _part(whole, cut, at)


def like(param: nn.Parameter, part: Tensor, whole: Tensor) -> Tensor:
    """A rank's part of a whole gradient, as a tensor of the kind of ``param``."""
    if not isinstance(param, DTensor):
        return part
    local = part.reshape(local_part(param.detach()).shape)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, shape=whole.shape, stride=whole.stride()
    )


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's bytes, for comparisons of all bits, in which NaNs of the same bits are equal."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
