"""Where each rank is, kept where a killed or stopped rank's word can still be read.

Every rank of a launch has a slot of shared memory. It writes a short label there before a request; the
launching process reads the slots when something broke. Outside a launch nothing is written.
"""

from __future__ import annotations

import mmap

SLOT = 256  # bytes of label per rank


class _Desk:
    """This process' slot. One per process, whichever thread reports, hence not a context variable."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot: memoryview | None = None


_DESK = _Desk()


def report_phase(label: str) -> None:
    """Note what this rank is about to do, such as ``"dp gather · bucket 0"``.

    A failure report quotes the last label of each rank. Any thread of a rank may call it; it costs about
    half a microsecond, and does nothing outside a launch.
    """
    slot = _DESK.slot
    if slot is not None:
        slot[:] = label.encode()[:SLOT].ljust(SLOT, b"\0")


def take_slot(board: str, rank: int) -> None:
    """Make `rank`'s slot of the file `board` this process' own. Called once, by a rank as it starts."""
    with open(board, "r+b") as file:
        _DESK.slot = memoryview(mmap.mmap(file.fileno(), 0))[rank * SLOT : (rank + 1) * SLOT]


def read_phases(board: str, world_size: int) -> list[str]:
    """Return the last label of each rank, empty where none was reported."""
    with open(board, "rb") as file:
        slots = [file.read(SLOT) for _ in range(world_size)]
    return [slot.rstrip(b"\0").decode(errors="ignore") for slot in slots]
