"""Turns a DTensor's placements into cuts of the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import StrategyError
from ..plan.grid import Coordinate
from ..plan.layout import Shard
from ..plan.matrix import Cut


def dtensor_cuts(name: str, param: DTensor, names: Sequence[str] | None = None) -> tuple[Cut, ...]:
    """Return how axes cut a DTensor, outermost first. ``names`` replace the mesh's own axis names.

    Placements apply from left to right, with one exception. A strided shard (FSDP2 over tensor parallelism)
    applies after later shards of the same dimension. A strided shard's ``split_factor`` is the product of the
    sizes of those later axes (PyTorch: ``DTensorSpec._maybe_convert_StridedShard_to_shard_order``).

    Raises:
        StrategyError: a placement is partial, or the mesh has no axis names, or a strided shard is of another
            kind, such as one that cuts each part of a fused matrix.
    """
    names = names or param.device_mesh.mesh_dim_names
    if names is None:
        raise StrategyError(
            f"{name} lies on a mesh without axis names: pass mesh_dim_names to init_device_mesh, or leave "
            "strategy= and mesh= out, which DTensors do not need"
        )
    cuts: list[Cut] = []
    for axis, placement in zip(names, param.placements, strict=True):
        if placement.is_partial():
            raise StrategyError(f"{name} is {placement} along {axis!r}: reduce it before the step")
        if isinstance(placement, TorchShard | _StridedShard):
            cuts.append((axis, Shard(placement.dim)))
    for dim in {shard.dim for _, shard in cuts}:
        order = iter(_order(name, param, dim, names))
        cuts = [(next(order), shard) if shard.dim == dim else (axis, shard) for axis, shard in cuts]
    return tuple(cuts)


def _order(name: str, param: DTensor, dim: int, names: Sequence[str]) -> list[str]:
    """Return the axes that cut a dimension, outermost first."""
    sizes, order = dict(zip(names, param.device_mesh.shape, strict=True)), list[str]()
    for axis, placement in reversed(list(zip(names, param.placements, strict=True))):
        if not isinstance(placement, TorchShard | _StridedShard) or placement.dim != dim:
            continue
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        before = [math.prod(sizes[other] for other in order[:place]) for place in range(len(order) + 1)]
        if factor not in before:
            raise StrategyError(
                f"{name} is cut by {axis!r} as {placement}, within each of {factor} pieces, but no axes of "
                "its mesh cut it into so many: make each of its matrices a parameter of its own"
            )
        order.insert(before.index(factor), axis)
    return order


def check_axes(name: str, param: DTensor, cuts: tuple[Cut, ...], at: Coordinate) -> None:
    mesh = param.device_mesh
    here = mesh.get_coordinate() or (-1,) * mesh.ndim  # -1 if this rank is not on the mesh
    for axis, size, place in zip(mesh.mesh_dim_names or (), mesh.shape, here, strict=True):
        if axis in dict(cuts) and (size, place) != (at.size(axis), at[axis]):
            raise StrategyError(
                f"{name} is cut over {size} ranks along {axis!r}, which has {at.size(axis)} on the "
                f"optimizer's mesh ({at.grid}); this rank's position is {place} on the parameter's mesh and "
                f"{at[axis]} on the optimizer's: pass the mesh that cuts the parameters"
            )
