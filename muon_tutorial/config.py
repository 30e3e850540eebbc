"""``DistributedConfig``: a user's own assign, gather and redistribute; and helpers that make one.

Reads process groups, meshes and DTensors and turns them into plans. What the helpers make can be called
function by function; the optimizer runs their plan packed, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .engine.collective import Label
from .engine.walk import gather, scatter
from .errors import ConfigError
from .matrices import TpDim, chosen_tp_dim, dtensor_cuts, plain_tp_dim
from .plan.assign import longest_first, newton_schulz_cost
from .plan.grid import Grid
from .plan.layout import Shard
from .plan.matrix import Cut, Matrix
from .plan.strategies import owner
from .worlds.live import LiveWorld, gather_objects, mesh_of_groups
from .worlds.local import LocalWorld, Seat

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
    """How a distributed Muon assigns, gathers and redistributes (the design document's
    ``DistributedConfig``).

    Args:
        assign_fn: ``(params, state) -> {param_idx: rank}``, called once, an entry for every parameter, the
        same on
            all ranks. Ranks are global.
        gather_fn: ``(momentum_buffer, dst_rank, state) -> Tensor | None``: the full tensor on ``dst_rank``,
        None
            elsewhere; or a handle whose ``wait()`` returns that. What it is given is the Newton–Schulz
            input, in bfloat16, of the parameter's kind (DTensor or plain).
        redistribute_fn: ``(update | None, src_rank, state) -> Tensor``: this rank's part of the update; or a
        handle. state: whatever the functions need. Each call gets a fresh copy that also holds ``param_idx``,
            ``full_shape`` (None where it is not known), ``local_shape`` and ``dtype``.
        async_gpu_parallelism: owners work side by side; False is the strict sequence, for debugging.
        prefetch_count: how many parameters are gathered ahead.
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


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Parameters that lie on one mesh: the seat there, and each one's matrix by parameter index."""

    seat: LiveWorld | Seat
    matrices: Mapping[int, Matrix]

    @property
    def ranks(self) -> list[int]:
        """The global rank of each position on the mesh."""
        return self.seat.mesh.mesh.flatten().tolist() if isinstance(self.seat, LiveWorld) else [global_rank()]

    def place(self, rank: int) -> int:
        """The position of a global rank on the mesh.

        Raises:
            ConfigError: it is not there.
        """
        if rank not in self.ranks:
            raise ConfigError(f"rank {rank} is not on the parameter's mesh, whose ranks are {self.ranks}")
        return self.ranks.index(rank)


Survey = Callable[[Sequence[Tensor]], list[Share]]


class Planner:
    """The three functions of a helper, and the shares that the optimizer plans with instead of calling
    them."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self.shares: list[Share] = []

    def assign(self, params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        """Balance Newton–Schulz cost over the ranks that hold each parameter, the costliest first."""
        loads: dict[int, int] = {}
        assignments: dict[int, int] = {}
        for share in self.survey(params):
            costs = [newton_schulz_cost(matrix.sides) for matrix in share.matrices.values()]
            ranks = share.ranks
            owners = longest_first(costs, [loads.get(rank, 0) for rank in ranks])
            for index, cost, place in zip(share.matrices, costs, owners, strict=True):
                assignments[index] = ranks[place]
                loads[ranks[place]] = loads.get(ranks[place], 0) + cost
        return dict(sorted(assignments.items()))

    def survey(self, params: Sequence[Tensor]) -> list[Share]:
        """Find out, once for the same parameters, which mesh each lies on and how it is cut there."""
        self.shares = self._survey(params)
        return self.shares

    def gather(self, momentum_buffer: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        """The full tensor of one parameter on ``dst_rank``, None elsewhere."""
        share, matrix = self._find(state)
        bucket = owner([matrix], share.seat.grid, assign=[share.place(dst_rank)]).buckets[0]
        local = momentum_buffer.to_local() if isinstance(momentum_buffer, DTensor) else momentum_buffer
        flat = local.reshape(-1).to(bucket.compute.dtype)
        label = Label(bucket.phases[0], matrix.name)
        full = share.seat.run(gather(flat, bucket.compute, share.seat.at, label))
        return full.view(matrix.shape) if global_rank() == dst_rank else None

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        """This rank's part of the update of one parameter."""
        share, matrix = self._find(state)
        bucket = owner([matrix], share.seat.grid, assign=[share.place(src_rank)]).buckets[0]
        flat = torch.empty(0, dtype=bucket.compute.dtype) if update is None else update.reshape(-1)
        label = Label(bucket.phases[1], matrix.name)
        local = share.seat.run(scatter(flat, bucket.compute, share.seat.at, label))
        return local.view(matrix.box(share.seat.at).shape)

    def _find(self, state: dict[str, Any]) -> tuple[Share, Matrix]:
        index = state.get("param_idx")
        for share in self.shares:
            if isinstance(index, int) and index in share.matrices:
                return share, replace(share.matrices[index], index=0)
        raise ConfigError(
            f"state['param_idx'] is {index!r}, which is no parameter that assign_fn was called with; "
            "the optimizer sets it before each call"
        )


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

    Args:
        tp_dim: a dimension, None for not cut, a mapping from parameter index, or a function of index and
            parameter; a parameter's own ``partition_dim`` goes first. One number does not count among
            DTensors, where what PyTorch left plain is whole.
    """
    given = {"dp": dp_pg, "cp": cp_pg, "fsdp": fsdp_pg, "tp": tp_pg, "ep": ep_pg, "pp": pp_pg}
    groups = {axis: group for axis, group in given.items() if group is not None}
    crossing = {axis: group for axis, group in groups.items() if axis not in INDEPENDENT}

    def survey(params: Sequence[Tensor]) -> list[Share]:
        seat = LiveWorld(mesh_of_groups(crossing, _device_type(params))) if crossing else _alone()
        return [Share(seat, _matrices_on(seat, params, plain_tp_dim(params, tp_dim)))]

    return _config(survey, {"process_groups": groups}, async_gpu_parallelism, prefetch_count)


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
    of the largest mesh, which share their work.

    Raises:
        StrategyError: a placement is partial, or a mesh has no dimension names (when the optimizer is made).
    """

    def survey(params: Sequence[Tensor]) -> list[Share]:
        meshes = {param.device_mesh: None for param in params if isinstance(param, DTensor)}
        largest = max(meshes, key=lambda mesh: mesh.size(), default=None)
        homes = [param.device_mesh if isinstance(param, DTensor) else largest for param in params]
        return [
            Share(seat, _matrices_at(seat, {i: p for i, p in enumerate(params) if homes[i] == mesh}))
            for mesh in dict.fromkeys(homes)
            for seat in [LiveWorld(mesh) if mesh is not None else _alone()]
        ]

    return _config(survey, {}, async_gpu_parallelism, prefetch_count)


def checked_assignments(config: DistributedConfig, params: list[Tensor]) -> dict[int, int]:
    """Ask ``assign_fn`` and check its answer: every index, ranks in range.

    Raises:
        ConfigError: says which entry is wrong.
    """
    answer = config.assign_fn(params, config.state)
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


def global_rank() -> int:
    """This process' rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def _config(
    survey: Survey, state: dict[str, Any], async_gpu_parallelism: bool, prefetch_count: int
) -> DistributedConfig:
    planner = Planner(survey)
    return DistributedConfig(
        assign_fn=planner.assign,
        gather_fn=planner.gather,
        redistribute_fn=planner.redistribute,
        state=state,
        async_gpu_parallelism=async_gpu_parallelism,
        prefetch_count=prefetch_count,
        planner=planner,
    )


def _alone() -> Seat:
    return LocalWorld(Grid((), ())).seat(0)


def _role(name: str) -> str:
    for role, names in ROLES.items():
        if name in names:
            return role
    known = ", ".join(sorted(name for names in ROLES.values() for name in names))
    raise ConfigError(f"mesh dimension {name!r} has no known meaning; known: {known}")


def _device_type(params: Sequence[Tensor]) -> str:
    return params[0].device.type if params else "cpu"


def _matrices_at(seat: LiveWorld | Seat, params: Mapping[int, Tensor]) -> dict[int, Matrix]:
    """DTensors on the seat's own mesh, and plain parameters that are the same on all of it."""
    return {
        index: _matrix(
            index, param, dtensor_cuts(f"parameter {index}", param) if isinstance(param, DTensor) else ()
        )
        for index, param in params.items()
    }


def _matrices_on(seat: LiveWorld | Seat, params: Sequence[Tensor], tp_dim: TpDim) -> dict[int, Matrix]:
    """Parameters on a mesh whose axes have roles: DTensors by their placements, plain ones by their local
    shapes."""
    shapes = {axis: _shapes_along(seat, axis, params) for axis in ("fsdp", "tp")}
    found = {}
    for index, param in enumerate(params):
        if isinstance(param, DTensor):
            found[index] = _matrix(index, param, _translated_cuts(seat, index, param))
        else:
            found[index] = _plain_matrix(seat, index, param, tp_dim, shapes)
    return found


def _matrix(index: int, param: Tensor, cuts: tuple[Cut, ...], shape: tuple[int, ...] | None = None) -> Matrix:
    return Matrix(index, f"parameter {index}", shape or tuple(param.shape), cuts, 0, param.dtype, param.dtype)


def _translated_cuts(seat: LiveWorld | Seat, index: int, param: DTensor) -> tuple[Cut, ...]:
    """A DTensor's cuts with its mesh's dimension names replaced by the axes of the seat that hold the same
    ranks."""
    own = dict(zip(param.device_mesh.mesh_dim_names or (), param.device_mesh.get_all_groups(), strict=True))
    return tuple(
        (_axis_of(seat, index, axis, own[axis]), shard)
        for axis, shard in dtensor_cuts(f"parameter {index}", param)
    )


def _axis_of(seat: LiveWorld | Seat, index: int, name: str, group: ProcessGroup) -> str:
    ranks = dist.get_process_group_ranks(group)
    for axis in seat.grid.axes:
        assert isinstance(seat, LiveWorld)
        if dist.get_process_group_ranks(seat.mesh.get_group(axis)) == ranks:
            return axis
    raise ConfigError(
        f"parameter {index} is cut along {name!r} over ranks {ranks}, which are none of the groups given"
    )


def _shapes_along(seat: LiveWorld | Seat, axis: str, params: Sequence[Tensor]) -> list[list[tuple[int, ...]]]:
    """The local shape of each plain parameter at each position of an axis: by position, then by parameter."""
    mine = [tuple(param.shape) for param in params]
    if axis not in seat.grid.axes:
        return [mine]
    assert isinstance(seat, LiveWorld)
    return gather_objects(mine, seat.mesh.get_group(axis))


def _plain_matrix(
    seat: LiveWorld | Seat,
    index: int,
    param: Tensor,
    tp_dim: TpDim,
    shapes: Mapping[str, list[list[tuple[int, ...]]]],
) -> Matrix:
    shape, cuts = list(param.shape), []
    if "fsdp" in seat.grid.axes:
        lengths = tuple(row[index][0] for row in shapes["fsdp"])
        shape[0] = sum(lengths)
        even = Shard(0).lengths(shape[0], len(lengths)) == lengths
        cuts.append(("fsdp", Shard(0) if even else Shard(0, lengths)))
    dim = chosen_tp_dim(index, param, tp_dim)
    if "tp" in seat.grid.axes and dim is not None:
        lengths = _tp_lengths(seat, index, dim, shapes, shape)
        shape[dim] = sum(lengths)
        cuts.insert(0, ("tp", Shard(dim, lengths)))
    return _matrix(index, param, tuple(cuts), tuple(shape))


def _tp_lengths(
    seat: LiveWorld | Seat,
    index: int,
    dim: int,
    shapes: Mapping[str, list[list[tuple[int, ...]]]],
    without_fsdp: Sequence[int],
) -> tuple[int, ...]:
    """How many indices of ``dim`` each tensor-parallel position holds, over all its fsdp ranks together."""
    if dim != 0 or "fsdp" not in seat.grid.axes:
        return tuple(row[index][dim] for row in shapes["tp"])
    assert isinstance(seat, LiveWorld)
    return tuple(gather_objects(without_fsdp[0], seat.mesh.get_group("tp")))
