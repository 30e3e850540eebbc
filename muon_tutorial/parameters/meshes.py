"""How parameters lie on the meshes of real processes: reads process groups, meshes and DTensors.

Ranks compare what they read, once: where they differ, or one of them cannot go on, all raise an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..plan.grid import Grid
from ..plan.layout import Shard
from ..plan.matrix import Cut, Matrix
from ..worlds.live import LiveWorld, check_same, gather_objects, mesh_of_groups
from ..worlds.local import LocalMesh, LocalWorld
from .matrices import TpDim, chosen_tp_dim, dtensor_cuts, plain_tp_dim

Shape = tuple[int, ...]
Look = Callable[[Sequence[Tensor]], list["Share"]]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Parameters that lie on one mesh: the seat there, and each one's matrix by parameter index."""

    seat: LiveWorld | LocalMesh
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
            raise ConfigError(
                f"rank {rank} is not on the parameter's mesh, whose ranks are {self.ranks}: "
                "assign_fn must give a parameter to one of the ranks that hold it"
            )
        return self.ranks.index(rank)


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What was found out about these parameters."""

    params: tuple[Tensor, ...]
    shares: tuple[Share, ...]

    def find(self, index: object) -> tuple[Share, Matrix]:
        """A parameter's share, and its matrix as if it were alone.

        Raises:
            ConfigError: there is no such parameter.
        """
        for share in self.shares:
            if isinstance(index, int) and index in share.matrices:
                return share, replace(share.matrices[index], index=0)
        raise ConfigError(
            f"state['param_idx'] is {index!r}, which is none of the {len(self.params)} parameters that "
            "assign_fn was called with; the optimizer sets it before each call"
        )


def survey_groups(
    crossing: Mapping[str, ProcessGroup],
    independent: Mapping[str, ProcessGroup],
    params: Sequence[Tensor],
    tp_dim: TpDim,
) -> list[Share]:
    """Parameters on the grid that ``crossing`` groups make: DTensors by placements, plain ones by their
    shapes on all ranks.

    Along ``independent`` groups each rank has its own: a DTensor cut there is taken for its local part.

    Raises:
        ConfigError: a DTensor is cut along a group that was not given, or shapes do not fit the groups.
        PlanMismatchError: ranks have different parameters.
    """
    if not crossing:
        seat: LiveWorld | LocalMesh = _alone()
    else:
        seat = LiveWorld(mesh_of_groups(_outermost_first(crossing), _device_type(params)))
    tp_dim = plain_tp_dim(params, tp_dim)
    cut_by_hand = not any(isinstance(param, DTensor) for param in params)

    def look() -> list[_Sight]:
        return [
            _dtensor_sight(seat, independent, index, param)
            if isinstance(param, DTensor)
            else _plain_sight(seat, index, param, chosen_tp_dim(index, param, tp_dim), cut_by_hand)
            for index, param in enumerate(params)
        ]

    sights = _compared(seat, look)
    shapes = _shapes_by_rank(seat, params)
    matrices = {
        index: sight.matrix or _plain_matrix(sight, [row[index] for row in shapes], seat.grid)
        for index, sight in enumerate(sights)
    }
    for index, matrix in matrices.items():
        _check_boxes(matrix, dict(enumerate(row[index] for row in shapes)), seat.grid)
    return [Share(seat, matrices)]


def survey_meshes(params: Sequence[Tensor]) -> list[Share]:
    """DTensors on their own meshes, and plain parameters as the same on all ranks of the largest.

    Raises:
        StrategyError: a placement is partial.
        PlanMismatchError: ranks have different parameters on a mesh.
    """
    meshes = {param.device_mesh: None for param in params if isinstance(param, DTensor)}
    largest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    homes = [param.device_mesh if isinstance(param, DTensor) else largest for param in params]
    return [
        _share_on(mesh, {i: param for i, param in enumerate(params) if homes[i] == mesh})
        for mesh in dict.fromkeys(homes)
    ]


def same_tensors(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two sequences hold the very same tensors."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def global_rank() -> int:
    """This process' rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one rank sees of one parameter. Plain ones say along which dimensions tp and fsdp cut them, and
    get their matrix when all ranks' shapes are known."""

    index: int
    param: Tensor
    matrix: Matrix | None = None
    tp_dim: int | None = None
    fsdp_dim: int | None = None

    def __str__(self) -> str:
        """What all ranks must see alike."""
        subject = f"{_name(self.index)}: {_kind(self.param)}"
        if self.matrix is not None:
            return f"{subject}, shape {self.matrix.shape}, cut {_cuts_text(self.matrix.cuts)}"
        return f"{subject}, cut by tp along {self.tp_dim}, by fsdp along {self.fsdp_dim}"


def _share_on(mesh: DeviceMesh | None, params: Mapping[int, Tensor]) -> Share:
    if mesh is None:
        return Share(_alone(), {index: _matrix(index, param, ()) for index, param in params.items()})
    seat = LiveWorld(_with_names(mesh))

    def look() -> list[_Sight]:
        found = []
        for index, param in params.items():
            cuts = dtensor_cuts(_name(index), param, seat.grid.axes) if isinstance(param, DTensor) else ()
            matrix = _matrix(index, param, cuts)
            _check_boxes(matrix, {seat.at.rank: _local_shape(param)}, seat.grid)
            found.append(_Sight(index, param, matrix))
        return found

    sights = _compared(seat, look)
    return Share(seat, {sight.index: sight.matrix for sight in sights if sight.matrix is not None})


def _compared(seat: LiveWorld | LocalMesh, look: Callable[[], list[_Sight]]) -> list[_Sight]:
    if isinstance(seat, LocalMesh):
        return look()
    return check_same(look, lambda sights: [str(sight) for sight in sights], seat.group(seat.grid.axes))


def _shapes_by_rank(seat: LiveWorld | LocalMesh, params: Sequence[Tensor]) -> list[list[Shape]]:
    """The local shape of every parameter at every rank of the grid."""
    mine = [_local_shape(param) for param in params]
    return [mine] if isinstance(seat, LocalMesh) else gather_objects(mine, seat.group(seat.grid.axes))


def _plain_sight(
    seat: LiveWorld | LocalMesh, index: int, param: Tensor, tp_dim: int | None, cut_by_hand: bool
) -> _Sight:
    if tp_dim is not None and tp_dim >= param.ndim and "tp" in seat.grid.axes:
        raise ConfigError(
            f"{_name(index)} has dimensions 0 to {param.ndim - 1}; tp_dim says that tp cut it along {tp_dim}"
        )
    return _Sight(
        index,
        param,
        tp_dim=tp_dim if "tp" in seat.grid.axes else None,
        fsdp_dim=0 if cut_by_hand and "fsdp" in seat.grid.axes else None,
    )


def _plain_matrix(sight: _Sight, shapes: Sequence[Shape], grid: Grid) -> Matrix:
    """A plain parameter's matrix, from its local shape at every rank: cut by tp, what is left of it by
    fsdp."""
    whole, cuts = list(shapes[0]), []
    parts = range(grid.size("fsdp") if sight.fsdp_dim is not None else 1)
    rows = [
        tuple(shapes[grid.rank({"tp": tp, "fsdp": part})][0] for part in parts)
        for tp in range(grid.size("tp"))
    ]
    if sight.fsdp_dim is not None:
        whole[0] = sum(rows[0])
        cuts.append(("fsdp", _fsdp_shard(sight.index, rows)))
    if (dim := sight.tp_dim) is not None:
        lengths = tuple(
            sum(held) if dim == 0 else shapes[grid.rank({"tp": tp})][dim] for tp, held in enumerate(rows)
        )
        whole[dim] = sum(lengths)
        cuts.insert(0, ("tp", Shard(dim, lengths)))
    return _matrix(sight.index, sight.param, tuple(cuts), tuple(whole))


def _fsdp_shard(index: int, rows: Sequence[tuple[int, ...]]) -> Shard:
    """The cut along dimension 0, from the rows that each fsdp rank holds at each tensor-parallel position."""
    if all(Shard(0).lengths(sum(held), len(held)) == held for held in rows):
        return Shard(0)
    if len(set(rows)) == 1:
        return Shard(0, rows[0])
    raise ConfigError(
        f"{_name(index)}: the fsdp ranks hold {' and '.join(map(str, dict.fromkeys(rows)))} rows at "
        "different tensor-parallel positions; a cut unlike torch.chunk's must be the same at all of them"
    )


def _dtensor_sight(
    seat: LiveWorld | LocalMesh, independent: Mapping[str, ProcessGroup], index: int, param: DTensor
) -> _Sight:
    """A DTensor's matrix with its mesh's dimensions replaced by the axes of the seat that hold the same
    ranks."""
    mesh = _with_names(param.device_mesh)
    names = mesh.mesh_dim_names or ()
    shape, cuts = list(param.shape), []
    for axis, shard in dtensor_cuts(_name(index), param, names):
        group = mesh.get_group(axis)
        if dist.get_world_size(group) == 1:
            continue
        if _same_ranks(group, independent) is None:
            cuts.append((_axis_of(seat, index, axis, group), shard))
        elif any(other.dim == shard.dim for _, other in cuts):
            raise ConfigError(f"{_name(index)} is cut by others before {axis!r}, whose ranks are independent")
        else:
            shape[shard.dim] = shard.run(shape[shard.dim], dist.get_rank(group), dist.get_world_size(group))[
                1
            ]
    return _Sight(index, param, _matrix(index, param, tuple(cuts), tuple(shape)))


def _axis_of(seat: LiveWorld | LocalMesh, index: int, name: str, group: ProcessGroup) -> str:
    crossing = (
        {axis: seat.mesh.get_group(axis) for axis in seat.grid.axes} if isinstance(seat, LiveWorld) else {}
    )
    axis = _same_ranks(group, crossing)
    if axis is None:
        raise ConfigError(
            f"{_name(index)} is cut along {name!r} over ranks {dist.get_process_group_ranks(group)}, which "
            f"are none of the groups given ({', '.join(crossing) or 'none'}): pass that group too"
        )
    return axis


def _same_ranks(group: ProcessGroup, groups: Mapping[str, ProcessGroup]) -> str | None:
    ranks = dist.get_process_group_ranks(group)
    return next((axis for axis, one in groups.items() if dist.get_process_group_ranks(one) == ranks), None)


def _check_boxes(matrix: Matrix, shapes: Mapping[int, Shape], grid: Grid) -> None:
    """Hold what ranks really have of a parameter against what the groups or placements say."""
    for rank, shape in shapes.items():
        due = matrix.box(grid.at(rank)).shape
        if due != shape and not (0 in due and 0 in shape):  # FSDP2 gives an empty piece of (1, 0) as (0, 0)
            raise ConfigError(
                f"{matrix.name} has shape {shape} at {grid.at(rank)}, where its cuts make it {due}: "
                f"{matrix.shape} cut {_cuts_text(matrix.cuts)}. Say how it is cut: pass the groups that cut "
                "it, and tp_dim"
            )


def _cuts_text(cuts: Sequence[Cut]) -> str:
    return ", then ".join(f"by {axis} along {shard.dim}" for axis, shard in cuts) or "nowhere"


def _matrix(index: int, param: Tensor, cuts: tuple[Cut, ...], shape: Shape | None = None) -> Matrix:
    whole = tuple(param.shape) if shape is None else shape
    return Matrix(index, _name(index), whole, cuts, 0, param.dtype, param.dtype)


def _name(index: int) -> str:
    return f"parameter {index}"


def _kind(param: Tensor) -> str:
    kind = "a DTensor" if isinstance(param, DTensor) else f"a plain tensor of {param.ndim} dimensions"
    return f"{kind}, {str(param.dtype).removeprefix('torch.')}"


def _local_shape(param: Tensor) -> Shape:
    return tuple(param.to_local().shape) if isinstance(param, DTensor) else tuple(param.shape)


def _outermost_first(groups: Mapping[str, ProcessGroup]) -> dict[str, ProcessGroup]:
    """The groups in the order of a mesh whose ranks rise: those whose ranks lie furthest apart first."""

    def stride(group: ProcessGroup) -> int:
        ranks = dist.get_process_group_ranks(group)
        return ranks[1] - ranks[0] if len(ranks) > 1 else 0

    return dict(sorted(groups.items(), key=lambda item: -stride(item[1])))


def _with_names(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, with a name for each dimension: ``fully_shard`` makes one without where it is given none."""
    if mesh.mesh_dim_names is not None:
        return mesh
    names = tuple(f"axis {dim}" for dim in range(mesh.ndim))
    return DeviceMesh.from_group(mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh_dim_names=names)


def _alone() -> LocalMesh:
    return LocalWorld(Grid((), ())).mesh(0)


def _device_type(params: Sequence[Tensor]) -> str:
    return params[0].device.type if params else "cpu"
