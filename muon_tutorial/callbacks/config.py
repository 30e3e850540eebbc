"""``DistributedConfig``: a user's own assign, gather and redistribute; and helpers that make one.

What the helpers make can be called function by function; the optimizer runs their plan packed, to the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..engine.collective import Label
from ..engine.travel import gather, scatter
from ..errors import ConfigError, TutorialError
from ..parameters.matrices import TpDim
from ..parameters.meshes import Look, Share, Survey, global_rank, same_tensors, survey_groups, survey_meshes
from ..plan.assign import longest_first, newton_schulz_cost
from ..plan.bucket import Bucket
from ..plan.strategies import owner

AssignFn = Callable[[list[Tensor], dict[str, Any]], dict[int, int]]
GatherFn = Callable[[Tensor, int, dict[str, Any]], Any]
RedistributeFn = Callable[[Tensor | None, int, dict[str, Any]], Any]

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


@dataclass
class DistributedConfig:
    """How a distributed Muon assigns, gathers and redistributes: a user's own functions, or a helper's.

    Args:
        assign_fn: ``(params, state) -> {param_idx: rank}``: which rank orthogonalizes each parameter. Called
            once; an entry for every parameter, the same on all ranks. Ranks are global.
        gather_fn: ``(momentum_buffer, dst_rank, state) -> Tensor | None``: the full plain tensor on
            ``dst_rank``, None elsewhere. What it is given is the Newton–Schulz input, in bfloat16, of the
            parameter's kind (DTensor or plain).
        redistribute_fn: ``(update | None, src_rank, state) -> Tensor``: this rank's part of the update. It is
            given None on all ranks but ``src_rank``.
        state: whatever the functions need. Each call gets a fresh copy that also holds ``param_idx``,
            ``full_shape`` (None where it is not known), ``local_shape`` and ``dtype``. ``"agree_group"``: the
            process group of the ranks that share parameters; all ranks unless given.
        async_gpu_parallelism: owners work side by side; False is the strict sequence, for debugging.
        prefetch_count: how many parameters (or buckets of them) are gathered ahead.
        planner: a helper's plan, which stands for its gather and redistribute while both are its own.

    The last two functions may also return a handle whose ``wait()`` returns the tensor.
    """

    assign_fn: AssignFn
    gather_fn: GatherFn
    redistribute_fn: RedistributeFn
    state: dict[str, Any] = field(default_factory=dict)
    async_gpu_parallelism: bool = True
    prefetch_count: int = 1
    planner: Planner | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"{name} must be a function, got {getattr(self, name)!r}")
        if not isinstance(self.prefetch_count, int) or self.prefetch_count < 0:
            raise ConfigError(f"prefetch_count must be a whole number from 0 on, got {self.prefetch_count!r}")
        if not isinstance(self.state, dict):
            raise ConfigError(f"state must be a dict, got {type(self.state).__name__}")

    @property
    def planned(self) -> bool:
        """Whether gather and redistribute are still a helper's own, so that its plan may stand for them."""
        own = self.planner
        return own is not None and own.gather == self.gather_fn and own.redistribute == self.redistribute_fn


class Planner:
    """The three functions of a helper, and the survey that the optimizer plans with instead of calling them.

    What it finds out about the parameters is kept in the state that it is handed, under ``"survey"``.
    """

    def __init__(self, look: Look) -> None:
        self._look = look

    def survey(self, params: Sequence[Tensor], state: dict[str, Any]) -> Survey:
        """Find out, once for the same parameters, which mesh each lies on and how it is cut there."""
        known = state.get("survey")
        if known is None or not same_tensors(known.params, params):
            known = state["survey"] = Survey(tuple(params), tuple(self._look(params)))
        return known

    def assign(self, params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        """Balance Newton–Schulz cost over the ranks that hold each parameter, the costliest first."""
        loads: dict[int, int] = {}
        assignments: dict[int, int] = {}
        for share in self.survey(params, state).shares:
            costs = [newton_schulz_cost(matrix.sides) for matrix in share.matrices.values()]
            ranks = share.ranks
            owners = longest_first(costs, [loads.get(rank, 0) for rank in ranks])
            for index, cost, place in zip(share.matrices, costs, owners, strict=True):
                assignments[index] = ranks[place]
                loads[ranks[place]] = loads.get(ranks[place], 0) + cost
        return dict(sorted(assignments.items()))

    def gather(self, momentum_buffer: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        """The full tensor of one parameter on ``dst_rank``, None elsewhere."""
        share, bucket = self._alone(dst_rank, state)
        matrix = bucket.entries[0].matrix
        local = momentum_buffer.to_local() if isinstance(momentum_buffer, DTensor) else momentum_buffer
        flat = local.reshape(-1).to(bucket.compute.dtype)
        label = Label(bucket.phases[0], matrix.name)
        full = share.seat.run(gather(flat, bucket.compute, share.seat.at, label))
        return full.view(matrix.shape) if global_rank() == dst_rank else None

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        """This rank's part of the update of one parameter."""
        share, bucket = self._alone(src_rank, state)
        matrix = bucket.entries[0].matrix
        flat = torch.empty(0) if update is None else update.reshape(-1)
        label = Label(bucket.phases[1], matrix.name)
        walk = scatter(flat.to(bucket.compute.dtype), bucket.compute, share.seat.at, label)
        return share.seat.run(walk).view(matrix.box(share.seat.at).shape)

    def _alone(self, rank: int, state: dict[str, Any]) -> tuple[Share, Bucket]:
        """A bucket of one parameter, which ``rank`` owns, and where it lies."""
        survey = state.get("survey")
        if survey is None:
            raise ConfigError("call the helper's assign_fn with the same state before its other functions")
        share, matrix = survey.find(state.get("param_idx"))
        return share, owner([matrix], share.seat.grid, assign=[share.place(rank)]).buckets[0]


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

    def look(params: Sequence[Tensor]) -> list[Share]:
        return survey_groups(crossing, independent, params, tp_dim)

    return _config(look, {"process_groups": groups}, async_gpu_parallelism, prefetch_count)


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
    return _config(survey_meshes, {}, async_gpu_parallelism, prefetch_count)


def checked_assignments(
    config: DistributedConfig, params: list[Tensor], state: dict[str, Any]
) -> dict[int, int]:
    """Ask ``assign_fn`` and check its answer: every index, ranks in range.

    Raises:
        ConfigError: says which entry is wrong, or what ``assign_fn`` raised.
    """
    try:
        answer = config.assign_fn(params, state)
    except TutorialError:
        raise
    except Exception as error:
        raise ConfigError(
            f"assign_fn raised {type(error).__name__} on rank {global_rank()}: {error}"
        ) from error
    if not isinstance(answer, Mapping):
        raise ConfigError(f"assign_fn must return a dict from parameter index to rank, got {answer!r}")
    missing = [index for index in range(len(params)) if index not in answer]
    strange = [index for index in answer if index not in range(len(params))]
    if missing or strange:
        raise ConfigError(
            f"assign_fn must return an entry for each of {len(params)} parameters; "
            f"missing: {missing or 'none'}, unknown: {strange or 'none'}"
        )
    size = dist.get_world_size() if dist.is_initialized() else 1
    for index, rank in answer.items():
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise ConfigError(
                f"assign_fn gives parameter {index} to rank {rank!r}; ranks are 0 to {size - 1}"
            )
    return {index: answer[index] for index in range(len(params))}


def _config(
    look: Look, state: dict[str, Any], async_gpu_parallelism: bool, prefetch_count: int
) -> DistributedConfig:
    planner = Planner(look)
    return DistributedConfig(
        assign_fn=planner.assign,
        gather_fn=planner.gather,
        redistribute_fn=planner.redistribute,
        state=state,
        async_gpu_parallelism=async_gpu_parallelism,
        prefetch_count=prefetch_count,
        planner=planner,
    )


def _role(name: str) -> str:
    for role, names in ROLES.items():
        if name in names:
            return role
    known = ", ".join(sorted(name for names in ROLES.values() for name in names))
    raise ConfigError(f"mesh dimension {name!r} has no known meaning; known: {known}")
