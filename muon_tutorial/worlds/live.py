"""The world of real processes, which answers requests through torch.distributed, on Gloo or NCCL.

Only this module moves data between processes, and only it knows how backends differ.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from ..engine.collective import Call, Collective, Idle, Start, Wait, Walk
from ..errors import GridError, RequestError
from ..launching.group_timeouts import group_timeout
from ..launching.phase_and_line import report_phase
from ..plan.grid import Coordinate, Grid

Moment = Literal["issued", "done", "waiting", "answered"]
Follow = Callable[[Moment], None]
Observer = Callable[[Collective, Coordinate], Follow | None]

EVERYWHERE: list[Observer] = []
"""Observers of all live worlds of this process."""
FIRST_TAG = 1 << 30
"""The first tag for the messages of exchanges. Other users of the same groups count their tags from zero."""

# torch 2.13 introduced new names, and the old names give a warning since then.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather each rank's small object, in the order of positions. All ranks must call it.

    In a process without a process group, the list contains only its own object.
    """
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def sum_counts(counts: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum small vectors over a group. All ranks must call it."""
    dist.all_reduce(counts, group=group)
    return counts


def global_rank() -> int:
    """Return this process's rank in the default group, or 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def count_processes() -> int:
    """Return the number of processes, from ``WORLD_SIZE`` as long as there is no process group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(slots=True, eq=False)
class _Ticket:
    """A collective in flight. Its two buffers live as long as the ticket.

    On NCCL, ``wait`` makes the caller's stream wait for the collective, while the host goes on. The ticket is
    dropped after ``wait``, so later work on the caller's stream reuses the buffers only after the collective.
    So ``record_stream`` is not needed. This is untested on GPUs.
    """

    request: Collective
    received: Tensor
    work: dist.Work | _Messages | None
    followers: list[Follow]

    def tell(self, moment: Moment) -> None:
        for follow in self.followers:
            follow(moment)

    def wait(self) -> Tensor:
        if self.work is not None:
            if self.followers:
                self.tell("waiting")
            self.work.wait()
            if self.followers:
                self.tell("answered")
        return self.received


@dataclass(slots=True, eq=False)
class LiveWorld:
    """One process on a mesh of real processes; answers the requests of the generators that it runs.

    ``observers`` are called with each request just before it is issued. An observer may return a function,
    which is then called at later moments of the request: ``issued`` (the call has returned), ``done`` (the
    backend has finished) and, if the rank does not wait immediately, ``waiting`` and ``answered``. The call
    for ``done`` comes in another thread, or never, because some calls do not report their end.
    """

    mesh: DeviceMesh
    observers: list[Observer] = field(default_factory=list)
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
        for axis in grid.axes:
            self.group((axis,))

    @property
    def grid(self) -> Grid:
        return self.at.grid

    def run(self, walk: Walk) -> Any:
        """Run this rank's generator to its end, and return its value. All ranks of the mesh must call it."""
        return drive(walk, self._issue)

    def apart(self, axis: str) -> LiveWorld:
        """Make a world with the same mesh and observers, but its own process group along one axis.

        So requests of one world never match requests of the other. All ranks of the mesh must call it.
        """
        other = LiveWorld(self.mesh, self.observers)
        group = self.group((axis,))
        timeout = timedelta(seconds=group_timeout(group))
        ranks = dist.get_process_group_ranks(group)
        other._groups[(axis,)] = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        return other

    def _issue(self, request: Collective, async_op: bool) -> _Ticket:
        report_phase(str(request.label))
        group = self.group(request.axes)
        observers = *self.observers, *EVERYWHERE
        followers = [follow for observer in observers if (follow := observer(request, self.at)) is not None]
        device = self.mesh.device_type if request.send is None else request.send.device
        received = torch.empty(request.receive, dtype=request.dtype, device=device)
        work = _call_backend(request, received, group, async_op)
        ticket = _Ticket(request, received, work, followers)
        if followers:
            ticket.tell("issued")
            if work is None:
                ticket.tell("done")
            else:
                _when_done(work, lambda: ticket.tell("done"))
        return ticket

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return the process group over one or several axes. A group over several axes is made on first use.

        Raises:
            GridError: ranks are not in ascending order along the axes. torch requires that order in a group.
        """
        if axes in self._groups:
            return self._groups[axes]
        cutting = tuple(axis for axis in axes if self.at.size(axis) > 1) or axes[:1]
        if cutting != axes:
            return self._groups.setdefault(axes, self.group(cutting))
        ranks = self.mesh.mesh.flatten()[list(self.at.group(*axes))].tolist()
        if ranks != sorted(ranks):
            raise GridError(
                f"the ranks along {'×'.join(axes)} are {ranks}; torch.distributed orders a group by rank, so "
                "lay out the mesh, and name its axes, in that order"
            )
        group = self.mesh.get_group(axes[0])
        if len(axes) > 1:
            timeout = timedelta(seconds=group_timeout(group))
            group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        return self._groups.setdefault(axes, group)


@dataclass(slots=True, eq=False)
class _Messages:
    works: list[dist.Work]
    _waiter: Future[None] | None = None

    def wait(self) -> None:
        if self._waiter is not None:
            self._waiter.result()
            return
        for work in self.works:
            work.wait()

    def tell_when_done(self, tell: Callable[[], None]) -> None:
        """Wait in a daemon thread, because Gloo reports completion only to a thread that waits."""
        waiter: Future[None] = Future()
        self._waiter = waiter

        def wait() -> None:
            try:
                for work in self.works:
                    work.wait()
            except BaseException as error:
                waiter.set_exception(error)
            else:
                tell()
                waiter.set_result(None)

        threading.Thread(target=wait, name="exchange", daemon=True).start()


def _when_done(work: dist.Work | _Messages, tell: Callable[[], None]) -> None:
    """Call ``tell`` when the backend is done. Some calls (Gloo's reduce_scatter) never report their end."""
    if isinstance(work, _Messages):
        work.tell_when_done(tell)
        return
    try:
        future = work.get_future()
    except RuntimeError:
        return
    future.add_done_callback(lambda _: tell())


def drive(walk: Walk, issue: Callable[[Collective, bool], _Ticket]) -> Any:
    """Run a generator to its end on real processes. ``issue`` answers collectives; user calls run here."""
    answer: Any = None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = None  # lets the generator free the tensor
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Collective):
            answer = issue(request, isinstance(turn, Start))
        elif isinstance(request, Call):
            report_phase(str(request.label))
            with record_function(str(request.label)):
                answer = request.fn()
        elif isinstance(request, Wait):
            answer = request.ticket
        elif isinstance(request, Idle):
            answer = None
        else:
            raise RequestError(f"a walk asked for {request!r}, which is no request")
        # Wait for a collective, or for the handle that a user's function returned.
        if not isinstance(turn, Start) and hasattr(answer, "wait") and not isinstance(answer, Tensor):
            answer = answer.wait()
        del turn, request  # frees the sent tensor


class NoMesh:
    """The world of an optimizer without a mesh: generators may make calls, but ask for no collective."""

    grid = None

    def run(self, walk: Walk) -> Any:
        return drive(walk, self._refuse)

    def _refuse(self, request: Collective, async_op: bool) -> _Ticket:
        raise RequestError(f"no mesh can answer {request}")


def _call_backend(
    request: Collective,
    received: Tensor,  # [request.receive]
    group: dist.ProcessGroup,
    async_op: bool,
) -> dist.Work | _Messages | None:
    """Hand a request to torch.distributed, which writes the answer to ``received``."""
    send, root = request.send, request.root
    how: dict[str, Any] = {"group": group, "async_op": async_op}
    if send is not None and request.kind == "reduce" and root != group.rank():
        received = send  # The backend may overwrite it.
    elif send is not None and request.kind in ("all_reduce", "broadcast", "reduce"):  # These work in place.
        received.copy_(send)
    match request.kind:
        case "all_gather":
            return _all_gather_single(received, send, **how)
        case "reduce_scatter":
            return _reduce_scatter_single(received, send, **how)
        case "all_reduce":
            return dist.all_reduce(received, **how)
        case "broadcast":
            return dist.broadcast(received, group_src=root, **how)
        case "reduce":
            return dist.reduce(received, group_dst=root, **how)
        case "gather":
            assert send is not None
            pieces = list(received.chunk(group.size())) if group.rank() == root else None
            return dist.gather(send, pieces, group_dst=root, **how)
        case "scatter":
            pieces = None if send is None else list(send.chunk(group.size()))
            return dist.scatter(received, pieces, group_src=root, **how)
        case "all_to_all":
            if send is None or request.packed != send.numel():
                raise RequestError(f"{request}: send must have {request.packed} elements to fill the parcels")
            leaving = [send[parcel] for parcel in request.parcels]
            coming = list(received.split(request.receives or (0,) * len(leaving)))
            backend = group._get_backend(received.device).name()
            if backend in ("nccl", "xccl"):
                return dist.all_to_all(coming, leaving, **how)
            # With DETAIL, torch compares the ranks' collectives, but not messages.
            if backend != "gloo" or dist.get_debug_level() == dist.DebugLevel.DETAIL:
                sizes = list(request.receives or ()), list(request.sends or ())
                return dist.all_to_all_single(received, torch.cat(leaving), *sizes, **how)
            messages = _send_and_receive(leaving, coming, group)
            if async_op:
                return messages
            messages.wait()
            return None


_exchanges: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of each group's last exchange, from which every exchange gets its own tag."""


def _send_and_receive(
    leaving: Sequence[Tensor],  # for each position p, a tensor of sends[p] elements
    coming: Sequence[Tensor],  # from each position p, a tensor of receives[p] elements
    group: dist.ProcessGroup,
) -> _Messages:
    """An all_to_all on Gloo for parts anywhere in memory. Each part that is not empty is a message.

    Gloo's own all_to_all would need all parts in one buffer, and one copy of a part for each position that
    gets it.
    """
    _exchanges[group] = number = _exchanges.get(group, -1) + 1
    tag = FIRST_TAG + number % FIRST_TAG
    here, ranks = group.rank(), group.size()
    coming[here].copy_(leaving[here])
    others = [position % ranks for position in range(here + 1, here + ranks)]  # the next position comes first
    asked = [
        dist.P2POp(way, parts[peer], group=group, tag=tag, group_peer=peer)
        for way, parts in ((dist.irecv, coming), (dist.isend, leaving))
        for peer in others
        if parts[peer].numel()
    ]
    return _Messages(dist.batch_isend_irecv(asked) if asked else [])
