"""Start real ranks from a notebook, a script, a test or a prompt, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from ..errors import LaunchTimeoutError, RankFailedError, UsageError
from .launching.files import RunFiles, run_files
from .launching.output import RankOutput, print_line
from .launching.phase import report_phase
from .launching.records import Job, Mailbox
from .launching.report import describe, describe_unfinished
from .launching.shipping import cell_labels, cell_sources, pack
from .launching.spawning import RankEnds, SpawnedRanks
from .launching.torchrun import TorchrunSeat, join_torchrun, joined_by_torchrun
from .launching.watching import Processes, Rank, Run

__all__ = ["TorchrunSeat", "join_torchrun", "joined_by_torchrun", "launch", "report_phase"]

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
) -> list[Any]:
    """Run ``fn(rank, *args, **kwargs)`` on `world_size` real processes; return what each returned, by rank.

    In each rank torch.distributed is initialised, over loopback alone, with `timeout` (seconds) on the default group
    and `threads` threads. `limit` is the wall-clock limit of the whole run in seconds. `output` is where the ranks'
    lines go: ``"stream"`` prints up to `max_lines` a rank, behind its number; ``"quiet"`` drops them; a function gets
    (rank, line). `fn` may be importable, or live in a cell, a script or a prompt.

    Raises:
        RankFailedError: a rank raised, exited, was killed or was stopped; the earliest comes first.
        LaunchTimeoutError: `limit` passed.
        UsageError: the call cannot work, or `fn` uses what cannot be sent to a rank.
    """
    job = _job(fn, world_size, args, kwargs or {}, backend, timeout, threads)
    with run_files(pickle.dumps(job), world_size) as files, _started(files, job, _shown(output), max_lines) as run:
        return _outcome(run, limit)


def _outcome(run: Run, limit: float | None) -> list[Any]:
    try:
        in_time = run.until_settled(limit)
        if run.all_returned():
            run.dismiss()
        if run.all_returned() and not run.has_failed():
            return run.values()
    except KeyboardInterrupt:
        what = "launch() was interrupted; its ranks were ended"
        raise KeyboardInterrupt(describe_unfinished(run.stories(), what, cell_labels())) from None
    stories = run.stories()
    if not in_time:
        what = f"the run did not end within its limit of {limit:g} s; its ranks were ended"
        raise LaunchTimeoutError(describe_unfinished(stories, what, cell_labels()))
    raise RankFailedError(describe(stories, run.timeout, cell_labels()))


def _job(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: str,
    timeout: float,
    threads: int,
) -> Job:
    _check(fn, world_size, backend, timeout)
    return Job(
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        threads=threads,
        cargo=pack(fn, args, kwargs),
        sources=cell_sources(),
        environ=_rank_environment(threads),
        folder=os.getcwd(),
        import_path=[os.path.abspath(entry) for entry in sys.path],
        argv=list(sys.argv),
    )


def _check(fn: object, world_size: int, backend: str, timeout: float) -> None:
    if not callable(fn):
        raise UsageError(f"launch() needs a function to run on every rank, not {fn!r}")
    if not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"launch() needs at least 1 rank, not {world_size!r}")
    if backend not in ("gloo", "nccl"):
        raise UsageError(f'the backend is "gloo" or "nccl", not {backend!r}')
    if timeout <= 0:
        raise UsageError(f"the timeout is a positive number of seconds, not {timeout!r}")


def _rank_environment(threads: int) -> dict[str, str]:
    """Return this process' environment, made fit for ranks: loopback, few threads, no torchrun."""
    torchrun = ("TORCHELASTIC", "MASTER_", "LOCAL_RANK", "GROUP_", "ROLE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
    loopback = _loopback_name()
    if loopback:
        kept |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return kept | {"OMP_NUM_THREADS": str(threads)}


def _loopback_name() -> str | None:
    names = [name for _, name in socket.if_nameindex()] if sys.platform != "win32" else []
    return next((name for name in ("lo", "lo0") if name in names), None)


def _shown(output: Output) -> Callable[[int, str], None]:
    if output == "stream":
        return print_line
    if output == "quiet":
        return lambda rank, line: None
    if callable(output):
        return output
    raise UsageError(f'output is "stream", "quiet" or a function of (rank, line), not {output!r}')


@contextlib.contextmanager
def _started(files: RunFiles, job: Job, show: Callable[[int, str], None], max_lines: int) -> Iterator[Run]:
    """Start the ranks; end them, whatever happened, on the way out."""
    ranks, ends = [], []
    for rank in range(job.world_size):
        (line, rank_line), (out, rank_out) = socket.socketpair(), socket.socketpair()
        line.setblocking(False)
        out.setblocking(False)
        ranks.append(Rank(rank, Mailbox(line), out, RankOutput(rank, show, max_lines)))
        ends.append(RankEnds(rank_line, rank_out))
    processes: Processes = SpawnedRanks(files, ends)
    for end in ends:
        end.line.close()
        end.output.close()
    run = Run(ranks, processes, files.board, job.timeout)
    try:
        yield run
    finally:
        run.end()
