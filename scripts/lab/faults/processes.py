"""Finds the campaign's processes by a mark in their environment, however they were started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "MUON_FAULTS_MARK"
"""The environment variable that every process of a campaign inherits."""
LEAVING = 2.0
"""Seconds within which processes must be gone after their launch has ended."""


def mark(value: str) -> None:
    """Mark this process and all that it starts from now on. Must be called before the first launch."""
    os.environ[MARK] = value


def marked(value: str) -> list[int]:
    """The processes with this mark, except this one and its fork server."""
    wanted = f"{MARK}={value}".encode()
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in found if pid != os.getpid() and _has(pid, wanted) and not _is_our_server(pid)]


def left_behind(value: str) -> tuple[str, ...]:
    """End the marked processes that remain after ``LEAVING`` seconds; return them as text for a table."""
    deadline = time.monotonic() + LEAVING
    while (found := marked(value)) and time.monotonic() < deadline:
        time.sleep(0.02)
    told = tuple(_describe(pid) for pid in found)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return told


def server() -> int | None:
    """The process that forks this one's ranks, if there is one."""
    return next((pid for pid in children(os.getpid()) if _is_our_server(pid)), None)


def children(pid: int) -> list[int]:
    """The children of a process, for each thread in the order in which it started them.

    Sorting by pid would not give that order, because pids wrap around.
    """
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def _has(pid: int, wanted: bytes) -> bool:
    with contextlib.suppress(OSError):
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and _state(pid) != "Z"
    return False


def _is_our_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"serve(control)" in Path(f"/proc/{pid}/cmdline").read_bytes() and _parent(pid) == os.getpid()
    return False


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state(pid: int) -> str:
    return _fields(pid)[0]


def _parent(pid: int) -> int:
    return int(_fields(pid)[1])


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{words[:60].strip()} ({_state(pid)})"
    return "a process that has just ended"
