"""Bytes that a rank sends and receives when a collective runs as a ring (NCCL's usual algorithm).

Knows only sizes and positions. gather, scatter and all_to_all are counted point to point, as NCCL runs them.
broadcast is counted as a chain from the root to the rank before the root: every rank except the last
sends the tensor. reduce is counted as a chain from the rank after the root to the root itself.
``gloo_bytes`` counts what Gloo really sends.
"""

from __future__ import annotations

from ..engine.collective import Collective
from ..plan.grid import Coordinate


def ring_bytes(request: Collective, at: Coordinate) -> int:
    """Bytes this rank sends for a request."""
    return ring_traffic(request, at)[0]


def ring_traffic(request: Collective, at: Coordinate) -> tuple[int, int]:
    """Bytes this rank sends for a request, and bytes it receives."""
    parts, here = at.size(*request.axes), at.position(*request.axes)
    given, asked = 0 if request.send is None else request.send.numel(), request.receive
    size, rooted = request.dtype.itemsize, here == request.root
    if request.kind == "all_reduce":
        return (around := 2 * (parts - 1) * given * size // parts), around
    if request.kind == "all_to_all":
        sends, receives = request.sends or (0,) * parts, request.receives or (0,) * parts
        return (sum(sends) - sends[here]) * size, (sum(receives) - receives[here]) * size
    sent, received = {
        "reduce_scatter": ((parts - 1) * asked, (parts - 1) * asked),
        "all_gather": ((parts - 1) * given, (parts - 1) * given),
        "broadcast": (0 if (here + 1) % parts == request.root else asked, 0 if rooted else asked),
        "reduce": (0 if rooted else given, 0 if (here - 1) % parts == request.root else given),
        "gather": (0, asked - given) if rooted else (given, 0),
        "scatter": ((parts - 1) * asked, 0) if rooted else (0, asked),
    }[request.kind]
    return sent * size, received * size
