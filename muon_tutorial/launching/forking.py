"""The launching process' side of the warm server: start it once, ask it for ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import NoReturn

from ..errors import LaunchError
from .messages import Exited, Order, RankEnds, Started, Stopped
from .run_files import RunFiles

_BOOT = (
    "import sys, json; path, control = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from muon_tutorial.launching.fork_server import main; main(control)"
)

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Importing torch's compiler makes a folder for its cache; the server names one that is there already.
_QUIET = {"TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}


class ForkServer:
    """The warm server of this process. Threads may share it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._asking = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps([_absolute(sys.path), theirs.fileno()])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=_QUIET | dict(os.environ) | _ONE_THREAD,
        )
        theirs.close()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._control.close)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._child.poll() is None

    def open_world(self) -> socket.socket:
        """Return a line to the server for one run."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._asking:
                socket.send_fds(self._control, [b"W"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def last_words(self) -> str:
        """Return the last line the server wrote to its standard error before it ended."""
        self._child.kill()
        _, errors = self._child.communicate()
        lines = errors.decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._child.returncode}")

    def close(self) -> None:
        """End the server, and whatever ranks it has, at once."""
        atexit.unregister(self.close)
        self._control.close()
        self._child.terminate()
        self._child.communicate()


class ForkedRanks:
    """The rank processes of one run, forked by the server; this process is not their parent."""

    def __init__(self, server: ForkServer, files: RunFiles, ends: list[RankEnds]) -> None:
        self._server = server
        self._line = server.open_world()
        self._alive: dict[int, int] = {}  # rank → process id
        self._is_lost = False
        try:
            self._order(files, ends)
        except BaseException:
            self._line.close()
            raise

    def waitables(self) -> list[socket.socket]:
        """Return what becomes readable when there is news."""
        return [self._line]

    def news(self) -> list[Started | Exited | Stopped]:
        """Return what the server has told since the last call.

        Raises:
            LaunchError: the server is gone.
        """
        if self._is_lost:
            return [Exited(rank, -signal.SIGKILL) for rank in self._alive]
        news: list[Started | Exited | Stopped] = []
        while (event := self._next_event()) is not None:
            news.append(event)
            self._keep_count(event)
        return news

    def kill(self) -> None:
        """End every process that still runs, stopped ones too."""
        with contextlib.suppress(OSError):
            self._line.send(b"K")

    def close(self) -> None:
        """Give the line back; the server ends what is left, if anything is."""
        self._line.close()

    def _order(self, files: RunFiles, ends: list[RankEnds]) -> None:
        socket.send_fds(self._line, [pickle.dumps(Order(len(ends)))], files.descriptors)
        for end in ends:
            socket.send_fds(self._line, [b"R"], [end.line.fileno(), end.output.fileno()])
        self._line.setblocking(False)

    def _next_event(self) -> Started | Exited | Stopped | None:
        try:
            packet = self._line.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionError:
            packet = b""
        if not packet:
            self._lose_server()
        return pickle.loads(packet)

    def _lose_server(self) -> NoReturn:
        """End the ranks without the server's help, and say what became of it."""
        self._is_lost = True
        for pid in self._alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise LaunchError(f"the process that forks ranks ended ({self._server.last_words()}); launch again")

    def _keep_count(self, event: Started | Exited | Stopped) -> None:
        if isinstance(event, Started):
            self._alive = dict(enumerate(event.pids))
        elif isinstance(event, Exited):
            self._alive.pop(event.rank, None)


def warm_server() -> ForkServer:
    """Return this process' server, started now if there is none that runs. It may still be importing."""
    with _STARTING:
        if not _server_of(os.getpid()).is_alive:
            _server_of.cache_clear()
        return _server_of(os.getpid())


_STARTING = threading.Lock()


@functools.cache
def _server_of(pid: int) -> ForkServer:
    """Return the server of process `pid`, which is this one: a forked child starts its own."""
    return ForkServer()


def _absolute(entries: list[str]) -> list[str]:
    return [os.path.abspath(entry) for entry in entries]
