"""Ends a process when its parent ends, for example a rank when its torchrun agent ends.

A thread waits for the parent's end, whatever the main thread is doing. The kernel's parent-death signal must
not be one that ends the process, because it already comes when the *thread* that started the process ends.
SIGCONT does no harm, and lets a stopped process go on, so that its thread sees that the parent has ended.
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

_TICK = 0.1  # seconds between looks
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def end_with_parent(says: str) -> None:
    """End this process, with the line `says` on standard error, when its current parent ends.

    On Linux this also works if the process is stopped at that moment.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    parent = os.getppid()
    threading.Thread(target=_outlive, args=(parent, says), name="parent watch", daemon=True).start()


def _outlive(parent: int, says: str) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(_TICK)
    _write_if_possible(f"{says}\n".encode())
    os._exit(1)


def _write_if_possible(data: bytes) -> None:
    """Write to standard error, unless it is a full pipe that nothing reads."""
    with contextlib.suppress(OSError):
        ready = select.poll()
        ready.register(2, select.POLLOUT)
        if ready.poll(0):
            os.write(2, data)
