"""Helpers that make a ``DistributedConfig`` from process groups, from a DeviceMesh or for DTensors.

You can call the functions of such a config one by one, but the optimizer runs a plan in their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..engine.collective import Label
from ..engine.travel import travel
from ..errors import ConfigError
from ..parameters.mesh_parameters import MeshParameters, read_dtensor_meshes
from ..parameters.process_groups import read_process_groups
from ..parameters.tensor_parallel import TpDim
from ..plan.assign import longest_first, newton_schulz_cost
from ..plan.bucket import Bucket
from ..plan.strategies import owner
from ..step.parameter_state import local_part, same_tensors
from ..worlds.live import LiveWorld, global_rank
from ..worlds.local import LocalMesh
from .config import DistributedConfig

ReadParameters = Callable[[Sequence[Tensor], Sequence[int]], list[MeshParameters]]
"""Finds out which meshes parameters lie on, and how they are cut. It gets the parameters, and each one's
index for ``tp_dim``. All ranks of the meshes must call it."""

# For each axis of a plan, the names that a mesh dimension with the same meaning may have.
ROLES = {
    "fsdp": ("fsdp", "dp_shard", "shard"),
    "tp": ("tp",),
    "dp": ("dp", "ddp", "dp_replicate", "replicate"),
    "cp": ("cp",),
    "ep": ("ep",),
    "pp": ("pp",),
}
INDEPENDENT = ("ep", "pp")


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
    """Make a config from this rank's process groups. Any two of these groups must have only this rank in
    common.

    Plain parameters are assumed to be cut by ``tp_pg`` along ``tp_dim``, then by ``fsdp_pg`` along dimension
    0. All ranks of ``dp_pg`` and ``cp_pg`` are assumed to hold the same parts, and they share the work. Ranks
    of ``ep_pg`` and ``pp_pg`` have different parameters, and each rank steps its own parameters. A DTensor's
    placements say how it is cut. The groups of a DTensor's mesh dimensions must be among the given groups.

    Parameters that are the same on all ranks of ``ep_pg``, such as a router, need another optimizer whose
    config has that group as ``dp_pg``, or each of these ranks would orthogonalize them.

    Args:
        tp_dim: as in ``Muon``. If some parameters are DTensors, a ``tp_dim`` that is one number is ignored,
            because PyTorch then leaves the plain parameters whole.
    """
    given = {"dp": dp_pg, "cp": cp_pg, "fsdp": fsdp_pg, "tp": tp_pg, "ep": ep_pg, "pp": pp_pg}
    groups = {axis: group for axis, group in given.items() if group is not None}
    crossing = {axis: group for axis, group in groups.items() if axis not in INDEPENDENT}
    independent = {axis: groups[axis] for axis in INDEPENDENT if axis in groups}
    read = partial(read_process_groups, crossing, independent, tp_dim)
    return _config(read, {"process_groups": groups}, async_gpu_parallelism, prefetch_count)


def create_devicemesh_config(
    device_mesh: DeviceMesh,
    mesh_dim_names: Sequence[str],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    *,
    tp_dim: TpDim = 0,
) -> DistributedConfig:
    """Make a config from a ``DeviceMesh``, whose dimensions get the names ``mesh_dim_names``.

    The name says what a mesh dimension does to parameters. ``fsdp``, ``dp_shard`` and ``shard`` cut dimension
    0. ``tp`` cuts the dimension ``tp_dim``. ``dp``, ``ddp``, ``dp_replicate``, ``replicate`` and ``cp``
    replicate parameters. Along ``ep`` and ``pp``, ranks have different parameters. See
    ``create_processgroup_config``.

    Raises:
        ConfigError: a name is unknown, two names have the same meaning, or a mesh dimension has no name.
    """
    names = tuple(mesh_dim_names)
    if len(names) != device_mesh.ndim:
        raise ConfigError(
            f"the mesh has {device_mesh.ndim} dimensions; mesh_dim_names has {len(names)}: {names}"
        )
    roles = [_role(name) for name in names]
    groups = {f"{role}_pg": device_mesh.get_group(dim) for dim, role in enumerate(roles)}
    if len(groups) != len(roles):
        raise ConfigError(
            f"two of the mesh dimensions {names} mean the same; the possible meanings are {ROLES}"
        )
    return create_processgroup_config(
        **groups, async_gpu_parallelism=async_gpu_parallelism, prefetch_count=prefetch_count, tp_dim=tp_dim
    )


def create_dtensor_config(async_gpu_parallelism: bool = True, prefetch_count: int = 1) -> DistributedConfig:
    """Make a config for DTensor parameters, whose placements say how they are cut.

    Parameters may lie on several meshes. Plain parameters among them are assumed to be the same on all ranks
    of the largest mesh, and these ranks share the work on them. Placements do not show the replicas that DDP
    makes of a tensor-parallel module: use ``create_devicemesh_config``, or all replicas would do the same
    work.

    Raises:
        StrategyError: a placement is partial. Raised when the optimizer is made, not by this function.
    """
    return _config(lambda params, _: read_dtensor_meshes(params), {}, async_gpu_parallelism, prefetch_count)


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
    roles = {known: role for role, names in ROLES.items() for known in names}
    if name not in roles:
        raise ConfigError(f"mesh dimension {name!r} has no known meaning; known: {', '.join(sorted(roles))}")
    return roles[name]


class HelperFunctions:
    """The three functions of a helper, and ``on_meshes``, from which the optimizer makes a plan.

    The plan replaces ``gather`` and ``redistribute``. The result of ``on_meshes`` is stored in the ``state``.
    """

    def __init__(self, read: ReadParameters) -> None:
        self._read = read

    def on_meshes(self, params: Sequence[Tensor], state: dict[str, Any]) -> Sequence[MeshParameters]:
        """Return the meshes that parameters lie on, and how each parameter is cut on its mesh."""
        if "on_meshes" not in state or not same_tensors(state["on_meshes"][0], params):
            indices = state.get("indices", range(len(params)))  # set if the optimizer makes this call
            state["on_meshes"] = tuple(params), self._read(params, indices)
        return state["on_meshes"][1]

    def assign(self, params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        """Assign each parameter to one of the ranks that hold it, so that ranks have about equal work.

        The costliest parameters are assigned first. All ranks of a mesh must compute the same owners. So work
        on an earlier mesh counts only if that mesh contains all ranks of this mesh, because ranks outside it
        do not know its owners.
        """
        loads: list[tuple[frozenset[int], Counter[int]]] = []
        assignments: dict[int, int] = {}
        for mesh in self.on_meshes(params, state):
            costs = [newton_schulz_cost(matrix.sides) for matrix in mesh.matrices.values()]
            ranks = mesh.ranks
            known = [its for members, its in loads if members.issuperset(ranks)]
            owners = longest_first(costs, [sum(its[rank] for its in known) for rank in ranks])
            mine: Counter[int] = Counter()
            for index, cost, position in zip(mesh.matrices, costs, owners, strict=True):
                assignments[index] = ranks[position]
                mine[ranks[position]] += cost
            loads.append((frozenset(ranks), mine))
        return dict(sorted(assignments.items()))

    def gather(self, momentum_buffer: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        """Return the full tensor of one parameter on ``dst_rank``, and None on all other ranks."""
        world, bucket = self._one_parameter(dst_rank, state)
        matrix = bucket.entries[0].matrix
        flat = local_part(momentum_buffer).reshape(-1).to(bucket.compute.dtype)
        label = Label(bucket.phases[0], matrix.name)
        full = world.run(travel(flat, bucket.compute, world.at, label))
        return full.view(matrix.shape) if global_rank() == dst_rank else None

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        """Return this rank's part of the update of one parameter."""
        world, bucket = self._one_parameter(src_rank, state)
        matrix = bucket.entries[0].matrix
        flat = (torch.empty(0) if update is None else update.reshape(-1)).to(bucket.compute.dtype)
        label = Label(bucket.phases[1], matrix.name)
        part = world.run(travel(flat, bucket.compute.inverse, world.at, label))
        return part.view(matrix.box(world.at).shape)

    def _one_parameter(self, rank: int, state: dict[str, Any]) -> tuple[LiveWorld | LocalMesh, Bucket]:
        """Make a bucket of one parameter that ``rank`` owns. Return the bucket and its mesh's world."""
        if "on_meshes" not in state:
            raise ConfigError("call the helper's assign_fn with the same state before its other functions")
        index, (params, meshes) = state.get("param_idx"), state["on_meshes"]
        mesh = next((mesh for mesh in meshes if isinstance(index, int) and index in mesh.matrices), None)
        if mesh is None:
            raise ConfigError(
                f"state['param_idx'] is {index!r}, which is none of the {len(params)} parameters that "
                "assign_fn was called with; the optimizer sets it before each call"
            )
        matrix = replace(mesh.matrices[index], index=0)
        plan = owner([matrix], mesh.world.grid, assign=[mesh.position_of(rank)])
        return mesh.world, plan.buckets[0]
