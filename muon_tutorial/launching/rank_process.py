"""One rank of a launch: takes its seat, joins the group, runs the function, says what came of it.

A second thread listens to the launching process. When that process ends, or closes the line, the rank exits
at once, whatever its main thread is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import linecache
import os
import pickle
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .messages import LEAVE, WHERE, Job, Mailbox, Raised, Returned, Whereabouts
from .phase import report_phase, take_slot
from .run_files import RunFiles
from .ship_functions import dumps, loads
from .timeouts import new_groups_time_out

_OWN_FOLDER = os.path.dirname(__file__)
_LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__), _OWN_FOLDER)
# What torch.distributed says when another rank failed, or did not come.
_ECHO = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|Application timeout|Socket [Tt]imeout|"
    r"[Ww]ait timeout|monitoredBarrier|connectFullMesh failed"
)
_COMMUNICATION = os.path.join(os.path.dirname(torch.__file__), "distributed")


@dataclass(frozen=True, slots=True)
class Seat:
    """What makes a process a rank: its number, line to the launching process, output, and the run's files."""

    rank: int
    line: socket.socket
    output: socket.socket
    files: RunFiles


def sit(seat: Seat) -> NoReturn:
    """Be this rank, to the end of the process."""
    _redirect_output(seat.output)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox, may_leave = Mailbox(seat.line), threading.Event()
    threading.Thread(target=_listen, args=(seat, mailbox, may_leave), name="watchdog", daemon=True).start()
    outcome = _outcome(seat)
    _flush()
    mailbox.send(outcome)
    may_leave.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()
    os._exit(isinstance(outcome, Raised))


def _outcome(seat: Seat) -> Returned | Raised:
    try:
        return Returned(_work(seat))
    except BaseException as error:
        return _raised(error, time.monotonic())


def _work(seat: Seat) -> bytes:
    take_slot(seat.files.board, seat.rank)
    report_phase("starting up")
    with open(seat.files.job, "rb") as file:
        job: Job = pickle.load(file)
    _adopt(job)
    with new_groups_time_out(job.timeout):
        _join_group(job, seat)
        fn, args, kwargs = loads(job.cargo)
        report_phase("")
        return _packed_value(fn(seat.rank, *args, **kwargs))


def _adopt(job: Job) -> None:
    """Take over the launching process' surroundings, and the sources it alone knows."""
    os.environ.clear()
    os.environ.update(job.environ)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(job.folder)
    sys.path[:] = job.import_path
    sys.argv[:] = job.argv
    for name, lines in job.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    torch.set_num_threads(job.threads)
    dist.set_debug_level_from_env()


def _join_group(job: Job, seat: Seat) -> None:
    if job.backend == "nccl":
        torch.cuda.set_device(seat.rank)
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(seat.files.store, job.world_size),
        rank=seat.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )


def _packed_value(value: Any) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the value returned, a {kind}, cannot be sent to the launcher: {error}") from None


def _raised(error: BaseException, when: float) -> Raised:
    error.__traceback__ = _without_own_frames(error.__traceback__)
    return Raised(
        when,
        "".join(traceback.format_exception_only(type(error), error)).strip(),
        "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip(),
        isinstance(error, RuntimeError) and bool(_ECHO.search(str(error))),
        _packed_error(error),
    )


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == _OWN_FOLDER:
        frames = frames.tb_next
    return frames


def _packed_error(error: BaseException) -> bytes | None:
    """Return the exception pickled, if it also survives the way back."""
    try:
        data = dumps(error.with_traceback(None))
        loads(data)
    except Exception:
        return None
    return data


def _listen(seat: Seat, mailbox: Mailbox, may_leave: threading.Event) -> None:
    while True:
        word = _next_word(seat.line)
        if word == LEAVE:
            may_leave.set()
        elif word == WHERE:
            with contextlib.suppress(OSError):
                mailbox.send(_whereabouts())
        else:
            seat.files.discard()
            os._exit(1)


def _next_word(line: socket.socket) -> bytes:
    try:
        return line.recv(1)
    except OSError:
        return b""


def _whereabouts() -> Whereabouts:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack = list(traceback.walk_stack(frame))
    files = [each.f_code.co_filename for each, _ in stack]
    return Whereabouts(_user_line(stack), any(name.startswith(_COMMUNICATION) for name in files))


def _user_line(stack: list[tuple[FrameType, int]]) -> str:
    """Describe the innermost line of a stack that is not a library's."""
    for frame, number in stack:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            source = linecache.getline(code.co_filename, number).strip()
            place = f'File "{code.co_filename}", line {number}, in {code.co_name}'
            return f"{place}: {source}" if source else place
    return ""


def _redirect_output(output: socket.socket) -> None:
    """Send stdout and stderr to the launching process line by line, those of C too where the system can."""
    sys.stdout = sys.stderr = io.TextIOWrapper(
        output.makefile("wb"), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    if sys.platform != "win32":
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.enable(file=2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
