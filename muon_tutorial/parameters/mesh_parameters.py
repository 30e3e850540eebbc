"""Sorts parameters by the mesh that they lie on. A DTensor knows its mesh, but a plain parameter does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..plan.grid import Grid
from ..plan.matrix import Cut, Matrix
from ..step.parameter_state import gradient_dtype, local_part, mesh_axes
from ..worlds.compare_plans import check_same
from ..worlds.live import LiveWorld, global_rank
from .dtensor_placements import dtensor_cuts

if TYPE_CHECKING:
    from ..worlds.local import LocalMesh

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MeshParameters:
    """Parameters that lie on one mesh: the mesh's world, and each parameter's matrix by index.

    ``assumed``: axes along which we assume, without proof, that plain parameters beside DTensors are equal on
    all ranks.
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
        """Return the position of a global rank on the mesh.

        Raises:
            ConfigError: the rank is not on the mesh.
        """
        if rank not in self.ranks:
            raise ConfigError(
                f"rank {rank} is not on the parameter's mesh, whose ranks are {self.ranks}: "
                "assign_fn must give a parameter to one of the ranks that hold it"
            )
        return self.ranks.index(rank)


def compared_matrices(
    world: LiveWorld | LocalMesh, params: Mapping[int, Tensor], read: Callable[[int, Tensor], Matrix]
) -> dict[int, Matrix]:
    """Let ``read`` describe each parameter, and compare the results. All ranks of the mesh must call it."""

    def read_all() -> dict[int, Matrix]:
        return {index: read(index, param) for index, param in params.items()}

    def lines(matrices: Mapping[int, Matrix]) -> list[str]:
        said = []
        for index, matrix in matrices.items():
            kind = "a DTensor" if isinstance(params[index], DTensor) else "a plain tensor"
            dtype = str(matrix.dtype).removeprefix("torch.")
            said.append(f"{matrix.name}: {kind}, {dtype}, shape {matrix.shape}, cut {cuts_text(matrix.cuts)}")
        return said

    if not isinstance(world, LiveWorld):
        return read_all()
    return check_same(read_all, lines, world.group(world.grid.axes))[0]


def check_boxes(matrix: Matrix, shapes: Mapping[int, Shape], grid: Grid) -> None:
    """Check that a parameter's shape on each rank fits its cuts."""
    for rank, shape in shapes.items():
        due = matrix.box(grid.at(rank)).shape
        if due != shape and not (0 in due and 0 in shape):  # FSDP2's empty pieces may have any empty shape
            raise ConfigError(
                f"{matrix.name} has shape {shape} at {grid.at(rank)}, but its cuts give {due}: "
                f"{matrix.shape} cut {cuts_text(matrix.cuts)}. Pass tp_dim and all groups that cut parameters"
            )


def cuts_text(cuts: Sequence[Cut]) -> str:
    return ", then ".join(f"by {axis} along {shard.dim}" for axis, shard in cuts) or "nowhere"


def whole_matrix(index: int, param: Tensor, cuts: tuple[Cut, ...], shape: Shape | None = None) -> Matrix:
    whole = tuple(param.shape) if shape is None else shape
    return Matrix(index, index_name(index), whole, cuts, 0, param.dtype, gradient_dtype(param))


def index_name(index: int) -> str:
    return f"parameter {index}"


def with_names(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh with a name for each dimension. A mesh that ``fully_shard`` makes has no names."""
    if mesh.mesh_dim_names is not None:
        return mesh
    groups, names = mesh.get_all_groups(), mesh_axes(mesh)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=names)


def alone() -> LocalMesh:
    from ..worlds.local import LocalWorld

    return LocalWorld(Grid((), ())).mesh(0)


def read_dtensor_meshes(params: Sequence[Tensor]) -> list[MeshParameters]:
    """Sort DTensors by their mesh. Plain parameters are assumed to be equal on all ranks of the largest mesh.

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
    world = alone() if mesh is None else LiveWorld(with_names(mesh))

    def read(index: int, param: Tensor) -> Matrix:
        name, axes = index_name(index), world.grid.axes
        cuts = dtensor_cuts(name, param, axes) if isinstance(param, DTensor) else ()
        matrix = whole_matrix(index, param, cuts)
        check_boxes(matrix, {world.at.rank: tuple(local_part(param).shape)}, world.grid)
        return matrix

    return MeshParameters(world, compared_matrices(world, params, read), frozenset(world.grid.axes))
