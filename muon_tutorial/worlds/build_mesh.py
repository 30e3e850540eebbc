"""Makes a ``DeviceMesh``, from a grid or from process groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import GridError
from ..launching.group_timeouts import check_timeout, group_timeout, new_groups_time_out
from ..plan.grid import Grid
from .live import gather_objects


def build_mesh(
    grid: Grid | Mapping[str, int], device_type: str | None = None, timeout: float | None = None
) -> DeviceMesh:
    """Make the grid's ``DeviceMesh``, whose process groups time out after ``timeout`` seconds.

    All ranks must call it. By default, the device is the accelerator unless the default group's backend is
    Gloo. By default, the timeout is the one of ``init_process_group`` (30 s in ``launch()``), which
    ``init_device_mesh`` would ignore. An axis that contains all ranks gets its own group, so that the default
    group keeps its timeout.

    Raises:
        GridError: there is no default group, or the grid's number of ranks is not the number of processes.
        UsageError: the timeout is not a positive number of seconds.
    """
    if not dist.is_initialized():
        raise GridError("build_mesh needs an initialized process group: call init_process_group, or launch()")
    timeout = group_timeout(dist.distributed_c10d._get_default_group()) if timeout is None else timeout
    check_timeout(timeout)
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator()
        device_type = "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
    grid = grid if isinstance(grid, Grid) else Grid.of(**grid)
    if grid.world_size != dist.get_world_size():
        raise GridError(
            f"a grid of {grid} needs {grid.world_size} processes; there are {dist.get_world_size()}"
        )
    own: dict[int | str, Any] = {
        axis: dist.get_backend() for axis in grid.axes if grid.size(axis) == grid.world_size
    }
    with new_groups_time_out(timeout):
        return init_device_mesh(
            device_type, grid.sizes, mesh_dim_names=grid.axes, backend_override=own or None
        )


def mesh_of_groups(groups: Mapping[str, dist.ProcessGroup], device_type: str = "cpu") -> DeviceMesh:
    """Make a ``DeviceMesh`` whose axes are these process groups, in order. The groups have only this rank in
    common.

    All ranks that the groups connect must call it; they exchange their ranks once in each group, and so learn
    where every rank stands.

    Raises:
        GridError: this rank is not in a group, or the groups do not form a grid.
    """
    ranks = torch.tensor(dist.get_rank())
    for axis, group in reversed(list(groups.items())):
        if dist.get_group_rank(group, dist.get_rank()) < 0:
            raise GridError(f"rank {dist.get_rank()} is not in the process group given for {axis!r}")
        ranks = torch.stack(gather_objects(ranks, group))
    if len(set(ranks.flatten().tolist())) != ranks.numel():
        raise GridError(f"the process groups {', '.join(groups)} do not cross in a grid: {ranks.tolist()}")
    return DeviceMesh.from_group(list(groups.values()), device_type, ranks, mesh_dim_names=tuple(groups))
