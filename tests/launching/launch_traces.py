"""Helpers of the launch tests, which check that no processes, descriptors or files are left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator

import psutil

from muon_tutorial.launching.fork_server import warm_server

WITHIN = 15.0
"""Seconds within which a failure is reported, or a process ends. Half a second suffices on a quiet machine.

Ranks wait 60 s for each other, so a fault that is found only after this wait fails the test.
"""


@contextlib.contextmanager
def nothing_is_left() -> Iterator[None]:
    """Check that the block leaves no processes, descriptors or temporary files behind."""
    warm_server()
    before = _traces()
    yield
    assert _traces() == before


def _traces() -> tuple[set[int], int, set[str]]:
    processes = {child.pid for child in psutil.Process().children(recursive=True)}
    folder = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("muon-launch")}
    return processes, len(os.listdir("/proc/self/fd")), folder


def still_running(pids: Iterable[int], within: float) -> set[int]:
    """Return the processes that still run after `within` seconds; returns earlier if none is left."""
    deadline = time.monotonic() + within
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def heed_interrupts() -> None:
    """Make a child react to SIGINT, which a shell's background jobs ignore, and to SIGHUP, which is ignored
    under ``nohup``."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
