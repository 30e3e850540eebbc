"""Helpers that make a ``DistributedConfig`` from process groups, from a DeviceMesh or for DTensors.

What they make can be called function by function; the optimizer runs their plan packed, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..engine.collective import Label
from ..engine.travel import travel
from ..errors import ConfigError
from ..parameters.dtensor_meshes import read_dtensor_meshes
from ..parameters.on_meshes import (
    MeshParameters,
    ParametersOnMeshes,
    ReadParameters,
    global_rank,
    same_tensors,
)
from ..parameters.process_groups import read_process_groups
from ..parameters.tensor_parallel import TpDim
from ..plan.assign import longest_first, newton_schulz_cost
from ..plan.bucket import Bucket
from ..plan.strategies import owner
from ..step.parameter_state import local_part
from ..worlds.live import LiveWorld
from ..worlds.local import LocalMesh
from .config import DistributedConfig

# What the names of mesh dimensions mean; the first word of each row is the axis' name in the plan.
ROLES = {
    "fsdp": ("fsdp", "dp_shard", "shard"),
    "tp": ("tp",),
    "dp": ("dp", "ddp", "dp_replicate", "replicate"),
    "cp": ("cp",),
    "ep": ("ep",),
    "pp": ("pp",),
}
INDEPENDENT = ("ep", "pp")


class HelperFunctions:
    """The three functions of a helper, and what the optimizer plans with instead of calling them.

    What it finds out about the parameters is kept in the state that it is handed, under ``"on_meshes"``.
    """

    def __init__(self, read: ReadParameters) -> None:
        self._read = read

    def on_meshes(self, params: Sequence[Tensor], state: dict[str, Any]) -> ParametersOnMeshes:
        """Find out, once for the same parameters, which mesh each lies on and how it is cut there."""
        known = state.get("on_meshes")
        if known is None or not same_tensors(known.params, params):
            known = state["on_meshes"] = ParametersOnMeshes(tuple(params), tuple(self._read(params)))
        return known

    def assign(self, params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        """Balance Newton–Schulz cost over the ranks that hold each parameter, the costliest first."""
        loads: dict[int, int] = {}
        assignments: dict[int, int] = {}
        for mesh in self.on_meshes(params, state).meshes:
            costs = [newton_schulz_cost(matrix.sides) for matrix in mesh.matrices.values()]
            ranks = mesh.ranks
            owners = longest_first(costs, [loads.get(rank, 0) for rank in ranks])
            for index, cost, position in zip(mesh.matrices, costs, owners, strict=True):
                assignments[index] = ranks[position]
                loads[ranks[position]] = loads.get(ranks[position], 0) + cost
        return dict(sorted(assignments.items()))

    def gather(self, momentum_buffer: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        """The full tensor of one parameter on ``dst_rank``, None elsewhere."""
        world, bucket = self._one_parameter(dst_rank, state)
        matrix = bucket.entries[0].matrix
        flat = local_part(momentum_buffer).reshape(-1).to(bucket.compute.dtype)
        label = Label(bucket.phases[0], matrix.name)
        full = world.run(travel(flat, bucket.compute, world.at, label))
        return full.view(matrix.shape) if global_rank() == dst_rank else None

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        """This rank's part of the update of one parameter."""
        world, bucket = self._one_parameter(src_rank, state)
        matrix = bucket.entries[0].matrix
        flat = (torch.empty(0) if update is None else update.reshape(-1)).to(bucket.compute.dtype)
        label = Label(bucket.phases[1], matrix.name)
        part = world.run(travel(flat, bucket.compute.inverse, world.at, label))
        return part.view(matrix.box(world.at).shape)

    def _one_parameter(self, rank: int, state: dict[str, Any]) -> tuple[LiveWorld | LocalMesh, Bucket]:
        """A bucket of one parameter, which ``rank`` owns, and the world that it lies on."""
        on_meshes = state.get("on_meshes")
        if on_meshes is None:
            raise ConfigError("call the helper's assign_fn with the same state before its other functions")
        mesh, matrix = on_meshes.find(state.get("param_idx"))
        plan = owner([matrix], mesh.world.grid, assign=[mesh.position_of(rank)])
        return mesh.world, plan.buckets[0]


def create_processgroup_config(
    fsdp_pg: ProcessGroup | None = None,
    tp_pg: ProcessGroup | None = None,
    dp_pg: ProcessGroup | None = None,
    ep_pg: ProcessGroup | None = None,
    cp_pg: ProcessGroup | None = None,
    pp_pg: ProcessGroup | None = None,
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    tp_dim: TpDim = 0,
) -> DistributedConfig:
    """A config from process groups that cross at this rank.

    Plain parameters are taken to be cut by ``tp_pg`` along their tensor-parallel dimension, what is left of
    them by ``fsdp_pg`` along dimension 0, and to be the same along ``dp_pg`` and ``cp_pg``, whose ranks
    share the work. Ranks of ``ep_pg`` and ``pp_pg`` hold parameters of their own and handle those alone. A
    DTensor's own placements say how it is cut; its mesh dimensions must be among the groups.

    What ranks of ``ep_pg`` hold alike, such as a router, belongs to another optimizer, whose config has that
    group as ``dp_pg``: here each of them would orthogonalize it.

    Args:
        tp_dim: a dimension, None for not cut, a mapping from parameter index, or a function of index and
            parameter; a parameter's own ``partition_dim`` goes first. One number does not count among
            DTensors, where what PyTorch left plain is whole.
    """
    given = {"dp": dp_pg, "cp": cp_pg, "fsdp": fsdp_pg, "tp": tp_pg, "ep": ep_pg, "pp": pp_pg}
    groups = {axis: group for axis, group in given.items() if group is not None}
    crossing = {axis: group for axis, group in groups.items() if axis not in INDEPENDENT}
    independent = {axis: groups[axis] for axis in INDEPENDENT if axis in groups}

    def read(params: Sequence[Tensor]) -> list[MeshParameters]:
        return read_process_groups(crossing, independent, params, tp_dim)

    return _config(read, {"process_groups": groups}, async_gpu_parallelism, prefetch_count)


def create_devicemesh_config(
    device_mesh: DeviceMesh,
    mesh_dim_names: Sequence[str],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    tp_dim: TpDim = 0,
) -> DistributedConfig:
    """A config from a ``DeviceMesh`` whose dimensions are called ``mesh_dim_names``, in order.

    The names say what a dimension does to parameters: ``fsdp``, ``dp_shard`` and ``shard`` cut dimension 0;
    ``tp`` cuts the tensor-parallel one; ``dp``, ``ddp``, ``dp_replicate``, ``replicate`` and ``cp`` repeat
    them; along ``ep`` and ``pp`` each rank has its own. Everything else as for
    ``create_processgroup_config``.

    Raises:
        ConfigError: a name is unknown, or there is not one for each dimension of the mesh.
    """
    names = tuple(mesh_dim_names)
    if len(names) != device_mesh.ndim:
        raise ConfigError(
            f"the mesh has {device_mesh.ndim} dimensions; mesh_dim_names has {len(names)}: {names}"
        )
    roles = [_role(name) for name in names]
    groups = {f"{role}_pg": device_mesh.get_group(dim) for dim, role in enumerate(roles)}
    if len(groups) != len(roles):
        raise ConfigError(f"two of the mesh dimensions {names} mean the same; the meanings are {ROLES}")
    return create_processgroup_config(
        **groups, async_gpu_parallelism=async_gpu_parallelism, prefetch_count=prefetch_count, tp_dim=tp_dim
    )


def create_dtensor_config(async_gpu_parallelism: bool = True, prefetch_count: int = 1) -> DistributedConfig:
    """A config for DTensor parameters: their placements say everything.

    Parameters may lie on several meshes. Plain parameters among them are taken to be the same on all ranks
    of the largest mesh, which share their work. Replicas that no placement shows (DDP around a
    tensor-parallel module) repeat theirs: ``create_devicemesh_config`` knows them.

    Raises:
        StrategyError: a placement is partial (when the optimizer is made).
    """
    return _config(read_dtensor_meshes, {}, async_gpu_parallelism, prefetch_count)


def _config(
    read: ReadParameters, state: dict[str, Any], async_gpu_parallelism: bool, prefetch_count: int
) -> DistributedConfig:
    helper = HelperFunctions(read)
    return DistributedConfig(
        assign_fn=helper.assign,
        gather_fn=helper.gather,
        redistribute_fn=helper.redistribute,
        state=state,
        async_gpu_parallelism=async_gpu_parallelism,
        prefetch_count=prefetch_count,
        helper=helper,
    )


def _role(name: str) -> str:
    for role, names in ROLES.items():
        if name in names:
            return role
    known = ", ".join(sorted(name for names in ROLES.values() for name in names))
    raise ConfigError(f"mesh dimension {name!r} has no known meaning; known: {known}")
