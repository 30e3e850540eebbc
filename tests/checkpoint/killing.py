"""Savers that are killed at the n-th file system call.

A saver is forked from the test's own process, so a hundred of them take seconds.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from muon_tutorial.checkpoint import folders, piece_files
from muon_tutorial.errors import CheckpointError

SAVED, REFUSED, BROKEN = 0, 3, 4
"""The exit codes of a saver that is not killed: it saved, it was refused, or it had another error."""

# A save's file system calls, each of them one point. Writes have a second point, half way through.
_CALLS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "close")),
    (builtins, "open"),
    (fcntl, "flock"),
    (folders, "_exchange"),
)


@contextlib.contextmanager
def counted(act: Callable[[int], None]) -> Iterator[list[tuple[str, str]]]:
    """Call ``act`` with the number of each point that is passed; yields the list of points (call, target)."""
    passed: list[tuple[str, str]] = []

    def point(name: str, what: Any) -> None:
        passed.append((name, str(what)))
        act(len(passed))

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            point(name, args[0])
            return real(*args, **kwargs)

        return call

    def write_to(file: Any, data: memoryview) -> None:
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            point("write", "")
            file.write(part)
            file.flush()

    real_write = piece_files.write_to
    before = [(where, name, getattr(where, name)) for where, name in _CALLS]
    try:
        for where, name, real in before:
            setattr(where, name, counting(name, real))
        piece_files.write_to = write_to
        yield passed
    finally:
        piece_files.write_to = real_write
        for where, name, real in before:
            setattr(where, name, real)


def passed_by(save: Callable[[], object]) -> list[str]:
    """The names of the calls at the points that a save passes, in order."""
    with counted(lambda number: None) as passed:
        save()
    return [name for name, _ in passed]


def forked(save: Callable[[], object], signal_at: int | None = None, signum: int = signal.SIGKILL) -> int:
    """Start a saver, which sends itself a signal at point ``signal_at`` if given. Returns its process id."""

    def act(number: int) -> None:
        if number == signal_at:
            os.kill(os.getpid(), signum)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
        child = os.fork()
    if child:
        return child
    code = BROKEN
    try:
        with counted(act):
            save()
        code = SAVED
    except CheckpointError:
        code = REFUSED
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    """Wait for a saver; returns one of the codes above, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
