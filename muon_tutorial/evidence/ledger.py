"""Counts the bytes of requested collectives. A ledger observes a world, and changes nothing in it.

It counts bytes in four ways. ``payload``: bytes that a rank hands to a collective.
``ring`` and ``received``: bytes that a rank sends and receives if the collective runs as a ring
(``ring_bytes.py``). ``gloo``: bytes of data that a rank sends through Gloo (``gloo_bytes.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..engine.collective import Collective
from ..plan.grid import Coordinate
from .gloo_bytes import GlooTraffic, gloo_sent
from .ring_bytes import ring_traffic


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One collective as one rank requested it. All sizes are this rank's bytes."""

    rank: int
    phase: str
    subject: str
    kind: str
    axis: str
    payload: int
    ring: int
    dtype: str
    received: int
    wire: GlooTraffic

    @property
    def gloo(self) -> int:
        return self.wire.data


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A sum of bytes over the collectives of one rank or of all ranks."""

    phase: str
    collectives: int
    payload: int
    ring: int
    gloo: int = 0
    received: int = 0


@dataclass(slots=True, eq=False)
class Ledger:
    """An observer for a world: ``world.observers.append(ledger)``. Clear it to count a single step."""

    entries: list[LedgerEntry] = field(default_factory=list)

    def __call__(self, request: Collective, at: Coordinate) -> None:
        self.entries.append(entry_of(request, at))

    def clear(self) -> None:
        self.entries.clear()

    def rows(self, rank: int | None = None) -> list[LedgerRow]:
        """One row per phase, in the order of their first requests.

        The rows count the collectives of ``rank``, or of all ranks if ``rank`` is None.
        """
        groups: dict[str, list[LedgerEntry]] = {}
        for entry in self.entries:
            if rank is None or entry.rank == rank:
                groups.setdefault(entry.phase, []).append(entry)
        return [total(group) for group in groups.values()]


def entry_of(request: Collective, at: Coordinate) -> LedgerEntry:
    ring, received = ring_traffic(request, at)
    return LedgerEntry(
        rank=at.rank,
        phase=request.label.phase,
        subject=request.label.subject,
        kind=request.kind,
        axis="×".join(request.axes),
        payload=0 if request.send is None else request.send.numel() * request.dtype.itemsize,
        ring=ring,
        dtype=str(request.dtype).removeprefix("torch."),
        received=received,
        wire=gloo_sent(request, at),
    )


def total(entries: Iterable[LedgerEntry]) -> LedgerRow:
    """The sum of entries. The sum has the entries' phase, or an empty phase if their phases differ."""
    found = list(entries)
    sums = (sum(getattr(e, name) for e in found) for name in ("payload", "ring", "gloo", "received"))
    phases = {entry.phase for entry in found}
    return LedgerRow(phases.pop() if len(phases) == 1 else "", len(found), *sums)
