"""What was asked for, in bytes. Observes requests on any world; never touches the engine.

``payload`` is what a rank hands to a collective. ``ring`` is what it sends when the collective runs as a ring
(NCCL's usual algorithm): with D ranks and S bytes of the whole tensor, all_gather and reduce_scatter send
(D−1)/D·S each, all_reduce the sum of both. Gloo's own algorithms differ; interface counters show what it
sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..engine.collective import Collective
from ..plan.grid import Coordinate


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective as one rank asked for it. Bytes, for this rank."""

    rank: int
    phase: str
    subject: str
    kind: str
    axis: str
    payload: int
    ring: int


@dataclass(frozen=True, slots=True)
class Row:
    """The collectives of one phase on one rank, summed. Bytes."""

    phase: str
    collectives: int
    payload: int
    ring: int


@dataclass(slots=True, eq=False)
class Ledger:
    """An observer for a world: ``world.observers.append(ledger)``. ``clear`` it to count a single step."""

    entries: list[Entry] = field(default_factory=list)

    def __call__(self, request: Collective, at: Coordinate) -> None:
        payload = 0 if request.send is None else request.send.numel() * request.dtype.itemsize
        label = request.label
        ring = ring_bytes(request, at)
        self.entries.append(
            Entry(at.rank, label.phase, label.subject, request.kind, "×".join(request.axes), payload, ring)
        )

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()

    def rows(self, rank: int | None = None) -> list[Row]:
        """One row a phase, in the order in which phases first appear; of one rank, or of all together."""
        entries = [entry for entry in self.entries if rank is None or entry.rank == rank]
        return [_total(phase, entries) for phase in dict.fromkeys(entry.phase for entry in entries)]


def ring_bytes(request: Collective, at: Coordinate) -> int:
    """Bytes this rank sends for a request when the collective runs as a ring, or point to point.

    gather, scatter and all_to_all are counted point to point, as NCCL runs them; broadcast as a chain, in
    which every rank but the last passes the tensor on (counted at all but the rank before the root).
    """
    parts, here = at.size(*request.axes), at.position(*request.axes)
    size = request.dtype.itemsize
    sent = 0 if request.send is None else request.send.numel()
    if request.kind == "all_reduce":
        return 2 * (parts - 1) * sent * size // parts
    if request.kind == "reduce_scatter":
        return (parts - 1) * request.receive * size
    if request.kind == "all_gather":
        return (parts - 1) * sent * size
    if request.kind == "broadcast":
        return request.receive * size if (here + 1) % parts != request.root else 0
    if request.kind == "gather":
        return 0 if here == request.root else sent * size
    if request.kind == "scatter":
        return (parts - 1) * request.receive * size if here == request.root else 0
    assert request.sends is not None
    return sum(length for part, length in enumerate(request.sends) if part != here) * size


def _total(phase: str, entries: Iterable[Entry]) -> Row:
    mine = [entry for entry in entries if entry.phase == phase]
    return Row(phase, len(mine), sum(entry.payload for entry in mine), sum(entry.ring for entry in mine))
