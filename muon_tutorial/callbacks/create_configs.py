"""Helpers that make a ``DistributedConfig`` from process groups, from a DeviceMesh or for DTensors.

You can call the functions of such a config one by one, but the optimizer runs a plan in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from ..parameters.mesh_parameters import ReadParameters, read_dtensor_meshes
from ..parameters.process_groups import read_process_groups
from ..parameters.tensor_parallel import TpDim
from .config import DistributedConfig
from .helper_functions import HelperFunctions

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
        raise ConfigError(f"two of the mesh dimensions {names} have one meaning; the meanings are {ROLES}")
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
    roles = {known: role for role, names in ROLES.items() for known in names}
    if name not in roles:
        raise ConfigError(f"mesh dimension {name!r} has no known meaning; known: {', '.join(sorted(roles))}")
    return roles[name]
