"""Finds the campaign's processes by a mark in their environment, however they were started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .case import STRUCK

MARK = "MUON_FAULTS_MARK"
"""The environment variable that marks every process of a campaign; it is set before the first launch."""
LEAVING = 2.0
"""Seconds after the end of a launch within which its processes must be gone."""


def marked(value: str) -> list[int]:
    """The processes with this mark, except this one and its fork server."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in found if pid != os.getpid() and _has(pid, value) and not _is_our_server(pid)]


def wait_until(is_so: Callable[[], object], seconds: float, every: float = 0.02) -> bool:
    """Wait until ``is_so()`` is true, at most ``seconds``; returns whether it is."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


def since_struck(folder: Path) -> float:
    """Seconds since a rank noted that its fault happened; 0 if it did not happen."""
    with contextlib.suppress(OSError, ValueError):
        return time.monotonic() - float((folder / STRUCK).read_text())
    return 0.0


def left_behind(value: str) -> tuple[str, ...]:
    """End the marked processes that remain after ``LEAVING`` seconds; return them as text for a table."""
    wait_until(lambda: not marked(value), LEAVING)
    found = marked(value)
    told = tuple(_describe(pid) for pid in found)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return told


def server() -> int | None:
    """The process that forks the ranks of this process, if there is one."""
    return next((pid for pid in children(os.getpid()) if _is_our_server(pid)), None)


def children(pid: int) -> list[int]:
    """The children of a process. The children of one thread are in the order in which they started.

    Sorting by pid would not give that order, because pids wrap around.
    """
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def _has(pid: int, value: str) -> bool:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"{MARK}={value}".encode() in variables and _state_and_parent(pid)[0] != "Z"
    return False


def _is_our_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        is_server = b"serve(control)" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return is_server and _state_and_parent(pid)[1] == os.getpid()
    return False


def _state_and_parent(pid: int) -> tuple[str, int]:
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{words[:60].strip()} ({_state_and_parent(pid)[0]})"
    return "a process that has just ended"
