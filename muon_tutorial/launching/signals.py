"""Handles signals of terminals and schedulers. Such a signal may reach one process of a job, a group, or all.

Terminals, ``timeout`` and ``srun`` send a signal to a whole process group, and ``scancel`` sends it to every
process of a job. The fork server ignores all these signals. A rank ignores the signals that the launching
process handles.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import NoReturn

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SENT = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))

IGNORING = (
    f"import signal\nfor number in {SENT}: signal.signal(number, signal.SIG_IGN)\n"
    f"signal.pthread_sigmask(signal.SIG_UNBLOCK, {SENT})\n"
)
"""A process that is started under ``held_back`` runs this code first, so that it ignores these signals."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block these signals in processes started in this context: a signal would end a new interpreter."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_only(numbers: Iterable[int]) -> None:
    """Ignore these signals, and let the others of ``SENT`` end this process."""
    for number in SENT:
        signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)


def exit_by(number: int) -> NoReturn:
    """Exit immediately with the exit code of a signal, even if other ranks keep this rank waiting."""
    os._exit(128 + number)


@contextlib.contextmanager
def exiting_after(seconds: float, code: int, says: str | None) -> Iterator[None]:
    """Exit if the block takes more than `seconds`, whatever it does. This process's ranks end, too."""

    def end() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{says}\n".encode() if says else b"")
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
