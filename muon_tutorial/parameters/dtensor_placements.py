"""A DTensor's placements become cuts of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import StrategyError
from ..plan.grid import Coordinate
from ..plan.layout import Shard
from ..plan.matrix import Cut


def dtensor_cuts(name: str, param: DTensor, names: Sequence[str] | None = None) -> tuple[Cut, ...]:
    """The axes that cut a DTensor, outermost first; by the mesh's own names unless told others.

    Placements read from left to right, except that a strided shard (FSDP2 over tensor parallelism) lies
    within the shards of the same dimension that stand to its right.

    Raises:
        StrategyError: a placement is partial, or the mesh has no axis names.
    """
    names = names or param.device_mesh.mesh_dim_names
    if names is None:
        raise StrategyError(
            f"{name} lies on a mesh without axis names: pass mesh_dim_names to init_device_mesh, or leave "
            "strategy= and mesh= out, which DTensors do not need"
        )
    outer: list[Cut] = []
    strided: list[Cut] = []
    for axis, placement in zip(names, param.placements, strict=True):
        if placement.is_partial():
            raise StrategyError(f"{name} is {placement} along {axis!r}: reduce it before the step")
        if isinstance(placement, _StridedShard):
            strided.append((axis, Shard(placement.dim)))
        elif isinstance(placement, TorchShard):
            outer.append((axis, Shard(placement.dim)))
    return (*outer, *strided)


def check_axes(name: str, param: DTensor, cuts: tuple[Cut, ...], at: Coordinate) -> None:
    sizes = dict(zip(param.device_mesh.mesh_dim_names or (), param.device_mesh.shape, strict=True))
    for axis, _ in cuts:
        if sizes[axis] != at.size(axis):
            raise StrategyError(
                f"{name} is cut over {sizes[axis]} ranks along {axis!r}, "
                f"which has {at.size(axis)} on the optimizer's mesh ({at.grid})"
            )
