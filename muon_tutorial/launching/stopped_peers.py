"""Finds other ranks on this machine that have ended or, on Linux, are stopped, and wakes stopped ones."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["has ended", "is stopped (SIGSTOP)"]

_PATIENCE = 0.5  # Seconds that a process may take to end after its connections have closed.
_TICK = 0.02  # Seconds between looks at such processes.


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
