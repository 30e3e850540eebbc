"""Ends a process when its parent ends.

A thread watches the parent, so it does not matter what the main thread is doing. On Linux the kernel also
sends a signal when the parent ends. The kernel sends this signal as soon as the *thread* that started the
process ends, so the signal must not end the process. SIGCONT does no harm, and it continues a stopped
process, so that the watching thread can see that the parent has ended.
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

_TICK = 0.1  # Seconds between looks at the parent.
_PR_SET_PDEATHSIG = 1  # See Linux's prctl(2).


def end_with_parent(says: str) -> None:
    """End this process, with the line `says` on standard error, when its current parent ends.

    On Linux this works even if this process is stopped when the parent ends.
    """
    _ask_for_signal(signal.SIGCONT)
    parent = os.getppid()
    threading.Thread(target=_outlive, args=(parent, says), name="parent watch", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """On Linux, let the kernel kill this process when its parent, process ``parent``, ends."""
    _ask_for_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _ask_for_signal(number: signal.Signals) -> None:
    """On Linux, let the kernel send this process a signal when its parent ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _outlive(parent: int, says: str) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(_TICK)
    with contextlib.suppress(OSError):
        ready = select.poll()
        ready.register(2, select.POLLOUT)
        if ready.poll(0):  # if a pipe is full and nobody reads it, a write would block
            os.write(2, f"{says}\n".encode())
    os._exit(1)
