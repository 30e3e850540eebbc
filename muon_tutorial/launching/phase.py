"""Keeps a note of what each rank is about to do; it can be read even if the rank was killed or stopped.

Every rank of a launch has a slot in shared memory. It writes a short label there before a request, and the
launching process reads the slots if something fails. A rank that torchrun started has a slot of its own.
Other processes write nothing.
"""

from __future__ import annotations

import mmap

SLOT = 256  # bytes of label per rank

# This process's slot, if it is a rank. One per process, not per thread, hence not a context variable.
_own_slot: memoryview | None = None


def report_phase(label: str) -> None:
    """Note what this rank is about to do, such as ``"dp gather · bucket 0"``.

    A failure report quotes the last label of each rank. Any thread of a rank may call it; it takes about half
    a microsecond, and does nothing in a process that is not a rank.
    """
    if _own_slot is not None:
        _own_slot[:] = label.encode()[:SLOT].ljust(SLOT, b"\0")


def take_slot(path: str, rank: int) -> None:
    """Use `rank`'s slot in the file at `path` for this process. Called once, by a rank when it starts."""
    global _own_slot
    with open(path, "r+b") as file:
        _own_slot = memoryview(mmap.mmap(file.fileno(), 0))[rank * SLOT : (rank + 1) * SLOT]


def keep_slot() -> None:
    """Give this process a slot that ``own_phase`` reads. Called once, by a rank that torchrun started."""
    global _own_slot
    _own_slot = memoryview(bytearray(SLOT))


def own_phase() -> str:
    """Return the last label that this process noted; empty if it noted none, or has no slot."""
    return _read(bytes(_own_slot)) if _own_slot is not None else ""


def read_phases(path: str, world_size: int) -> list[str]:
    """Return the last label of each rank, empty for ranks that reported none."""
    with open(path, "rb") as file:
        slots = [file.read(SLOT) for _ in range(world_size)]
    return [_read(slot) for slot in slots]


def _read(slot: bytes) -> str:
    return slot.rstrip(b"\0").decode(errors="ignore")
