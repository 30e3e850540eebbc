"""How DTensor parameters are cut, each on its own mesh: read off their placements, compared across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..worlds.live import LiveWorld
from .dtensor_placements import dtensor_cuts
from .mesh_parameters import (
    MeshParameters,
    ParameterReading,
    alone,
    check_boxes,
    compared,
    index_name,
    local_shape,
    whole_matrix,
    with_names,
)


def read_dtensor_meshes(params: Sequence[Tensor]) -> list[MeshParameters]:
    """DTensors on their own meshes, and plain parameters as the same on all ranks of the largest.

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

    def read() -> list[ParameterReading]:
        found = []
        for index, param in params.items():
            cuts = (
                dtensor_cuts(index_name(index), param, world.grid.axes) if isinstance(param, DTensor) else ()
            )
            matrix = whole_matrix(index, param, cuts)
            check_boxes(matrix, {world.at.rank: local_shape(param)}, world.grid)
            found.append(ParameterReading(index, param, matrix))
        return found

    readings = compared(world, read)
    return MeshParameters(
        world, {reading.index: reading.matrix for reading in readings if reading.matrix is not None}
    )
