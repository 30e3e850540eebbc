"""How a command begins and ends: what it sees to before torch, whose import takes seconds, and after.

An interrupt inside an import is a long traceback, or an error of a C extension that lost it; in a folder that
is gone, torch's math library ends the process. Imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated"}


def begin_command() -> None:
    """See to signals while torch is imported, and end here, in one line, if that cannot go well.

    SIGTERM ends the process although it may be the first of a container; SIGUSR1 and SIGUSR2, with which
    schedulers ask to save, end nothing.
    """
    end_on_interrupt()
    for name, heed in {"SIGTERM": _ended_by, "SIGUSR1": _unheeded, "SIGUSR2": _unheeded}.items():
        if hasattr(signal, name) and signal.getsignal(signal.Signals[name]) is signal.SIG_DFL:
            signal.signal(signal.Signals[name], heed)
    try:
        os.getcwd()
    except OSError as error:
        _end(f"error: the working directory cannot be used: {error.strerror}; change to another", BAD_INPUT)


def import_without_collecting(name: str) -> None:
    """Import a module while nobody looks for garbage: of the objects that it makes, a million, none is.

    An import of torch takes a third less.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def keep_what_is_imported() -> None:
    """Have no collection look at what has been made up to now: modules stay until the end.

    Python's last one would take half a second over torch's.
    """
    gc.freeze()


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, saying so in one line, until ``raise_on_interrupt``.

    For a command before it has anything to lose, and after. Where SIGINT is ignored (a shell's background
    job) or somebody else handles it, that stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ended_by)


def ignore_interrupts_at_exit() -> None:
    """Let Ctrl-C do nothing once nothing is left to do: Python, in its last moments, would die by the signal.

    Call it before whatever else is to be done at exit, which then comes before it.
    """
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, where ``end_on_interrupt`` had changed that."""
    if signal.getsignal(signal.SIGINT) is _ended_by:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def said_of(name: str) -> str:
    """Return what a command says that a signal ended."""
    return _WORDS.get(name, f"ended by {name}")


def fill_standard_descriptors() -> None:
    """Open the null device where standard input, output or error is closed (``>&-``); Python has streams.

    Files that are opened later would take their place.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _ended_by(number: int, frame: FrameType | None) -> NoReturn:
    _end(said_of(signal.Signals(number).name), 128 + number)


def _unheeded(number: int, frame: FrameType | None) -> None:
    """Nothing is there to be saved yet."""


def _end(line: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
    os._exit(code)
