"""Notes what a rank is about to do, and finds the line of code that the rank is at.

Every rank of a launch has a slot in shared memory, and writes a short label there before a request. If
something fails, the launching process reads the slots, even those of killed ranks. A rank that torchrun
started has a slot in its own memory. Other processes write nothing.
"""

from __future__ import annotations

import linecache
import mmap
import os
import sysconfig
from collections.abc import Iterable
from types import FrameType

import torch

SLOT = 256  # bytes of label per rank
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (sysconfig.get_path("stdlib"), _TORCH, os.path.dirname(__file__))
_COMMUNICATION = os.path.join(_TORCH, "distributed")
_LIVE_WORLD = os.path.join(os.path.dirname(os.path.dirname(__file__)), "worlds", "live.py")

# This process's slot, if the process is a rank. It is a global because all threads share it.
_own_slot: memoryview | None = None


def report_phase(label: str) -> None:
    """Note what this rank is about to do, such as ``"dp gather · bucket 0"``.

    A failure report quotes the last label of each rank. Any thread of a rank may call this; the call takes
    about half a microsecond, and does nothing in a process that is not a rank.
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
    """Return the last label that this process noted; empty if there is no label or no slot."""
    return _read(bytes(_own_slot)) if _own_slot is not None else ""


def read_phases(path: str, world_size: int) -> list[str]:
    """Return the last label of each rank; empty if the rank reported none."""
    with open(path, "rb") as file:
        return [_read(file.read(SLOT)) for _ in range(world_size)]


def _read(slot: bytes) -> str:
    return slot.rstrip(b"\0").decode(errors="ignore")


def own_line(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return file, line and text of a stack's first frame outside libraries; ``""`` if there is none.

    `stack` has the innermost frame first, as ``traceback.walk_stack`` yields it.
    """
    for frame, number in stack:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            source = linecache.getline(code.co_filename, number).strip()
            place = f'File "{code.co_filename}", line {number}, in {code.co_name}'
            return f"{place}: {source}" if source else place
    return ""


def is_communicating(stack: Iterable[tuple[FrameType, int]]) -> bool:
    """Return whether a call stack has a frame in torch.distributed, or in a live world's ``wait``."""
    return any(
        code.co_filename.startswith(_COMMUNICATION)
        or (code.co_filename == _LIVE_WORLD and code.co_name == "wait")
        for code in (frame.f_code for frame, _ in stack)
    )
