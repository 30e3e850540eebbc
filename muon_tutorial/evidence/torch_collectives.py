"""What any PyTorch program asks of torch.distributed, seen from outside: the ledger of what is not ours.

DDP, FSDP2, ``ZeroRedundancyOptimizer`` and DTensor issue their collectives through the dispatcher, where a
``TorchDispatchMode`` sees each with its tensors and its group. Knows those operators and sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.collective import Collective, Kind, Label
from ..errors import RequestError
from ..plan.grid import Coordinate
from .ledger import Ledger, entry_of


@dataclass(eq=False)
class Witness(TorchDispatchMode):
    """Keeps in order what happens while it is entered: ``with Witness(at) as seen: step()``.

    ``at`` is this rank's place on the grid; a group is named by the axes it spans there. Threads other than
    the one that entered are not seen. ``phase`` is what requests are filed under.
    """

    at: Coordinate
    phase: str = "step"
    requests: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def ledger(self) -> Ledger:
        """What was seen, in bytes."""
        return Ledger([entry_of(request, self.at) for request in self.requests])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # let DTensor turn it into what its ranks do, and see that
        if func.namespace in _NAMESPACES and func._opname not in _QUIET:
            if func._opname not in _READ:
                raise RequestError(f"{func} moves data in a way that nobody taught this witness to count")
            self.requests += _READ[func._opname](self, *args)
        return func(*args, **(kwargs or {}))

    def ask(
        self, kind: Kind, group: Any, tensor: Tensor, receive: int, root: int | None = None, **splits: Any
    ) -> Collective:
        """The request that an operator makes, with sizes and no data."""
        found = _process_group(group)
        sends = root is None or root == found.rank()
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta") if sends else None
        axes = self._axes(found)
        return Collective(kind, axes, tensor.dtype, flat, receive, Label(self.phase, kind), root, **splits)

    def _axes(self, group: dist.ProcessGroup) -> tuple[str, ...]:
        ranks, axes = tuple(dist.get_process_group_ranks(group)), self.at.grid.axes
        spans = [span for n in range(1, len(axes) + 1) for span in combinations(axes, n)]
        return next(span for span in spans if self.at.group(*span) == ranks)


_NAMESPACES = ("c10d", "_c10d_functional")
_QUIET = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")


def _process_group(group: Any) -> dist.ProcessGroup:
    return _resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)  # type: ignore[arg-type]


def _allreduce(seen: Witness, tensors: list[Tensor], group: Any, *_: Any) -> list[Collective]:
    return [seen.ask("all_reduce", group, tensor, tensor.numel()) for tensor in tensors]


def _functional_all_reduce(seen: Witness, tensor: Tensor, _: str, group: str) -> list[Collective]:
    return [seen.ask("all_reduce", group, tensor, tensor.numel())]


def _allgather_base(seen: Witness, out: Tensor, mine: Tensor, group: Any, *_: Any) -> list[Collective]:
    return [seen.ask("all_gather", group, mine, out.numel())]


def _functional_all_gather(seen: Witness, mine: Tensor, size: int, group: str) -> list[Collective]:
    return [seen.ask("all_gather", group, mine, mine.numel() * size)]


def _allgather(seen: Witness, outs: Any, mine: list[Tensor], group: Any, *_: Any) -> list[Collective]:
    return [seen.ask("all_gather", group, one, one.numel() * len(outs[0])) for one in mine]


def _reduce_scatter_base(seen: Witness, out: Tensor, whole: Tensor, group: Any, *_: Any) -> list[Collective]:
    return [seen.ask("reduce_scatter", group, whole, out.numel())]


def _functional_reduce_scatter(
    seen: Witness, whole: Tensor, _: str, size: int, group: str
) -> list[Collective]:
    return [seen.ask("reduce_scatter", group, whole, whole.numel() // size)]


def _broadcast(seen: Witness, tensors: list[Tensor], group: Any, root: int, *_: Any) -> list[Collective]:
    return [seen.ask("broadcast", group, tensor, tensor.numel(), root) for tensor in tensors]


def _alltoall_base(
    seen: Witness, out: Tensor, mine: Tensor, group: Any, receives: list[int], sends: list[int], *_: Any
) -> list[Collective]:
    return [_split(seen, group, mine, out.numel(), sends, receives)]


def _functional_all_to_all(
    seen: Witness, mine: Tensor, receives: list[int], sends: list[int], group: str
) -> list[Collective]:
    row = mine.numel() // max(1, mine.shape[0])
    return [_split(seen, group, mine, sum(receives) * row, sends, receives)]


def _split(
    seen: Witness, group: Any, mine: Tensor, receive: int, sends: list[int], receives: list[int]
) -> Collective:
    """Splits count rows; none mean equal parts."""
    parts = _process_group(group).size()
    row = mine.numel() // max(1, sum(sends))
    elements = tuple(n * row for n in sends) if sends else (mine.numel() // parts,) * parts
    coming = tuple(n * row for n in receives) if receives else (receive // parts,) * parts
    return seen.ask("all_to_all", group, mine, receive, sends=elements, receives=coming)


_READ: dict[str, Callable[..., list[Collective]]] = {
    "allreduce_": _allreduce,
    "all_reduce": _functional_all_reduce,
    "all_reduce_": _functional_all_reduce,
    "_allgather_base_": _allgather_base,
    "all_gather_into_tensor": _functional_all_gather,
    "allgather_": _allgather,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor": _functional_reduce_scatter,
    "broadcast_": _broadcast,
    "alltoall_base_": _alltoall_base,
    "all_to_all_single": _functional_all_to_all,
}
