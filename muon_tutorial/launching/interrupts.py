"""Handles Ctrl-C and other signals while a command imports torch (which takes seconds) and while it exits.

Without this module, Ctrl-C during an import prints a long traceback, or an unrelated error if a C extension
swallows the interrupt. This module itself imports only the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from types import FrameType
from typing import NoReturn

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated"}


def begin_command() -> None:
    """Handle signals while torch is imported; without a working directory, exit with a one-line error.

    SIGTERM ends the process even if it is the first process of a container. Schedulers send SIGUSR1 and
    SIGUSR2 to ask a job to save; these do not end the process.
    """
    end_on_interrupt()
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        handler = _ended_by if name == "SIGTERM" else lambda number, frame: None  # nothing to save yet
        if hasattr(signal, name) and signal.getsignal(signal.Signals[name]) is signal.SIG_DFL:
            signal.signal(signal.Signals[name], handler)
    try:
        os.getcwd()  # without a working directory, torch's math library would end the process
    except OSError as error:
        _end(f"error: the working directory cannot be used: {error.strerror}; change to another", BAD_INPUT)


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process immediately, with one line, until ``raise_on_interrupt`` is called.

    Call it while a command has nothing to lose: before it starts its work, or after it has finished. If
    SIGINT is ignored (a background job of a shell) or has another handler, nothing changes.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ended_by)


def ignore_interrupts_at_exit() -> None:
    """Ignore Ctrl-C after all exit handlers have run. Otherwise Ctrl-C would kill Python at the very end.

    Call it before you register anything else with ``atexit``: handlers run in reverse order.
    """
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again after ``end_on_interrupt``."""
    if signal.getsignal(signal.SIGINT) is _ended_by:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def said_of(name: str) -> str:
    """Return what a command says if this signal ends it, such as ``"interrupted"``."""
    return _WORDS.get(name, f"ended by {name}")


def _ended_by(number: int, frame: FrameType | None) -> NoReturn:
    _end(said_of(signal.Signals(number).name), 128 + number)


def _end(line: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
    os._exit(code)
