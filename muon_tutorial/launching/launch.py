"""``launch()``: start real ranks from a notebook, a script, a test or a prompt, and leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeGuard, get_args

import torch

from ..errors import LaunchError, LaunchTimeoutError, RankFailedError, UsageError
from .environment import rank_environment
from .failure_message import describe_failure, describe_unfinished, first_failure
from .fork_server import ForkedRanks
from .group_timeouts import check_timeout
from .messages import LaunchSpec, MessageSocket, RankEnds
from .run_files import RunFiles, run_files
from .ship_functions import cell_sources, pack, unpack_error
from .signals import SENT
from .spawn import SpawnedRanks
from .standard_streams import fill_standard_descriptors
from .watch_ranks import RankOutput, RankWatcher, WatchedRank, print_line

Method = Literal["fork", "spawn"]
FITTING: Method = "fork" if sys.platform == "linux" else "spawn"
Output = Literal["stream", "quiet"] | Callable[[int, str], None]


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str = "gloo",
    timeout: float = 30.0,
    limit: float | None = None,
    threads: int = 1,
    output: Output = "stream",
    max_lines: int = 200,
    method: Method = FITTING,
) -> list[Any]:
    """Run ``fn(rank, *args, **kwargs)`` on `world_size` real processes; return the values in rank order.

    In each rank torch.distributed is initialised over loopback. Its default group, and every group that `fn`
    makes without a timeout, has a timeout of `timeout` seconds. Any thread may call this, even in a rank.
    Unless a launch runs in a network namespace, other users of this machine can reach Gloo's ports on
    loopback and make the launch time out. On Linux a rank keeps up to 256 MiB of memory that it freed
    (``keep_freed_memory``). If this process handles a signal that terminals or schedulers send, such as
    SIGTERM, ranks ignore the signal, unless `fn` handles it.

    Args:
        fn: an importable function. A function from a cell, a script or a prompt is sent with its globals.
        backend: ``"gloo"``, or ``"nccl"`` with one GPU per rank.
        threads: torch's threads in each rank.
        limit: seconds for the whole run, or None.
        output: where the ranks' lines go. ``"stream"`` prints them with their rank, ``"quiet"`` drops them,
            and a function gets (rank, line).
        max_lines: how many lines of a rank are shown. If a rank prints more, its last lines are shown, too.
        method: ``"fork"`` forks ranks from a warm server (Linux); ``"spawn"`` starts fresh interpreters.

    Raises:
        RankFailedError: a rank raised, exited, was killed or was stopped; the earliest is named first.
        LaunchTimeoutError: `limit` passed.
        UsageError: the call cannot work, or `fn` uses something that cannot be sent to a rank.
    """
    _check(fn, world_size, backend, timeout, limit)
    _check_options(args, kwargs, threads, max_lines, method)
    fill_standard_descriptors()
    outputs = [RankOutput(rank, _shown(output), max_lines) for rank in range(world_size)]
    try:
        call = pack(fn, args, kwargs or {})
        spec = pickle.dumps(_spec(call, world_size, backend, timeout, threads))
        with (
            run_files(spec, world_size) as files,
            _started_ranks(files, outputs, method, timeout) as watcher,
        ):
            return _outcome(watcher, limit)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise LaunchError(
            f"{world_size} ranks need more files open at once than this process may have ({error.strerror}); "
            "raise the limit with ulimit -n 1024"
        ) from None
    except LaunchError as error:
        raise error.with_traceback(None) from None  # this module's frames would not help a reader


def _spec(call: bytes, world_size: int, backend: str, timeout: float, threads: int) -> LaunchSpec:
    """Return what every rank must know: the call, and this process's environment, folder and paths."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory no longer exists; change to another one, then launch"
        ) from None
    return LaunchSpec(
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        threads=threads,
        call=call,
        sources=cell_sources(),
        environ=rank_environment(threads),
        folder=folder,
        import_path=[os.path.abspath(entry) for entry in sys.path],
        argv=list(sys.argv),
        handled=tuple(number for number in SENT if signal.getsignal(number) != signal.SIG_DFL),
    )


@contextlib.contextmanager
def _started_ranks(
    files: RunFiles, outputs: list[RankOutput], method: Method, timeout: float
) -> Iterator[RankWatcher]:
    ranks, ends = [], []
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as until_started:
        for rank, output in enumerate(outputs):
            (messages, rank_messages), (text, rank_text) = socket.socketpair(), socket.socketpair()
            for ours, theirs in ((messages, rank_messages), (text, rank_text)):
                ours.setblocking(False)
                stack.enter_context(ours)
                until_started.enter_context(theirs)
            ranks.append(WatchedRank(rank, MessageSocket(messages), text, output))
            ends.append(RankEnds(rank_messages, rank_text))
        processes = ForkedRanks(files, ends) if method == "fork" else SpawnedRanks(files, ends)
        stack.callback(processes.close)
        until_started.close()
        yield stack.enter_context(contextlib.closing(RankWatcher(ranks, processes, files.phases, timeout)))


def _outcome(watcher: RankWatcher, limit: float | None) -> list[Any]:
    """Wait for the ranks; return their values, or raise an error that says what went wrong."""
    try:
        in_time = watcher.until_settled(limit)
        if watcher.all_returned():
            watcher.dismiss()
            if not watcher.has_failed():
                return watcher.values()
        ranks = watcher.hear_out()
    except KeyboardInterrupt:
        report = "launch() was interrupted and its ranks were ended:"
        with contextlib.suppress(LaunchError):  # Ctrl-C has ended the fork server, too
            report = describe_unfinished(watcher.hear_out(), report)
        raise KeyboardInterrupt(report) from None
    if not in_time:
        what = f"the run did not end within its limit of {limit:g} s; its ranks were ended:"
        raise LaunchTimeoutError(describe_unfinished(ranks, what))
    first = first_failure(ranks)
    original = unpack_error(first.raised.original) if first.raised else None
    raise RankFailedError(describe_failure(ranks, watcher.timeout), first.rank, original)


def _check(fn: object, world_size: object, backend: str, timeout: float, limit: float | None) -> None:
    if not callable(fn):
        raise UsageError(f"launch() needs a function to run on every rank, not {fn!r}")
    if not _is_count(world_size):
        raise UsageError(f"launch() needs at least 1 rank, not {world_size!r}")
    if backend not in ("gloo", "nccl"):
        raise UsageError(f'the backend is "gloo" or "nccl", not {backend!r}')
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise UsageError(
            f"NCCL needs a GPU for each rank: {world_size} ranks, {torch.cuda.device_count()} GPUs; "
            'launch fewer ranks, or use backend="gloo"'
        )
    check_timeout(timeout)
    if limit is not None:
        check_timeout(limit, "the limit")


def _check_options(args: object, kwargs: object, threads: object, max_lines: object, method: object) -> None:
    if not isinstance(args, tuple | list):
        raise UsageError(f"args is a tuple of the function's arguments after the rank, not {args!r:.80}")
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise UsageError(f"kwargs is a dict of the function's arguments by name, not {kwargs!r:.80}")
    if not _is_count(threads):
        raise UsageError(f"a rank needs at least 1 thread, not {threads!r}")
    if not _is_count(max_lines, least=0):
        raise UsageError(f"max_lines must be an integer of at least 0, not {max_lines!r}")
    if method not in get_args(Method):
        raise UsageError(f'the method is "fork" or "spawn", not {method!r}')


def _is_count(value: object, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _shown(output: Output) -> Callable[[int, str], None]:
    if output == "stream":
        return print_line
    if output == "quiet":
        return lambda rank, line: None
    if callable(output):
        return output
    raise UsageError(f'output is "stream", "quiet" or a function of (rank, line), not {output!r}')
