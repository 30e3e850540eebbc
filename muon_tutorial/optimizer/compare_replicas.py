"""Before the first step, ranks that hold the same part of a parameter compare what they hold.

Ranks that began from different seeds, or loaded different files, would step without a word: with ``zero1``
towards one model blended from several, elsewhere as models that drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import MismatchError
from ..parameters.describe_matrices import named_params
from ..parameters.dtensor_placements import dtensor_cuts
from ..step.agreement import checksum_flags, differ
from ..step.parameter_state import local_part
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, sum_counts
from .make_steps import MeshStep


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """This rank's part of a parameter, and the axes along which every rank holds the same."""

    name: str
    part: Tensor
    axes: frozenset[str]


def compare_replicas(steps: Sequence[MeshStep], companions: Sequence[torch.optim.Optimizer]) -> None:
    """Compare the parameters on every mesh of real processes, and those that other optimizers step.

    Companions' DTensors are compared on the meshes of the steps, where they lie on one of them; their plain
    parameters are taken to be the same along ``dp``. Two tiny sums an axis. All ranks must call.

    Raises:
        MismatchError: on all ranks: a parameter is not the same where it should be.
    """
    for mesh in steps:
        if isinstance(mesh.step, PlanStep) and isinstance(mesh.world, LiveWorld):
            beside = _beside(companions, mesh.world, plain=mesh is steps[0])
            _compare(mesh.world, [*_planned(mesh.step), *beside])


def _planned(step: PlanStep) -> Iterator[Replica]:
    for shard in step.momentum_shards.values():
        matrix = shard.shards[0].entry.matrix
        axes = frozenset(step.at.grid.axes) - {axis for axis, _ in matrix.cuts}
        yield Replica(matrix.name, shard.parameter.data, axes)


def _beside(companions: Iterable[torch.optim.Optimizer], world: LiveWorld, plain: bool) -> Iterator[Replica]:
    for optimizer in companions:
        for number, group in enumerate(optimizer.param_groups):
            for name, param in named_params(group, number):
                if isinstance(param, DTensor) and torch.equal(param.device_mesh.mesh, world.mesh.mesh):
                    cut = {axis for axis, _ in dtensor_cuts(name, param, world.grid.axes)}
                    yield Replica(name, local_part(param.detach()), frozenset(world.grid.axes) - cut)
                elif plain and not isinstance(param, DTensor):
                    yield Replica(name, param.detach(), frozenset({"dp"}))


def _compare(world: LiveWorld, replicas: Sequence[Replica]) -> None:
    device = replicas[0].part.device if replicas else torch.device("cpu")
    flags = checksum_flags([replica.part for replica in replicas], device)
    wrong = torch.zeros(len(replicas), dtype=torch.float64, device=device)
    axes = [axis for axis in world.grid.axes if world.grid.size(axis) > 1]
    for axis in axes:
        sums = sum_counts(flags.clone(), world.group((axis,)))
        for index, (replica, pair) in enumerate(zip(replicas, sums, strict=True)):
            wrong[index] += axis in replica.axes and differ(pair, world.grid.size(axis))
    for axis in axes:  # so that all ranks learn of it
        sum_counts(wrong, world.group((axis,)))
    names = [replica.name for replica, count in zip(replicas, wrong.tolist(), strict=True) if count]
    if names:
        others = f", nor are {len(names) - 1} others" if len(names) > 1 else ""
        raise MismatchError(
            f"before the first step {names[0]} is not the same on all ranks that should hold the same of "
            f"it{others}: seed the ranks alike, or broadcast the model from one of them (DDP does), and load "
            "the same file on all"
        )
