"""Ranks that hold the same part of a parameter compare it, and its state, before the first step and at times.

Ranks that began from different seeds, or loaded different files, would step without a word: with ``zero1``
towards one model blended from several, elsewhere as models that drift apart. So would ranks of which one has
lost a bit. Hashes travel, one number and its square a parameter; a tensor does where it is broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.collective import Label, Walk
from ..engine.travel import travel
from ..errors import MismatchError
from ..parameters.describe_matrices import named_params
from ..parameters.dtensor_placements import dtensor_cuts
from ..plan.layout import Hop, Owned, Replicate, Route
from ..step.agreement import HASHES, checksum, differ, say_outliers
from ..step.parameter_state import local_part
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, gather_objects, sum_counts
from ..worlds.local import LocalMesh
from .make_steps import MeshStep

Axes = frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Tensors of this rank, and the axes along which every rank holds the same.

    Whether it was ``named`` by the user: else the name says where it stands in a list, and that list may be
    in another order on another rank.
    """

    name: str
    parts: tuple[Tensor, ...]
    axes: Axes
    named: bool = True

    @property
    def hash(self) -> Tensor:
        """One hash of all parts, [], int64."""
        total = torch.zeros((), dtype=torch.int64)
        for part in self.parts:
            total = (31 * total.to(part.device) + 1 + checksum(part)) % HASHES
        return total


def compare_replicas(
    steps: Sequence[MeshStep], companions: Sequence[torch.optim.Optimizer], steps_done: int = 0
) -> None:
    """Compare parameters and state on every mesh of real processes, also what other optimizers step.

    Companions' DTensors are compared on the meshes of the steps, where they lie on one of them; their plain
    parameters are taken to be the same along ``dp``. Two tiny sums an axis. All ranks must call.

    Raises:
        MismatchError: on all ranks: something is not the same where it should be.
    """
    for world, replicas in _meshes(steps, companions, with_state=True):
        wrong = _differing(world, replicas)
        if wrong:
            when = f"after {steps_done} steps" if steps_done else "before the first step"
            others = f", nor are {len(wrong) - 1} others" if len(wrong) > 1 else ""
            remedy = "load a checkpoint" if steps_done else "seed all alike, or load the same file on all"
            raise MismatchError(
                f"{when} {replicas[wrong[0]].name} is not the same on all ranks that should hold the same of "
                f"it{others}: {_who_differs(world, replicas[wrong[0]])}; this step changed nothing: {remedy}"
            )


def compare_in_process(steps: Sequence[MeshStep]) -> None:
    """Compare this rank's parameters with those of the ranks that share its process, of a ``LocalWorld``.

    Raises:
        MismatchError: on the last of them that comes here: they hold different values.
    """
    for mesh in steps:
        if isinstance(mesh.step, PlanStep) and isinstance(mesh.world, LocalMesh):
            at = mesh.step.at
            for values, _ in _planned(mesh.step):
                place = tuple(at[axis] for axis in at.grid.axes if axis not in values.axes)
                said = mesh.world.held_by_ranks((values.name, place), int(values.hash))
                if len(said) == at.size(*values.axes) and len(set(said.values())) > 1:
                    raise MismatchError(
                        f"before the first step {values.name} is not the same on all ranks that should hold "
                        f"the same of it: {say_outliers([*said.values()], [*said])}; nothing was changed: "
                        "begin with the same values"
                    )


def broadcast_parameters(steps: Sequence[MeshStep], companions: Sequence[torch.optim.Optimizer]) -> None:
    """Give all ranks that should hold the same of a parameter the first one's, as DDP does when it is made.

    Only what differs travels. Parameters without values, on the meta device, are left alone, and those
    without names: nobody can tell which of another rank's they are. All ranks must call.
    """
    for world, replicas in _meshes(steps, companions, with_state=False):
        for index in _differing(world, replicas):
            if replicas[index].named:
                world.run(_sent_anew(replicas[index], world))


def _sent_anew(replica: Replica, world: LiveWorld) -> Walk:
    """The first rank's part along each axis in turn, written into the parameter."""
    [part] = replica.parts
    for axis in world.grid.axes:
        if axis in replica.axes and world.grid.size(axis) > 1:
            hop = Hop(axis, Owned(0), Replicate(), tuple(part.shape))
            mine = part.contiguous() if world.at[axis] == 0 else None
            label = Label("initial values", replica.name)
            part.copy_((yield from travel(mine, Route((hop,), part.dtype), world.at, label)))


def _meshes(
    steps: Sequence[MeshStep], companions: Sequence[torch.optim.Optimizer], with_state: bool
) -> Iterator[tuple[LiveWorld, list[Replica]]]:
    """What is held on each mesh of real processes, by parameter: its values and, if told to, its state."""
    for mesh in steps:
        if isinstance(mesh.step, PlanStep) and isinstance(mesh.world, LiveWorld):
            held = [*_planned(mesh.step), *_beside(companions, mesh.world, plain=mesh is steps[0])]
            values, states = zip(*held, strict=True) if held else ((), ())
            known = [it for it in values if not it.parts[0].is_meta]
            yield mesh.world, [*known, *(states if with_state else ())]


def _planned(step: PlanStep) -> Iterator[tuple[Replica, Replica]]:
    """Each parameter of a plan, and its momentum, which may be sliced over ``dp``."""
    for shard in step.momentum_shards.values():
        matrix = shard.shards[0].entry.matrix
        axes = frozenset(step.at.grid.axes) - {axis for axis, _ in matrix.cuts}
        sliced = frozenset({"dp"} if shard.flat else ())
        momentum = Replica(f"the momentum of {matrix.name}", (shard.parameter.momentum,), axes - sliced)
        named = "param_names" in shard.parameter.group
        yield Replica(matrix.name, (shard.parameter.data,), axes, named), momentum


def _beside(
    companions: Sequence[torch.optim.Optimizer], world: LiveWorld, plain: bool
) -> Iterator[tuple[Replica, Replica]]:
    """Each parameter of other optimizers on this mesh, and its state; plain ones where ``plain``."""
    for optimizer in companions:
        for number, group in enumerate(optimizer.param_groups):
            for name, param in named_params(group, number):
                if isinstance(param, DTensor) and torch.equal(param.device_mesh.mesh, world.mesh.mesh):
                    cut = {axis for axis, _ in dtensor_cuts(name, param, world.grid.axes)}
                    axes = frozenset(world.grid.axes) - cut
                elif plain and not isinstance(param, DTensor):
                    axes = frozenset({"dp"})
                else:
                    continue
                state = _state_tensors(optimizer.state.get(param, {}))
                yield (
                    Replica(name, (local_part(param.detach()),), axes, "param_names" in group),
                    Replica(f"the optimizer state of {name}", state, axes),
                )


def _state_tensors(state: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return tuple(local_part(state[key]) for key in sorted(state) if isinstance(state[key], Tensor))


def _differing(world: LiveWorld, replicas: Sequence[Replica]) -> list[int]:
    """Which replicas are not the same along one of their axes, the same answer on all ranks of the mesh."""
    axes = [axis for axis in world.grid.axes if world.grid.size(axis) > 1]
    if not axes or not replicas:
        return []
    device = torch.device("cpu") if world.mesh.device_type == "cpu" else replicas[0].parts[0].device
    hashes = torch.stack([replica.hash.to(device) for replica in replicas]).double()
    flags = torch.stack([hashes, hashes.square()], dim=1)
    wrong = torch.zeros(len(replicas), dtype=torch.float64, device=device)
    for axis in axes:
        sums = sum_counts(flags.clone(), world.group((axis,)))
        for index, (replica, pair) in enumerate(zip(replicas, sums.cpu(), strict=True)):
            wrong[index] += axis in replica.axes and differ(pair, world.grid.size(axis))
    for axis in axes:  # so that all ranks learn of it
        sum_counts(wrong, world.group((axis,)))
    return [index for index, count in enumerate(wrong.tolist()) if count]


def _who_differs(world: LiveWorld, replica: Replica) -> str:
    """Which ranks hold something else than the rest. All ranks of the mesh must call."""
    cut = tuple(world.at[axis] for axis in world.grid.axes if axis not in replica.axes)
    found = [(cut, world.at.rank, int(replica.hash))]
    for axis in reversed(world.grid.axes):
        if world.grid.size(axis) > 1:
            found = [told for some in gather_objects(found, world.group((axis,))) for told in some]
    for place in dict.fromkeys(place for place, _, _ in found):
        ranks, hashes = zip(*((rank, held) for its, rank, held in found if its == place), strict=True)
        if len(set(hashes)) > 1:
            return say_outliers(hashes, ranks)
    raise AssertionError("hashes differed in their sums, and do not one by one")
