"""What was asked for, in bytes. Observes requests on any world; never touches the engine.

Three columns, because they differ: ``payload`` is what a rank hands to a collective; ``ring`` is what it
sends when the collective runs as a ring (NCCL's usual algorithm); ``gloo`` is the data it sends when Gloo
runs it.
``received`` is what arrives in the ring's model. ``wire`` holds the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..engine.collective import Collective
from ..plan.grid import Coordinate
from .bytes_sent import NOTHING, Sent, gloo_sent, ring_bytes, ring_received

__all__ = ["Ledger", "LedgerEntry", "Row", "entry_of", "ring_bytes", "total"]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One collective as one rank asked for it. Bytes, for this rank."""

    rank: int
    phase: str
    subject: str
    kind: str
    axis: str
    payload: int
    ring: int
    dtype: str = ""
    received: int = 0
    wire: Sent = NOTHING

    @property
    def gloo(self) -> int:
        """Bytes of data that Gloo sends."""
        return self.wire.data


@dataclass(frozen=True, slots=True)
class Row:
    """Collectives on one rank, or on all together, summed. Bytes.

    ``subject``, ``kind`` and ``dtype`` are filled where all of them share one.
    """

    phase: str
    collectives: int
    payload: int
    ring: int
    gloo: int = 0
    received: int = 0
    subject: str = ""
    kind: str = ""
    dtype: str = ""


@dataclass(slots=True, eq=False)
class Ledger:
    """An observer for a world: ``world.observers.append(ledger)``. ``clear`` it to count a single step."""

    entries: list[LedgerEntry] = field(default_factory=list)

    def __call__(self, request: Collective, at: Coordinate) -> None:
        self.entries.append(entry_of(request, at))

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()

    def rows(self, rank: int | None = None, by: Literal["phase", "subject"] = "phase") -> list[Row]:
        """One row a phase, or one a phase and matrix or bucket, in the order in which they first appear.

        Of one rank, or of all together.
        """
        entries = [entry for entry in self.entries if rank is None or entry.rank == rank]
        keys = {"phase": _phase, "subject": _subject}
        return [total(group) for group in _grouped(entries, keys[by])]


def entry_of(request: Collective, at: Coordinate) -> LedgerEntry:
    """What one rank's request costs that rank."""
    return LedgerEntry(
        rank=at.rank,
        phase=request.label.phase,
        subject=request.label.subject,
        kind=request.kind,
        axis="×".join(request.axes),
        payload=0 if request.send is None else request.send.numel() * request.dtype.itemsize,
        ring=ring_bytes(request, at),
        dtype=str(request.dtype).removeprefix("torch."),
        received=ring_received(request, at),
        wire=gloo_sent(request, at),
    )


def total(entries: Iterable[LedgerEntry]) -> Row:
    """Entries, summed; a name that they do not all share is left out."""
    found = list(entries)
    return Row(
        phase=_shared(entry.phase for entry in found),
        collectives=len(found),
        payload=sum(entry.payload for entry in found),
        ring=sum(entry.ring for entry in found),
        gloo=sum(entry.gloo for entry in found),
        received=sum(entry.received for entry in found),
        subject=_shared(entry.subject for entry in found),
        kind=_shared(entry.kind for entry in found),
        dtype=_shared(entry.dtype for entry in found),
    )


def _phase(entry: LedgerEntry) -> tuple[str, ...]:
    return (entry.phase,)


def _subject(entry: LedgerEntry) -> tuple[str, ...]:
    return entry.phase, entry.subject, entry.kind, entry.dtype


def _grouped(
    entries: list[LedgerEntry], key: Callable[[LedgerEntry], tuple[str, ...]]
) -> Iterable[list[LedgerEntry]]:
    groups: dict[tuple[str, ...], list[LedgerEntry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups.values()


def _shared(names: Iterable[str]) -> str:
    distinct = set(names)
    return distinct.pop() if len(distinct) == 1 else ""
