"""One rank of a launch, from inside: joins the group, runs the function, reports its outcome.

A second thread listens to the launching process. When that process ends or closes the socket, the rank exits
immediately, whatever its main thread is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from .errors_of_lost_ranks import is_about_lost_rank
from .group_timeouts import new_groups_time_out
from .messages import LEAVE, WHERE, LaunchSpec, MessageSocket, RankEnds, RankLocation, RankRaised
from .phase_and_line import is_communicating, own_line, report_phase, take_slot
from .run_files import RunFiles
from .ship_functions import dumps, loads
from .signals import ignore_only
from .standard_streams import flush_output

_OWN_FOLDER = os.path.dirname(__file__)
# Most bytes of freed memory that a rank keeps: in all, and in one block.
_KEPT, _LARGEST = 256 << 20, 32 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # See mallopt(3).


def be_rank(rank: int, ends: RankEnds, files: RunFiles) -> NoReturn:
    own_process = os.getpid()
    _redirect_output(ends.output)
    messages, may_leave = MessageSocket(ends.messages), threading.Event()
    threading.Thread(target=_obey, args=(messages, files, may_leave), name="watchdog", daemon=True).start()
    outcome: bytes | RankRaised
    try:
        outcome = _run(rank, files)
    except BaseException as error:
        outcome = _raised(error, time.monotonic())
    flush_output()
    if os.getpid() != own_process:  # a child that the function forked must not report
        os._exit(isinstance(outcome, RankRaised))
    messages.send(outcome)
    may_leave.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    flush_output()
    os._exit(isinstance(outcome, RankRaised))


def _run(rank: int, files: RunFiles) -> bytes:
    keep_freed_memory()
    take_slot(files.phases, rank)
    report_phase("starting up")
    with open(files.spec, "rb") as file:
        spec: LaunchSpec = pickle.load(file)
    _take_over_surroundings(spec)
    if spec.backend == "nccl":
        torch.cuda.set_device(rank)
    with new_groups_time_out(spec.timeout):
        dist.init_process_group(
            spec.backend,
            store=dist.FileStore(files.store, spec.world_size),
            rank=rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.timeout),
        )
        fn, args, kwargs = loads(spec.call)
        report_phase("")
        value = fn(rank, *args, **kwargs)
    try:
        return dumps(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the value returned, a {kind}, cannot be sent to the launcher: {error}") from None


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory, instead of giving it back to the system.

    The system zeroes a returned page before its next use, which took a quarter of a step with buckets of a
    few megabytes. Does nothing if the user has set malloc's own variables (MALLOC_…, GLIBC_TUNABLES).
    """
    decided = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not decided:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def _take_over_surroundings(spec: LaunchSpec) -> None:
    """Take over the launching process's environment, folder and paths, and the sources that only it has."""
    os.environ.clear()
    os.environ.update(spec.environ)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(spec.folder)
    sys.path[:] = spec.import_path
    sys.argv[:] = spec.argv
    ignore_only({signal.SIGINT, *spec.handled})
    for name, lines in spec.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    torch.set_num_threads(spec.threads)
    dist.set_debug_level_from_env()


def _raised(error: BaseException, when: float) -> RankRaised:
    frames = error.__traceback__
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == _OWN_FOLDER:
        frames = frames.tb_next
    error.__traceback__ = frames
    summary = "".join(traceback.format_exception_only(error)).strip()
    report = "".join(traceback.format_exception(error)).rstrip()
    original = None
    with contextlib.suppress(BaseException):  # the exception's class may raise anything
        original = dumps(error.with_traceback(None))
    return RankRaised(when, summary, report, is_about_lost_rank(error), original)


def _obey(messages: MessageSocket, files: RunFiles, may_leave: threading.Event) -> None:
    while True:
        try:
            word = messages.end.recv(1)
        except OSError:
            word = b""
        if word == LEAVE:
            may_leave.set()
        elif word == WHERE:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            stack = list(traceback.walk_stack(frame))
            with contextlib.suppress(OSError):
                messages.send(RankLocation(own_line(stack), is_communicating(stack)))
        else:
            files.discard()
            os._exit(1)


def _redirect_output(output: socket.socket) -> None:
    """Send stdout and stderr to the launching process line by line, including what C code prints."""
    sys.stdout = sys.stderr = io.TextIOWrapper(
        output.makefile("wb"), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable(file=2)
