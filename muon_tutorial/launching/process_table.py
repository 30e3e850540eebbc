"""Finds other ranks on this machine that have ended or are stopped, and ends a rank when its parent ends.

``Peers`` reads the kernel's process table (Linux). On other systems a stopped rank looks like a running one.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

State = Literal["has ended", "is stopped (SIGSTOP)"]

_PATIENCE = 0.5  # Seconds that a process may take to end after its connections have closed.
_TICK = 0.02  # Seconds between looks at such processes.
_PARENT_TICK = 0.1  # Seconds between looks at the parent.
_PR_SET_PDEATHSIG = 1  # See Linux's prctl(2).


@dataclass(frozen=True, slots=True)
class Peers:
    pids: Mapping[int, int]

    def missing(self) -> dict[int, State]:
        """Return the ranks that have ended or are stopped; if there are none yet, wait a moment."""
        deadline = time.monotonic() + _PATIENCE
        while not (found := self._missing_now()) and time.monotonic() < deadline:
            time.sleep(_TICK)
        return found

    def wake(self) -> None:
        """Continue stopped ranks, because SIGTERM does not end a stopped process."""
        for rank, state in self._missing_now().items():
            if state == "is stopped (SIGSTOP)":
                with contextlib.suppress(OSError):
                    os.kill(self.pids[rank], signal.SIGCONT)

    def _missing_now(self) -> dict[int, State]:
        states = {rank: _state(pid) for rank, pid in self.pids.items()}
        return {rank: state for rank, state in states.items() if state is not None}


def _state(pid: int) -> State | None:
    """Return why a process cannot answer, or None if it can."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0]
    except ProcessLookupError:
        return "has ended"
    except OSError:  # no /proc here
        return None
    if letter in (b"Z", b"X"):
        return "has ended"
    return "is stopped (SIGSTOP)" if letter == b"T" else None


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
        time.sleep(_PARENT_TICK)
    with contextlib.suppress(OSError):
        ready = select.poll()
        ready.register(2, select.POLLOUT)
        if ready.poll(0):  # a pipe may be full without a reader, and a write to it would block
            os.write(2, f"{says}\n".encode())
    os._exit(1)
