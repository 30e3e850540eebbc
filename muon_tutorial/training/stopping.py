"""Handles the signals with which schedulers ask a training run to save, or to save and stop.

A process that gets a signal makes a file in the run folder. The file says what the signal asks for. After
each step every rank looks for this file, and all ranks agree. So it does not matter which processes a signal
reached, or how often.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, NoReturn, get_args

from ..errors import RunFolderError, UsageError
from ..launching.signals import exiting_after
from .checkpoints import Saving
from .run_folder import METRICS, RunFolder

Act = Literal["save", "stop", "end"]
DEFAULT_ACTS: Mapping[str, Act] = {
    "TERM": "stop",
    "HUP": "stop",
    "XCPU": "stop",
    "USR1": "save",
    "USR2": "save",
}
GRACE = 25.0
"""Seconds for the current step and the save: Kubernetes, SLURM and torchrun kill after 30."""
REPEAT = 1.0
"""Seconds in which the same request may arrive twice: from the terminal or scheduler, and from torchrun."""
LATE = "not saved within {:g} s (--grace); older checkpoints are intact"


class EndedBySignal(BaseException):
    """Raised to end this process after a signal. Like an interrupt, it leaves nothing incomplete behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def acts_by(words: Sequence[str]) -> dict[str, Act]:
    """What each signal does, by its name: the defaults, changed by the command line's words ``NAME=ACT``.

    Signals that this process ignores, such as SIGHUP under ``nohup``, are left out.
    """
    acts = dict(DEFAULT_ACTS)
    for word in words:
        name, _, act = word.partition("=")
        if name not in acts or act not in get_args(Act):
            kinds, names = ", ".join(get_args(Act)), ", ".join(acts)
            raise UsageError(
                f"--on-signal takes NAME=ACT, where NAME is one of {names} and ACT one of {kinds}; "
                f"not {word!r:.40}"
            )
        acts[name] = act  # type: ignore[assignment]
    ignored = [name for name in acts if signal.getsignal(signal.Signals[f"SIG{name}"]) is signal.SIG_IGN]
    return {name: act for name, act in acts.items() if name not in ignored}


def exit_code(reason: str) -> int:
    """The exit code of a run that stopped for this reason: 128 + a signal's number, else 0."""
    return 128 + signal.Signals[reason] if reason.startswith("SIG") else 0


@contextmanager
def heeding_signals(
    saving: Saving,
    says: str | None,
    grace: float,
    end: Callable[[int], None],
    repeat: float = 0.0,
) -> Iterator[None]:
    """Let signals ask the run to save, or to save and stop; a second request to stop calls ``end``.

    Before the run's first step, even the first request to stop calls ``end``. Requests to an earlier run are
    removed. Must be entered in the main thread, before this process trains.

    Args:
        says: the line that is printed when the run is first asked to stop; None if another process prints it.
        grace: the process exits this many seconds after that request, whatever it is doing.
        repeat: a Ctrl-C within this many seconds of the first counts as the same request (for other signals:
            ``REPEAT``).
    """
    asked: list[float] = []
    late = ExitStack()

    def handle(number: int, _: object) -> None:
        act = saving.acts.get(_name(number), "stop")
        apart = repeat if number == signal.SIGINT else REPEAT
        if act == "save":
            saving.save_file.touch()
        elif act == "end" or not _has_begun(saving):
            end(number)
        elif not asked:
            asked.append(time.monotonic())
            late.enter_context(exiting_after(grace, 128 + number, says and LATE.format(grace)))
            _ask_to_stop(saving, number)
            if says is not None:
                print(says, file=sys.stderr, flush=True)
        elif time.monotonic() - asked[0] > apart and number != signal.SIGXCPU:  # SIGXCPU comes every second
            end(number)

    _forget_requests(saving)
    with _handling(handle, ("INT", *saving.acts)), late:
        try:
            yield
        finally:
            _forget_requests(saving)


@contextmanager
def passing_signals_on(saving: Saving) -> Iterator[None]:
    """In a rank of ``launch()``, pass a signal's request on to all ranks. SIGXCPU reaches only one rank."""

    def handle(number: int, _: object) -> None:
        if saving.acts[_name(number)] == "save":
            saving.save_file.touch()
        else:
            _ask_to_stop(saving, number)

    with _handling(handle, saving.acts):
        yield


@contextmanager
def ending_on_signals(acts: Mapping[str, str]) -> Iterator[Callable[[int], None]]:
    """While there is nothing to save, let signals end this process, except those that only ask to save.

    Yields the function that ends the process. A signal that arrives while the process ends changes nothing.
    """
    ending = False

    def end(number: int) -> None:
        nonlocal ending
        if not ending:
            ending = True
            unwind(number)

    def handle(number: int, _: object) -> None:
        if acts.get(_name(number)) != "save":
            end(number)

    with _handling(handle, acts):
        yield end


def unwind(number: int) -> NoReturn:
    """Raise the exception that ends this process's work."""
    raise KeyboardInterrupt if number == signal.SIGINT else EndedBySignal(number)


def _ask_to_stop(saving: Saving, number: int) -> None:
    """Ask all ranks to save and stop after the current step; the first reason is kept."""
    if not saving.stop_file.exists():
        draft = saving.stop_file.with_name(f".stop-{uuid.uuid4().hex}")  # process ids repeat in containers
        draft.write_text(f"SIG{_name(number)}", encoding="ascii")
        os.replace(draft, saving.stop_file)


def _forget_requests(saving: Saving) -> None:
    for path in (saving.stop_file, saving.save_file):
        path.unlink(missing_ok=True)


def _has_begun(saving: Saving) -> bool:
    """Whether a step has been recorded since the run began or was resumed."""
    try:
        records = RunFolder(saving.folder).records(METRICS)
    except RunFolderError:
        return False
    return any(record.get("step", -1) >= (saving.begin or 0) for record in records[-1:])


@contextmanager
def _handling(
    handle: Callable[[int, object], None], names: Sequence[str] | Mapping[str, str]
) -> Iterator[None]:
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _name(number: int) -> str:
    return signal.Signals(number).name.removeprefix("SIG")
