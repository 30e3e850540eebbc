"""Groups parameters by the mesh that they lie on. A DTensor names its mesh; plain parameters do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..plan.grid import Grid
from ..plan.matrix import Cut, Matrix
from ..step.parameter_state import gradient_dtype, local_part, mesh_axes
from ..worlds.compare import check_same
from ..worlds.live import LiveWorld, global_rank
from .dtensor_placements import dtensor_cuts

if TYPE_CHECKING:
    from ..worlds.local import LocalMesh

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeshParameters:
    """Parameters that lie on one mesh: the mesh's world, and each parameter's matrix by index.

    ``assumed`` are the axes along which plain parameters among DTensors are only presumed to be the same on
    all ranks: each rank may have its own.
    """

    world: LiveWorld | LocalMesh
    matrices: Mapping[int, Matrix]
    assumed: frozenset[str] = frozenset()

    @property
    def ranks(self) -> list[int]:
        """The global rank of each position on the mesh."""
        return (
            self.world.mesh.mesh.flatten().tolist() if isinstance(self.world, LiveWorld) else [global_rank()]
        )

    def position_of(self, rank: int) -> int:
        """The position of a global rank on the mesh.

        Raises:
            ConfigError: the rank is not on the mesh.
        """
        if rank not in self.ranks:
            raise ConfigError(
                f"rank {rank} is not on the parameter's mesh, whose ranks are {self.ranks}: "
                "assign_fn must give a parameter to one of the ranks that hold it"
            )
        return self.ranks.index(rank)


ReadParameters = Callable[[Sequence[Tensor]], list[MeshParameters]]


@dataclass(frozen=True, slots=True, eq=False)
class ParametersOnMeshes:
    """Parameters, and the meshes that they lie on."""

    params: tuple[Tensor, ...]
    meshes: tuple[MeshParameters, ...]

    def find(self, index: object) -> tuple[MeshParameters, Matrix]:
        """The mesh of a parameter, and its matrix with index 0.

        Raises:
            ConfigError: there is no such parameter.
        """
        for share in self.meshes:
            if isinstance(index, int) and index in share.matrices:
                return share, replace(share.matrices[index], index=0)
        raise ConfigError(
            f"state['param_idx'] is {index!r}, which is none of the {len(self.params)} parameters that "
            "assign_fn was called with; the optimizer sets it before each call"
        )


@dataclass(frozen=True, slots=True)
class ParameterReading:
    """One rank's view of one parameter. For a plain one it has the dimensions that tp and fsdp cut; its
    matrix is made when all ranks' shapes are known."""

    index: int
    param: Tensor
    matrix: Matrix | None = None
    tp_dim: int | None = None
    fsdp_dim: int | None = None

    def __str__(self) -> str:
        """The text that must be the same on all ranks."""
        is_plain = not isinstance(self.param, DTensor)
        kind = f"a plain tensor of {self.param.ndim} dimensions" if is_plain else "a DTensor"
        subject = f"{index_name(self.index)}: {kind}, {str(self.param.dtype).removeprefix('torch.')}"
        if self.matrix is not None:
            return f"{subject}, shape {self.matrix.shape}, cut {cuts_text(self.matrix.cuts)}"
        return f"{subject}, cut by tp along {self.tp_dim}, by fsdp along {self.fsdp_dim}"


def compared(
    world: LiveWorld | LocalMesh, read: Callable[[], list[ParameterReading]]
) -> list[ParameterReading]:
    if not isinstance(world, LiveWorld):
        return read()
    group = world.group(world.grid.axes)
    return check_same(read, lambda readings: [str(reading) for reading in readings], group)[0]


def check_boxes(matrix: Matrix, shapes: Mapping[int, Shape], grid: Grid) -> None:
    """Check the ranks' actual shapes of a parameter against its cuts."""
    for rank, shape in shapes.items():
        due = matrix.box(grid.at(rank)).shape
        if due != shape and not (0 in due and 0 in shape):  # FSDP2 gives an empty piece of (1, 0) as (0, 0)
            raise ConfigError(
                f"{matrix.name} has shape {shape} at {grid.at(rank)}, but by its cuts it would have {due}: "
                f"{matrix.shape} cut {cuts_text(matrix.cuts)}. Say how it is cut: pass the groups that cut "
                "it, and tp_dim"
            )


def cuts_text(cuts: Sequence[Cut]) -> str:
    return ", then ".join(f"by {axis} along {shard.dim}" for axis, shard in cuts) or "nowhere"


def whole_matrix(index: int, param: Tensor, cuts: tuple[Cut, ...], shape: Shape | None = None) -> Matrix:
    whole = tuple(param.shape) if shape is None else shape
    return Matrix(index, index_name(index), whole, cuts, 0, param.dtype, gradient_dtype(param))


def index_name(index: int) -> str:
    return f"parameter {index}"


def with_names(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, with a name for each dimension; a mesh that ``fully_shard`` makes by itself has none."""
    if mesh.mesh_dim_names is not None:
        return mesh
    groups, names = mesh.get_all_groups(), mesh_axes(mesh)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=names)


def alone() -> LocalMesh:
    from ..worlds.local import LocalWorld

    return LocalWorld(Grid((), ())).mesh(0)


def read_dtensor_meshes(params: Sequence[Tensor]) -> list[MeshParameters]:
    """Put DTensors on their own meshes; plain parameters count as copies on all ranks of the largest mesh.

    Raises:
        StrategyError: a placement is partial.
        PlanMismatchError: ranks have different parameters on a mesh.
    """
    meshes = {param.device_mesh: None for param in params if isinstance(param, DTensor)}
    largest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    homes = [param.device_mesh if isinstance(param, DTensor) else largest for param in params]
    return [
        _read_mesh(mesh, {i: param for i, param in enumerate(params) if homes[i] == mesh})
        for mesh in dict.fromkeys(homes)
    ]


def _read_mesh(mesh: DeviceMesh | None, params: Mapping[int, Tensor]) -> MeshParameters:
    if mesh is None:
        return MeshParameters(
            alone(), {index: whole_matrix(index, param, ()) for index, param in params.items()}
        )
    world = LiveWorld(with_names(mesh))
    axes = world.grid.axes

    def read() -> list[ParameterReading]:
        found = []
        for index, param in params.items():
            cuts = dtensor_cuts(index_name(index), param, axes) if isinstance(param, DTensor) else ()
            matrix = whole_matrix(index, param, cuts)
            check_boxes(matrix, {world.at.rank: tuple(local_part(param).shape)}, world.grid)
            found.append(ParameterReading(index, param, matrix))
        return found

    readings = compared(world, read)
    matrices = {reading.index: reading.matrix for reading in readings if reading.matrix is not None}
    return MeshParameters(world, matrices, frozenset(axes))
