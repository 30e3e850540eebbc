"""Kernels that begin as forks of a process which has imported what all lessons and their ranks import.

Imports take a kernel three seconds of a core, and its warm server five, in each of seventeen lessons. Here
one process without threads imports torch, the widgets and the kernel's package, and nothing of ours; each
kernel is a fork of that process, and so is the kernel's server. ``test_pack``, ``test_jupyterlab`` and the
tests of lesson 00 start kernels as readers do.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import gettempdir
from typing import Any, NoReturn

IMPORTED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "ipywidgets",
    "ipykernel.kernelapp",
)
_RESERVED: list[tuple[int, socket.socket]] = []
"""In a kernel: the process that waits to become its warm server, by its id, and the line to it."""


class Forked:
    """A forked process, used like a ``subprocess.Popen``. Subclasses say how its end becomes known."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# In the process that runs notebooks.


class Kernels:
    """The process that forks kernels, one after the other; make it before there are threads."""

    def __init__(self) -> None:
        self._line, theirs = Pipe()
        if not os.fork():
            self._line.close()
            _fork_kernels(theirs)  # returns only in a kernel, by SystemExit
        theirs.close()

    def launch(self, command: Sequence[str], env: Mapping[str, str], **_: Any) -> Forked:
        """Start a kernel in the current folder: in place of ``jupyter_client.launcher.launch_kernel``."""
        self._line.send((list(command), dict(env), os.getcwd()))
        return _Kernel(self._line)


class _Kernel(Forked):
    def __init__(self, line: Connection) -> None:
        self._line = line
        super().__init__(line.recv())

    def poll(self) -> int | None:
        if self.returncode is None and self._line.poll():
            self.returncode = self._line.recv()
        return self.returncode


# In the process that forks.


def _fork_kernels(line: Connection) -> None:
    _end_with_parent()
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # which ipykernel reads at its import
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = gettempdir()  # torch._dynamo would make a folder at its import
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        try:
            command, env, cwd = line.recv()
        except EOFError:
            os._exit(0)
        pid = os.fork()
        if not pid:
            _end_with_parent()
            os.setsid()
            line.send(os.getpid())  # with a process group of its own, to which signals go
            line.close()
            _be_kernel(command, env, cwd)
        _, status = os.waitpid(pid, 0)
        line.send(os.waitstatus_to_exitcode(status))


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _be_kernel(command: Sequence[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [*env["PYTHONPATH"].split(os.pathsep), *(each for each in sys.path if each)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        _wait_to_be_server(theirs)
    theirs.close()
    _RESERVED.append((pid, ours))
    assert command[1:3] == ["-m", "ipykernel_launcher"]
    sys.argv[:] = ["ipykernel_launcher", *command[3:]]
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()
    sys.exit()


# In a kernel.


def use_reserved_server() -> None:
    """Let the process that waits for this role become the kernel's first warm server."""
    from muon_tutorial.launching import fork_server

    class Started(subprocess.Popen):
        def __new__(cls, command: Any, **options: Any) -> Any:
            return _start_reserved(command, **options) if _RESERVED else super().__new__(cls)

    vars(fork_server)["subprocess"] = _Subprocess(Started)


class _Subprocess:
    """The module ``subprocess`` with another ``Popen``."""

    def __init__(self, popen: Any) -> None:
        self.Popen = popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


class _Server(Forked):
    def __init__(self, pid: int, errors: int) -> None:
        super().__init__(pid)
        self.stderr: Any = os.fdopen(errors, "rb")

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def communicate(self) -> tuple[None, bytes]:
        said = self.stderr.read()
        self.wait()
        return None, said


def _start_reserved(command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> Any:
    pid, line = _RESERVED.pop()
    errors, theirs = os.pipe()
    packet = json.dumps([*command[2:], dict(env)]).encode()
    with line:
        socket.send_fds(line, [packet], [*pass_fds, theirs])
    os.close(theirs)
    return _Server(pid, errors)


def _wait_to_be_server(line: socket.socket) -> NoReturn:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which goes to all of a kernel's processes
    packet, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
    if not packet:
        os._exit(0)
    boot, argument, env = json.loads(packet)
    line.close()
    null, (given, errors) = os.open(os.devnull, os.O_RDWR), descriptors
    control = json.loads(argument)[1]
    for have, wanted in ((null, 0), (null, 1), (errors, 2), (given, control)):
        os.dup2(have, wanted)
    for each in {null, given, errors} - {0, 1, 2, control}:
        os.close(each)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = ["-c", argument]
    exec(compile(boot, "<string>", "exec"), {"__name__": "__main__"})
    os._exit(1)
