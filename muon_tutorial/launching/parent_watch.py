"""A process that must not outlive the one that started it, such as a rank its torchrun agent.

A thread waits for the parent's end, whatever the main thread is doing. The kernel's parent-death signal may
not end anything: it comes when the *thread* that started the process ends. It does no harm as SIGCONT, and a
process that was stopped then sees what happened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn

_TICK = 0.2  # seconds between looks where the kernel cannot tell of a process' end
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def end_with_parent(says: str) -> None:
    """End this process at once, with the line `says` on standard error, when its present parent ends."""
    go_on_when_parent_ends()
    parent = os.getppid()
    threading.Thread(target=_outlive, args=(parent, says), name="parent watch", daemon=True).start()


def go_on_when_parent_ends() -> None:
    """Let this process, should it be stopped then, go on when its parent ends (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _outlive(parent: int, says: str) -> NoReturn:
    _wait_for_end(parent)
    while os.getppid() == parent:
        time.sleep(_TICK)
    _write_if_possible(f"{says}\n".encode())
    os._exit(1)


def _wait_for_end(process: int) -> None:
    """Return when a process has ended; at once where the kernel cannot tell (macOS, no descriptor left)."""
    with contextlib.suppress(AttributeError, OSError):
        descriptor = os.pidfd_open(process)
        try:
            if os.getppid() == process:  # else it had ended before, and another may have its number
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                ended.poll()
        finally:
            os.close(descriptor)


def _write_if_possible(data: bytes) -> None:
    """Write to standard error, unless nobody has read it for so long that it is full."""
    with contextlib.suppress(OSError):
        ready = select.poll()
        ready.register(2, select.POLLOUT)
        if ready.poll(0):
            os.write(2, data)
