"""Ranks as fresh interpreters, for systems without fork. Each rank imports torch, which takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import astuple

from .messages import ProcessState, RankEnds
from .rank_process import be_rank
from .run_files import RunFiles
from .signals import IGNORING, held_back

_BOOT = IGNORING + (
    "import sys, json; path, *rank = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from muon_tutorial.launching.spawn import be_spawned_rank; be_spawned_rank(*rank)"
)


class SpawnedRanks:
    """The rank processes of one launch, each a child of this process."""

    waitables: tuple[socket.socket, ...] = ()  # no socket announces news, so call ``news`` now and then

    def __init__(self, files: RunFiles, ends: list[RankEnds]) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._states: list[ProcessState | None] = [None] * len(ends)
        try:
            for rank, end in enumerate(ends):
                self._children.append(_spawn(rank, end, files))
        except BaseException:
            self.close()
            raise

    def news(self) -> list[ProcessState]:
        """Return the states of the processes that changed since the last call."""
        before = self._states
        self._states = [
            _state(*each) for each in zip(range(len(before)), self._children, before, strict=True)
        ]
        return [new for new, old in zip(self._states, before, strict=True) if new is not None and new != old]

    def wake(self) -> None:
        """Do nothing, because there is no server."""

    def kill(self) -> None:
        """End every process that still runs or is stopped."""
        for child in self._children:
            with contextlib.suppress(OSError):
                child.kill()

    def close(self) -> None:
        """End the processes, and wait until they are gone."""
        self.kill()
        for child in self._children:
            child.wait()


def be_spawned_rank(rank: int, messages: int, output: int, files: list) -> None:
    """Run as a rank. ``messages`` and ``output`` are descriptors of its sockets, ``files`` the fields of
    ``RunFiles``."""
    ends = RankEnds(socket.socket(fileno=messages), socket.socket(fileno=output))
    be_rank(rank, ends, RunFiles(*files))


def _spawn(rank: int, ends: RankEnds, files: RunFiles) -> subprocess.Popen[bytes]:
    path = [os.path.abspath(entry) for entry in sys.path]
    messages, output = ends.messages.fileno(), ends.output.fileno()
    with held_back():
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps([path, rank, messages, output, astuple(files)])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[messages, output, *files.descriptors],
        )


def _state(rank: int, child: subprocess.Popen[bytes], before: ProcessState | None) -> ProcessState:
    exit_code = child.poll()
    stopped = before is not None and before.is_stopped
    if exit_code is None and hasattr(os, "waitid"):  # macOS has waitid only from Python 3.13 on
        try:
            change = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # the process has ended since ``poll``
            exit_code, change = child.poll(), None
        if change is not None:
            stopped = change.si_code == os.CLD_STOPPED
    return ProcessState(rank, child.pid, exit_code, stopped)
