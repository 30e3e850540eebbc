"""Finds out, from shapes and placements, how process groups have cut parameters.

The groups share only this rank, like the row and the column of a grid. Ranks compare their results once. If
the results differ, or one rank fails, all ranks raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..plan.grid import Grid
from ..plan.layout import Shard
from ..plan.matrix import Matrix
from ..step.parameter_state import local_part
from ..worlds.build_mesh import mesh_of_groups
from ..worlds.compare_plans import check_lines
from ..worlds.live import LiveWorld, gather_objects
from ..worlds.local import LocalMesh
from .dtensor_placements import dtensor_cuts
from .mesh_parameters import (
    MeshParameters,
    Shape,
    alone,
    check_boxes,
    compared_matrices,
    index_name,
    whole_matrix,
    with_names,
)
from .tensor_parallel import TpDim, chosen_tp_dim, plain_tp_dim

SHARED = ("dp", "cp")
"""Groups whose ranks must hold the same plain parameters; a user who passes such a group promises this."""


def read_process_groups(
    crossing: Mapping[str, ProcessGroup],
    independent: Mapping[str, ProcessGroup],
    tp_dim: TpDim,
    params: Sequence[Tensor],
    indices: Sequence[int],
) -> list[MeshParameters]:
    """Find out how parameters are cut on the grid of the ``crossing`` groups.

    A DTensor's placements show its cuts. For plain parameters, ranks exchange shapes. Ranks of an
    ``independent`` group step different parameters; if such a group cuts a DTensor, each rank steps its own
    part.

    Raises:
        ConfigError: a DTensor is cut along a group that was not given, shapes do not fit the groups, or a
            crossing and an independent group share more than one rank.
        PlanMismatchError: ranks have different parameters.
    """
    _refuse_two_roles(crossing, independent)
    if not crossing:
        world: LiveWorld | LocalMesh = alone()
    else:
        device = params[0].device.type if params else "cpu"
        world = LiveWorld(mesh_of_groups(_outermost_first(crossing), device))
    tp_dim = plain_tp_dim(params, tp_dim)
    cut_by_hand, axes = not any(isinstance(param, DTensor) for param in params), world.grid.axes
    mine = [tuple(local_part(param).shape) for param in params]
    shapes = [mine] if isinstance(world, LocalMesh) else _shapes_on_all_ranks(mine, world.group(axes))

    def read(index: int, param: Tensor) -> Matrix:
        if isinstance(param, DTensor):
            return _dtensor_matrix(crossing, independent, index, param)
        dim = chosen_tp_dim(indices[index], index_name(index), param, tp_dim) if "tp" in axes else None
        rows_are_cut = cut_by_hand and "fsdp" in axes
        return _plain_matrix(index, param, dim, rows_are_cut, [row[index] for row in shapes], world.grid)

    matrices = compared_matrices(world, dict(enumerate(params)), read)
    for index, matrix in matrices.items():
        check_boxes(matrix, dict(enumerate(row[index] for row in shapes)), world.grid)
    told = axes if cut_by_hand else SHARED
    return [MeshParameters(world, matrices, frozenset(axes).difference(told))]


def _refuse_two_roles(crossing: Mapping[str, ProcessGroup], independent: Mapping[str, ProcessGroup]) -> None:
    """Refuse an independent group that shares two ranks with a crossing group."""
    for own, group in independent.items():
        mine = set(dist.get_process_group_ranks(group))
        for axis, other in crossing.items():
            if len(mine.intersection(dist.get_process_group_ranks(other))) > 1:
                raise ConfigError(
                    f"{own}_pg has ranks of {axis}_pg, so it is not clear whether these ranks have different "
                    f"parameters or share them. Make two Muons: one with {own}_pg for parameters that differ "
                    "between its ranks, and one without it for the others"
                )


def _shapes_on_all_ranks(mine: list[Shape], group: ProcessGroup) -> list[list[Shape]]:
    """Gather every rank's local shapes, [ranks, parameters]; refuse unequal numbers of dimensions."""
    shapes = gather_objects(mine, group)
    said = [[f"{index_name(i)} has {len(it)} dimensions" for i, it in enumerate(row)] for row in shapes]
    check_lines(dict(zip(dist.get_process_group_ranks(group), said, strict=True)))
    return shapes


def _plain_matrix(
    index: int, param: Tensor, tp_dim: int | None, rows_are_cut: bool, shapes: Sequence[Shape], grid: Grid
) -> Matrix:
    """Describe a plain parameter, cut by tp first and then by fsdp, from its local shape on each rank."""
    whole, cuts = list(shapes[0]), []
    parts = range(grid.size("fsdp") if rows_are_cut else 1)
    rows = [
        tuple(shapes[grid.rank({"tp": tp, "fsdp": part})][0] for part in parts)
        for tp in range(grid.size("tp"))
    ]
    if rows_are_cut:
        whole[0] = sum(rows[0])
        cuts.append(("fsdp", _fsdp_shard(index, rows)))
    if tp_dim is not None:
        firsts = [shapes[grid.rank({"tp": tp})] for tp in range(grid.size("tp"))]
        lengths = tuple(map(sum, rows)) if tp_dim == 0 else tuple(shape[tp_dim] for shape in firsts)
        whole[tp_dim] = sum(lengths)
        cuts.insert(0, ("tp", Shard(tp_dim, lengths)))
    return whole_matrix(index, param, tuple(cuts), tuple(whole))


def _fsdp_shard(index: int, rows: Sequence[tuple[int, ...]]) -> Shard:
    """Return the cut along dimension 0. ``rows[tp][fsdp]`` is the number of rows that a rank holds."""
    if all(Shard(0).lengths(sum(held), len(held)) == held for held in rows):
        return Shard(0)
    if len(set(rows)) == 1:
        return Shard(0, rows[0])
    raise ConfigError(
        f"{index_name(index)}: the fsdp ranks hold {' and '.join(map(str, dict.fromkeys(rows)))} rows at "
        "different tensor-parallel positions; rows may differ only if those of each position are cut as by "
        "torch.chunk"
    )


def _dtensor_matrix(
    crossing: Mapping[str, ProcessGroup], independent: Mapping[str, ProcessGroup], index: int, param: DTensor
) -> Matrix:
    """Describe a DTensor. Each mesh dimension gets the name of the crossing group that has its ranks."""
    mesh = with_names(param.device_mesh)
    names = mesh.mesh_dim_names or ()
    shape, cuts = list(param.shape), []
    for axis, shard in dtensor_cuts(index_name(index), param, names):
        group = mesh.get_group(axis)
        if dist.get_world_size(group) == 1:
            continue
        if (crossed := _same_ranks(group, crossing)) is not None:
            cuts.append((crossed, shard))
        elif _same_ranks(group, independent) is None:
            raise ConfigError(
                f"{index_name(index)} is cut along {axis!r} over ranks "
                f"{dist.get_process_group_ranks(group)}, which are none of the groups given "
                f"({', '.join(crossing) or 'none'}): pass that group too"
            )
        elif any(other.dim == shard.dim for _, other in cuts):
            raise ConfigError(
                f"{index_name(index)} is cut by {axis!r}, whose ranks are independent, along a dimension "
                "that another axis has already cut"
            )
        else:
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            shape[shard.dim] = shard.run(shape[shard.dim], rank, size)[1]
    return whole_matrix(index, param, tuple(cuts), tuple(shape))


def _same_ranks(group: ProcessGroup, groups: Mapping[str, ProcessGroup]) -> str | None:
    ranks = dist.get_process_group_ranks(group)
    return next((axis for axis, one in groups.items() if dist.get_process_group_ranks(one) == ranks), None)


def _outermost_first(groups: Mapping[str, ProcessGroup]) -> dict[str, ProcessGroup]:
    """Order groups like the axes of a row-major mesh: the one whose ranks are furthest apart comes first."""

    def stride(group: ProcessGroup) -> int:
        ranks = dist.get_process_group_ranks(group)
        return ranks[1] - ranks[0] if len(ranks) > 1 else 0

    return dict(sorted(groups.items(), key=lambda item: -stride(item[1])))
