"""The warm server: one quiet process with torch imported that forks ranks on request. Linux only.

It runs one thread, imports no module of the user's, and makes no CUDA call, so that its forks are sound. It
ends, and every rank with it, when the launching process does: that alone holds the other end of its control.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

from .messages import Exited, Order, Started, Stopped
from .rank_process import Seat, sit
from .run_files import RunFiles

KILL = b"K"  # launching process to server: end the ranks of this run
_FILES = 3  # descriptors of a run's files
_ENDS = 2  # descriptors of a rank's line and output

# What ranks are likely to import, torch's optimizers among them: seconds if each rank did it. Imported one by
# one while nothing runs, so that the first launch does not wait for them.
_LATER = (
    "sympy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "ipywidgets",
)


@dataclass(slots=True)
class _World:
    """The ranks of one run, as the server sees them: the line to their launcher, and who is alive."""

    line: socket.socket
    alive: dict[int, int] = field(default_factory=dict)  # process id → rank

    def tell(self, record: object) -> None:
        with contextlib.suppress(OSError):
            self.line.send(pickle.dumps(record))

    def kill(self) -> None:
        for pid in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._alarm, self._alarm_in = socket.socketpair()
        self._worlds: list[_World] = []
        self._later = deque(_LATER)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._listen_for_children()

    def serve(self) -> None:
        """Fork ranks until the launching process is gone, then end those that are left."""
        try:
            while self._turn():
                pass
        finally:
            for world in self._worlds:
                world.kill()

    def _turn(self) -> bool:
        """Answer what has come; False once the launching process is gone."""
        idle = bool(self._later) and not self._worlds
        for key, _ in self._selector.select(0 if idle else None):
            idle = False
            if key.fileobj is self._control:
                if not self._open_world():
                    return False
            elif key.fileobj is self._alarm:
                self._reap()
            else:
                self._hear(key.data)
        if idle:
            self._import_one_more()
        return True

    def _listen_for_children(self) -> None:
        self._alarm.setblocking(False)
        self._alarm_in.setblocking(False)
        signal.set_wakeup_fd(self._alarm_in.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _open_world(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        world = _World(socket.socket(fileno=descriptors[0]))
        packet, files, _, _ = socket.recv_fds(world.line, 1 << 16, _FILES)
        if packet:
            self._populate(world, pickle.loads(packet), tuple(files))
        return True

    def _populate(self, world: _World, order: Order, files: tuple[int, ...]) -> None:
        """Fork the ranks, in order; the server keeps none of what is theirs."""
        self._worlds.append(world)
        self._selector.register(world.line, selectors.EVENT_READ, world)
        for rank in range(order.world_size):
            packet, received, _, _ = socket.recv_fds(world.line, 1, _ENDS)
            if not packet:
                break  # the launcher has given up; the line will say so again
            line, output = received
            pid = os.fork()
            if pid == 0:
                ends = socket.socket(fileno=line), socket.socket(fileno=output)
                self._become(Seat(rank, *ends, RunFiles.behind(files)))
            world.alive[pid] = rank
            os.close(line)
            os.close(output)
        for descriptor in files:
            os.close(descriptor)
        world.tell(Started(tuple(world.alive)))

    def _become(self, seat: Seat) -> NoReturn:
        """Leave the server behind and be a rank."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            for end in (self._control, self._alarm, self._alarm_in, *(world.line for world in self._worlds)):
                end.close()
            gc.enable()
            _draw_own_numbers()
            sit(seat)
        finally:
            os._exit(1)

    def _hear(self, world: _World) -> None:
        """Kill a run's ranks on its launcher's word, or on its silence."""
        word = b""
        with contextlib.suppress(OSError):
            word = world.line.recv(1)
        world.kill()
        if word != KILL:
            self._selector.unregister(world.line)
            world.line.close()
            self._worlds.remove(world)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._alarm.recv(1 << 12)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid == 0:
                    return
                self._announce(pid, status)

    def _announce(self, pid: int, status: int) -> None:
        for world in self._worlds:
            if pid in world.alive:
                world.tell(_event(world.alive[pid], status))
                if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                    del world.alive[pid]

    def _import_one_more(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module(self._later.popleft())
        gc.freeze()


def _event(rank: int, status: int) -> Exited | Stopped:
    if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
        return Stopped(rank, os.WIFSTOPPED(status))
    return Exited(rank, os.waitstatus_to_exitcode(status))


def _draw_own_numbers() -> None:
    """Reseed numpy, as Python reseeds its own generator in a fork; torch starts every process alike."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main(control: int) -> NoReturn:
    """Serve the launching process at the other end of `control`, until it ends or SIGTERM comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    gc.disable()
    gc.freeze()
    _Server(socket.socket(fileno=control)).serve()
    sys.exit()
