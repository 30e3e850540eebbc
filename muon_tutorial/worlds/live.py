"""Real processes: answers requests through torch.distributed, on Gloo or NCCL.

The only place where data moves between processes, and the only one that knows how backends differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..engine.collective import Collective, Idle, Start, Wait, Walk
from ..errors import GridError, RequestError
from ..plan.grid import Coordinate, Grid
from .launch import report_phase

# The names before torch 2.13 warn there; the new ones do not exist before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def build_mesh(grid: Grid | Mapping[str, int], device_type: str = "cpu", timeout: float = 30.0) -> DeviceMesh:
    """The grid as a ``DeviceMesh`` over the default group, every subgroup with ``timeout`` in seconds.

    Must be called by all ranks. ``init_device_mesh`` leaves its subgroups at 30 minutes whatever
    ``init_process_group`` was told, so the timeout is set on each.

    Raises:
        GridError: the grid does not hold as many ranks as there are processes.
    """
    grid = grid if isinstance(grid, Grid) else Grid.of(**grid)
    if grid.world_size != dist.get_world_size():
        raise GridError(
            f"a grid of {grid} needs {grid.world_size} processes; there are {dist.get_world_size()}"
        )
    mesh = init_device_mesh(device_type, grid.sizes, mesh_dim_names=grid.axes)
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return mesh


def group_timeout(group: dist.ProcessGroup) -> float:
    """The timeout of a group's collectives, in seconds."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout.total_seconds()


@dataclass(slots=True, eq=False)
class _Ticket:
    request: Collective
    received: Tensor
    work: dist.Work | None


@dataclass(slots=True, eq=False)
class LiveWorld:
    """This process' seat on a mesh of real processes. ``observers`` see each request as it is issued."""

    mesh: DeviceMesh
    observers: list[Callable[[Collective, Coordinate], None]] = field(default_factory=list)
    at: Coordinate = field(init=False)
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.mesh.mesh_dim_names
        if names is None:
            raise GridError('the mesh has no axis names; pass mesh_dim_names, such as ("dp", "tp")')
        grid = Grid(tuple(names), tuple(self.mesh.shape))
        positions = self.mesh.get_coordinate()
        if positions is None:
            raise GridError(f"rank {dist.get_rank()} is not on the mesh {self.mesh}")
        self.at = grid.at(grid.rank(dict(zip(grid.axes, positions, strict=True))))

    @property
    def grid(self) -> Grid:
        """The mesh as a grid."""
        return self.at.grid

    def run(self, walk: Walk) -> Any:
        """Walk this rank's generator to its end; returns its value. Must be called by all ranks of the
        mesh."""
        answer = None
        while True:
            try:
                turn = walk.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._take_turn(turn)

    def _take_turn(self, turn: object) -> Any:
        if isinstance(turn, Start):
            return (
                self._issue(turn.request, async_op=True)
                if isinstance(turn.request, Collective)
                else turn.request
            )
        if isinstance(turn, Wait):
            return _finish(turn.ticket) if isinstance(turn.ticket, _Ticket) else None
        if isinstance(turn, Collective):
            return _finish(self._issue(turn, async_op=False))
        if not isinstance(turn, Idle):
            raise RequestError(f"{self.at} asked for {turn!r}, which is no request")
        return None

    def _issue(self, request: Collective, async_op: bool) -> _Ticket:
        report_phase(str(request.label))
        for observer in self.observers:
            observer(request, self.at)
        received = torch.empty(request.receive, dtype=request.dtype, device=self._device(request))
        group = self._group(request.axes)
        work = _CALLS[request.kind](request, received, group, async_op)
        return _Ticket(request, received, work)

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The process group over one axis or several; one over several is made when first asked for."""
        axes = tuple(axis for axis in axes if self.at.size(axis) > 1) or axes[:1]
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        if axes not in self._groups:
            self._groups[axes] = self._join(axes)
        return self._groups[axes]

    def _join(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        ranks = self.mesh.mesh.flatten()[list(self.at.group(*axes))].tolist()
        timeout = timedelta(seconds=group_timeout(self.mesh.get_group(axes[0])))
        return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    def _device(self, request: Collective) -> torch.device:
        if request.send is not None:
            return request.send.device
        kind = self.mesh.device_type
        return (
            torch.device(kind)
            if kind == "cpu"
            else torch.device(kind, torch.get_device_module(kind).current_device())
        )


def _finish(ticket: _Ticket) -> Tensor:
    if ticket.work is not None:
        ticket.work.wait()
    return ticket.received


def _all_gather(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    return _all_gather_single(received, request.send, group=group, async_op=async_op)


def _reduce_scatter(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    return _reduce_scatter_single(received, request.send, group=group, async_op=async_op)


def _all_reduce(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    assert request.send is not None
    received.copy_(request.send)
    return dist.all_reduce(received, group=group, async_op=async_op)


def _broadcast(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    if request.send is not None:
        received.copy_(request.send)
    return dist.broadcast(received, group=group, group_src=request.root, async_op=async_op)


def _gather(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    assert request.send is not None
    pieces = list(received.chunk(group.size())) if group.rank() == request.root else None
    return dist.gather(request.send, pieces, group=group, group_dst=request.root, async_op=async_op)


def _scatter(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    pieces = None if request.send is None else list(request.send.chunk(group.size()))
    return dist.scatter(received, pieces, group=group, group_src=request.root, async_op=async_op)


def _all_to_all(
    request: Collective, received: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    return dist.all_to_all_single(
        received,
        request.send,
        list(request.receives or ()),
        list(request.sends or ()),
        group=group,
        async_op=async_op,
    )


_CALLS: dict[str, Callable[[Collective, Tensor, dist.ProcessGroup, bool], dist.Work | None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
