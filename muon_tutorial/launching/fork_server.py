"""A server process that has imported torch and forks ranks (Linux), and the class that controls it.

The server runs one thread, imports none of the user's modules, and makes no CUDA call, so that it is safe to
fork. Only the launching process holds the other end of the server's control socket. When the launching
process ends, the socket closes, and the server ends all its ranks and itself.

The fork server of ``multiprocessing`` would be as fast, but its ranks run the user's script again if the
script has no main guard, and a killed launching process leaves a temporary folder and stopped ranks behind.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import NoReturn

from ..errors import LaunchError
from .end_with_parent import die_with_parent
from .messages import ProcessState, RankEnds
from .rank_process import be_rank
from .run_files import RunFiles
from .signals import IGNORING, held_back

_BOOT = f"""{IGNORING}
import ctypes, gc, json, os, select, socket, sys
gc.disable()  # for good: imported modules stay until the process ends
path, control, parent = json.loads(sys.argv[1])
sys.path[:] = path
def end_without_parent(number=0, frame=None):  # also in the midst of an import, which takes seconds
    if os.getppid() != parent:
        sys.exit(1)
    with socket.socket(fileno=os.dup(control)) as end:
        if select.select([end], [], [], 0)[0] and not end.recv(1, socket.MSG_PEEK):
            sys.exit(1)
signal.signal(signal.SIGCONT, end_without_parent)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGCONT)  # PR_SET_PDEATHSIG: launching/end_with_parent says why SIGCONT
end_without_parent()
from muon_tutorial.launching.fork_server import serve
from muon_tutorial import *  # the optimizer, once for all ranks
try:
    serve(control)
except SystemExit:
    os._exit(0)  # a normal exit would spend a while on destroying torch's modules
"""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Importing torch's compiler creates its cache folder; to leave none behind, name one that exists already.
_NO_CACHE_FOLDER = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TMPDIR", "/tmp")}
# Ranks are likely to need these modules (torch's optimizers import some), and importing them takes seconds.
# The idle server imports them one after the other, so that the first launch does not wait for them.
_LATER = (
    "sympy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "ipywidgets",
)
_ENDING = 5.0  # Seconds for the server to end its ranks and itself.
_KILL = b"K"  # Launching process to server: end the ranks of this launch.


class ForkServer:
    """Starts and controls the server, in the launching process. Threads may share it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [os.path.abspath(entry) for entry in sys.path]
        with held_back():
            self._child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps([path, theirs.fileno(), os.getpid()])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=_NO_CACHE_FOLDER | dict(os.environ) | _ONE_THREAD,
            )
        theirs.close()
        self._burying = threading.Lock()
        self._last_error_line: str | None = None
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._control.close)

    def ask_for(self, ends: list[RankEnds], files: RunFiles) -> socket.socket:
        """Ask the server to fork a rank for each of `ends`; return the socket for its reports on ranks."""
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                packet = [str(len(ends)).encode()]
                socket.send_fds(self._control, packet, [theirs.fileno(), *files.descriptors])
            for end in ends:
                socket.send_fds(line, [b"R"], [end.messages.fileno(), end.output.fileno()])
            line.setblocking(False)
        except BaseException:
            line.close()
            raise
        return line

    def last_error_line(self) -> str:
        """Kill the server; return the last line that it wrote to its standard error."""
        with self._burying:
            if self._last_error_line is None:
                self._child.kill()
                _, errors = self._child.communicate()  # only once, because this closes the pipe
                lines = errors.decode(errors="replace").split("\n")
                said = (line for line in reversed(lines) if line.strip())
                self._last_error_line = next(said, f"exit code {self._child.returncode}")
        return self._last_error_line

    def wake(self) -> None:
        """Continue the server if it was stopped (SIGSTOP)."""
        self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and all its ranks immediately, even a server paused by SIGSTOP."""
        self._control.close()
        self.wake()  # SIGCONT makes the server look at the control socket at once
        try:
            self._child.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stderr is not None:
            self._child.stderr.close()


_SERVERS: dict[int, ForkServer] = {}  # by the id of the launching process: forks start their own servers
_STARTING = threading.Lock()


def warm_server() -> ForkServer:
    """Return this process's server; start one if none runs. The server may still be importing torch."""
    with _STARTING:
        server = _SERVERS.get(os.getpid())
        if server is None or server._child.poll() is not None:
            server = _SERVERS[os.getpid()] = ForkServer()
        return server


class ForkedRanks:
    """The rank processes of one launch, forked by the server; this process is not their parent."""

    def __init__(self, files: RunFiles, ends: list[RankEnds]) -> None:
        self._pids: dict[int, int] = {}  # rank → process id, for processes that run
        self._is_lost = False
        self._server = warm_server()
        try:
            self._line = self._server.ask_for(ends, files)
        except ConnectionError:
            self._server.last_error_line()  # this ends the server, so ``warm_server`` starts a new one
            self._server = warm_server()
            self._line = self._server.ask_for(ends, files)
        self._server.wake()
        self.waitables = [self._line]  # these sockets become readable when there is news

    def news(self) -> list[ProcessState]:
        """Return what the server has reported since the last call."""
        if self._is_lost:
            return [ProcessState(rank, pid, -signal.SIGKILL) for rank, pid in self._pids.items()]
        news: list[ProcessState] = []
        while (state := self._next_state()) is not None:
            news.append(state)
            self._pids[state.rank] = state.pid
            if state.exit_code is not None:
                del self._pids[state.rank]
        return news

    def wake(self) -> None:
        self._server.wake()

    def kill(self) -> None:
        """End every process that still runs or is stopped."""
        with contextlib.suppress(OSError):
            self._line.send(_KILL)
        self.wake()

    def close(self) -> None:
        """Close the line; the server then ends the processes that are left."""
        self._line.close()

    def _next_state(self) -> ProcessState | None:
        try:
            packet = self._line.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionError:
            packet = b""
        if packet:
            return pickle.loads(packet)
        self._is_lost = True  # the server has ended, so this process kills its ranks
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        error = self._server.last_error_line()
        raise LaunchError(f"the process that forks ranks ended ({error}); launch again")


class _Family:
    """The ranks of one launch, as the server sees them; ``line`` is the socket to the launching process."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.alive: dict[int, int] = {}  # process id → rank

    def tell(self, pid: int, exit_code: int | None = None, is_stopped: bool = False) -> None:
        with contextlib.suppress(OSError):
            self.line.send(pickle.dumps(ProcessState(self.alive[pid], pid, exit_code, is_stopped)))

    def kill(self) -> None:
        for pid in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Server:
    """The server itself: a loop over the launching process's requests and the exits of its own children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._alarm, self._alarm_in = socket.socketpair()
        self._families: list[_Family] = []
        self._later = deque(_LATER)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._alarm.setblocking(False)
        self._alarm_in.setblocking(False)
        signal.set_wakeup_fd(self._alarm_in.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> None:
        """Fork ranks until the launching process is gone, then kill the ranks that still run."""
        try:
            while self._turn():
                pass
        finally:
            for family in self._families:
                family.kill()

    def _turn(self) -> bool:
        """Handle requests and exits of ranks; return False once the launching process is gone."""
        idle = bool(self._later) and not self._families
        ready = self._selector.select(0 if idle else None)
        if idle and not ready:
            with contextlib.suppress(ImportError):
                importlib.import_module(self._later.popleft())
            gc.freeze()
        for key, _ in ready:
            if key.fileobj is self._control:
                packet, descriptors, _, _ = socket.recv_fds(self._control, 64, 4)
                if not packet:
                    return False
                self._fork_ranks(int(packet), *descriptors)
            elif key.fileobj is self._alarm:
                self._reap()
            else:
                self._hear(key.data)
        return True

    def _fork_ranks(self, count: int, line: int, *files: int) -> None:
        """Fork the ranks, in order. The server closes its copies of the ranks' descriptors."""
        family = _Family(socket.socket(fileno=line))
        self._families.append(family)
        self._selector.register(family.line, selectors.EVENT_READ, family)
        for rank in range(count):
            packet, ends, _, _ = socket.recv_fds(family.line, 1, 2)
            if not packet:
                break  # the launcher has given up; ``_hear`` will see that the line is closed
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                die_with_parent(server)  # the launcher may not know this rank yet, and so not kill it
                self._become_rank(rank, ends, files)
            family.alive[pid] = rank
            family.tell(pid)
            for descriptor in ends:
                os.close(descriptor)
        for descriptor in files:
            os.close(descriptor)

    def _become_rank(self, rank: int, ends: list[int], files: tuple[int, ...]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
            self._selector.close()
            for end in (self._control, self._alarm, self._alarm_in, *(each.line for each in self._families)):
                end.close()
            gc.enable()
            # Python reseeds its own generator after a fork. torch's default seed is a constant anyway.
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()
            messages, output = (socket.socket(fileno=descriptor) for descriptor in ends)
            be_rank(rank, RankEnds(messages, output), RunFiles.behind(files))
        finally:
            os._exit(1)

    def _hear(self, family: _Family) -> None:
        """Kill a launch's ranks when the launcher says so or closes the line."""
        word = b""
        with contextlib.suppress(OSError):
            word = family.line.recv(1)
        family.kill()
        if word != _KILL:
            self._selector.unregister(family.line)
            family.line.close()
            self._families.remove(family)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._alarm.recv(1 << 12)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid == 0:
                    return
                for family in (family for family in self._families if pid in family.alive):
                    if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                        family.tell(pid, is_stopped=os.WIFSTOPPED(status))
                    else:
                        family.tell(pid, exit_code=os.waitstatus_to_exitcode(status))
                        del family.alive[pid]


def serve(control: int) -> NoReturn:
    """Serve the launching process at the other end of `control` until that process exits or closes it."""
    gc.freeze()
    _Server(socket.socket(fileno=control)).run()
    sys.exit()
