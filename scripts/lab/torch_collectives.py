"""Counts the collectives of DDP, FSDP2, ``ZeroRedundancyOptimizer`` and DTensor from outside, in a ledger.

Torch's parts issue their collectives through the dispatcher, where a ``TorchDispatchMode`` sees each one with
its tensors and its group. An operator that moves data and is not listed here raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from muon_tutorial.engine.collective import Collective, Kind, Label
from muon_tutorial.errors import RequestError
from muon_tutorial.evidence.ledger import LedgerEntry, entry_of
from muon_tutorial.evidence.memory import CountingMode
from muon_tutorial.plan.grid import Coordinate
from muon_tutorial.worlds.live import EVERYWHERE, Follow, Moment


@dataclass(eq=False)
class TorchCollectives(CountingMode):
    """Records requests in order while it is entered: ``with TorchCollectives(at) as asked: step()``.

    ``at`` is this rank's coordinate; a group is recorded as the axes that it spans on the grid. Requests of
    other threads are not seen. A request to a live world counts once, however many calls it leads to.
    """

    at: Coordinate
    requests: list[Collective] = field(default_factory=list)
    _is_worlds: bool = False

    def __enter__(self) -> TorchCollectives:
        EVERYWHERE.append(self._see)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        EVERYWHERE.remove(self._see)
        super().__exit__(*error)

    def _see(self, request: Collective, at: Coordinate) -> Follow:
        """Record a request to a world, and leave out the backend calls that the world makes for it."""
        send = None if request.send is None else request.send.new_empty(request.send.shape, device="meta")
        self.requests.append(replace(request, send=send, label=Label(request.kind)))
        self._is_worlds = True

        def follow(moment: Moment) -> None:
            self._is_worlds = self._is_worlds and moment != "issued"

        return follow

    @property
    def entries(self) -> list[LedgerEntry]:
        return [entry_of(request, self.at) for request in self.requests]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor then calls operations on local tensors, which come here
        if func.namespace in _NAMESPACES and func._opname not in _QUIET and not self._is_worlds:
            if func._opname not in _READ:
                raise RequestError(f"{func} moves data, but TorchCollectives cannot count it")
            self.requests += _READ[func._opname](self, *args)
        return func(*args, **(kwargs or {}))

    def ask(
        self, kind: Kind, group: Any, tensor: Tensor, receive: int, root: int | None = None
    ) -> Collective:
        """The request that an operator makes, with sizes but no data."""
        by_name = isinstance(group, str)
        found = _resolve_process_group(group) if by_name else dist.ProcessGroup.unbox(group)
        sends = root is None or root == found.rank()
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta") if sends else None
        ranks, axes = tuple(dist.get_process_group_ranks(found)), self.at.grid.axes
        spans = [span for n in range(1, len(axes) + 1) for span in combinations(axes, n)]
        spanned = next(span for span in spans if self.at.group(*span) == ranks)
        return Collective(kind, spanned, tensor.dtype, flat, receive, Label(kind), root)


_NAMESPACES = ("c10d", "_c10d_functional")
_QUIET = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")


# Each operator's requests, read from its arguments. Functional operators take the group's name last.
_READ: dict[str, Callable[..., list[Collective]]] = {
    "allreduce_": lambda log, tensors, group, *_: [
        log.ask("all_reduce", group, each, each.numel()) for each in tensors
    ],
    "all_reduce": lambda log, mine, _, group: [log.ask("all_reduce", group, mine, mine.numel())],
    "all_reduce_": lambda log, mine, _, group: [log.ask("all_reduce", group, mine, mine.numel())],
    "_allgather_base_": lambda log, out, mine, group, *_: [log.ask("all_gather", group, mine, out.numel())],
    "all_gather_into_tensor": lambda log, mine, size, group: [
        log.ask("all_gather", group, mine, mine.numel() * size)
    ],
    "allgather_": lambda log, outs, mine, group, *_: [
        log.ask("all_gather", group, each, each.numel() * len(outs[0])) for each in mine
    ],
    "_reduce_scatter_base_": lambda log, out, whole, group, *_: [
        log.ask("reduce_scatter", group, whole, out.numel())
    ],
    "reduce_scatter_tensor": lambda log, whole, _, size, group: [
        log.ask("reduce_scatter", group, whole, whole.numel() // size)
    ],
    "broadcast_": lambda log, tensors, group, root, *_: [
        log.ask("broadcast", group, each, each.numel(), root) for each in tensors
    ],
}
