"""Ranks as fresh interpreters, where fork is not to be had. Each imports torch anew: seconds, not tenths."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys

from .messages import Exited, RankEnds, Started, Stopped
from .run_files import RunFiles

_BOOT = (
    "import sys, json; order = json.loads(sys.stdin.readline()); sys.path[:] = order['path']; "
    "from muon_tutorial.launching.spawn import _be_rank; _be_rank(order)"
)


class SpawnedRanks:
    """The rank processes of one run, each a child of this process."""

    def __init__(self, files: RunFiles, ends: list[RankEnds]) -> None:
        self._children: list[subprocess.Popen[str]] = []
        self._announced = False
        self._ended: set[int] = set()
        try:
            for rank, end in enumerate(ends):
                self._children.append(_spawn(rank, end, files))
        except BaseException:
            self.kill()
            self.close()
            raise

    def waitables(self) -> list[socket.socket]:
        """Return what becomes readable when there is news: nothing, so ``news`` wants asking now and then."""
        return []

    def news(self) -> list[Started | Exited | Stopped]:
        """Return what happened to the processes since the last call."""
        news: list[Started | Exited | Stopped] = []
        if not self._announced:
            self._announced = True
            news.append(Started(tuple(child.pid for child in self._children)))
        for rank, child in enumerate(self._children):
            if rank in self._ended:
                continue
            if child.poll() is not None:
                self._ended.add(rank)
                news.append(Exited(rank, child.returncode))
            elif (is_stopped := _was_stopped(child.pid)) is not None:
                news.append(Stopped(rank, is_stopped))
        return news

    def kill(self) -> None:
        """End every process that still runs, stopped ones too."""
        for child in self._children:
            with contextlib.suppress(OSError):
                child.kill()

    def close(self) -> None:
        """Wait for the processes to be gone."""
        for child in self._children:
            child.wait()


def _spawn(rank: int, ends: RankEnds, files: RunFiles) -> subprocess.Popen[str]:
    inherited = [ends.line.fileno(), ends.output.fileno(), *files.descriptors]
    child = subprocess.Popen(
        [sys.executable, "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=() if sys.platform == "win32" else inherited,
        text=True,
    )
    order = {
        "path": [os.path.abspath(entry) for entry in sys.path],
        "rank": rank,
        "line": _token(ends.line, child.pid),
        "output": _token(ends.output, child.pid),
        "files": [files.job, files.store, files.board, files.descriptors],
    }
    with contextlib.suppress(OSError):
        assert child.stdin is not None
        child.stdin.write(json.dumps(order) + "\n")
        child.stdin.close()
    return child


def _was_stopped(pid: int) -> bool | None:
    """Return whether the child was stopped, or continued, since the last call; None when neither."""
    if sys.platform == "win32":
        return None
    change = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    return None if change is None else change.si_code == os.CLD_STOPPED


def _token(end: socket.socket, pid: int) -> str | int:
    """Return what lets the child `pid` open `end`: a descriptor's number, or on Windows a share."""
    if sys.platform == "win32":
        return base64.b64encode(end.share(pid)).decode()
    return end.fileno()


def _opened(token: str | int) -> socket.socket:
    if sys.platform == "win32":
        return socket.fromshare(base64.b64decode(str(token)))
    return socket.socket(fileno=int(token))


def _be_rank(order: dict) -> None:
    from .rank_process import Seat, sit

    job, store, board, descriptors = order["files"]
    files = RunFiles(job, store, board, tuple(descriptors))
    sit(Seat(order["rank"], _opened(order["line"]), _opened(order["output"]), files))
