"""How a command begins, before it imports torch, which takes seconds, and how it ends.

An interrupt during an import prints a long traceback, or an unrelated error if a C extension loses it. If the
working directory is gone, torch's math library ends the process. This imports only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated"}


def begin_command() -> None:
    """Handle signals while torch is imported, and exit with a one-line error if the import would fail.

    SIGTERM ends the process even if it is the first process of a container. SIGUSR1 and SIGUSR2, with which
    schedulers ask a job to save, do not end it.
    """
    end_on_interrupt()
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        heed = _ended_by if name == "SIGTERM" else lambda number, frame: None  # nothing to save yet
        if hasattr(signal, name) and signal.getsignal(signal.Signals[name]) is signal.SIG_DFL:
            signal.signal(signal.Signals[name], heed)
    try:
        os.getcwd()
    except OSError as error:
        _end(f"error: the working directory cannot be used: {error.strerror}; change to another", BAD_INPUT)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Keep the garbage collector off, for work that creates many objects and drops few."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, with one line, until ``raise_on_interrupt``.

    For a command that has nothing to lose yet, or nothing any more. If SIGINT is ignored (a background job of
    a shell) or has another handler, nothing changes.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ended_by)


def ignore_interrupts_at_exit() -> None:
    """Ignore Ctrl-C once the work at exit is done; it would otherwise kill Python in its last moments.

    Call it before you register anything else with ``atexit``: handlers run in reverse order.
    """
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, if ``end_on_interrupt`` had changed that."""
    if signal.getsignal(signal.SIGINT) is _ended_by:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say(line: str, code: int) -> int:
    """Print a line on standard error; return the exit code."""
    print(line, file=sys.stderr, flush=True)
    return code


def said_of(name: str) -> str:
    """Return what a command says when this signal ends it."""
    return _WORDS.get(name, f"ended by {name}")


def fill_standard_descriptors() -> None:
    """Open the null device for each of standard input, output and error that is closed (``>&-``).

    Otherwise files that are opened later would get their descriptors. ``sys.stdout`` and ``sys.stderr`` are
    replaced if they are None.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def flush_output() -> None:
    """Flush standard output and error, even if one of them is closed or broken."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _ended_by(number: int, frame: FrameType | None) -> NoReturn:
    _end(said_of(signal.Signals(number).name), 128 + number)


def _end(line: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
    os._exit(code)
