"""Start real ranks from a notebook, a script, a test or a prompt, and leave nothing behind.

Knows how a run is asked for and how its end is told; the parts are in ``launching/``.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ..errors import LaunchError, LaunchTimeoutError, RankFailedError, UsageError
from .environment import loopback_variables
from .failure_message import describe, describe_unfinished, first_failure
from .forking import warm_server
from .messages import Job
from .output import RankOutput, print_line
from .phase import report_phase
from .run_files import run_files
from .ship_functions import cell_labels, cell_sources, pack, unpack_error
from .starting import FITTING, Method, started
from .torchrun import VARIABLES, TorchrunSeat, join_torchrun, joined_by_torchrun, leave_torchrun
from .watch import Run

__all__ = [
    "TorchrunSeat",
    "join_torchrun",
    "joined_by_torchrun",
    "launch",
    "leave_torchrun",
    "report_phase",
    "warm_up",
]

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
    """Run ``fn(rank, *args, **kwargs)`` on `world_size` real processes; return what each returned, by rank.

    In each rank torch.distributed is initialised over loopback; its default group, and any that `fn` makes
    without saying otherwise, has `timeout` seconds. Any thread may call this, a rank too.

    Args:
        fn: importable, or from a cell, a script or a prompt; there it takes the globals it uses along.
        backend: ``"gloo"``, or ``"nccl"`` with one GPU a rank.
        threads: of torch, in each rank.
        limit: seconds for the whole run, or None.
        output: where the ranks' lines go. ``"stream"`` prints them behind their rank, ``"quiet"`` drops them,
            a function gets (rank, line).
        max_lines: of a rank that prints more, the first lines and the last few are shown.
        method: ``"fork"`` from a warm server (Linux), or ``"spawn"`` fresh interpreters.

    Raises:
        RankFailedError: a rank raised, exited, was killed or stopped; the earliest comes first.
        LaunchTimeoutError: `limit` passed.
        UsageError: the call cannot work, or `fn` uses what cannot be sent to a rank.
    """
    _check(fn, world_size, backend, timeout, threads)
    job = Job(
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        threads=threads,
        cargo=pack(fn, args, kwargs or {}),
        sources=cell_sources(),
        environ=_rank_environment(threads),
        folder=os.getcwd(),
        import_path=[os.path.abspath(entry) for entry in sys.path],
        argv=list(sys.argv),
    )
    outputs = [RankOutput(rank, _shown(output), max_lines) for rank in range(world_size)]
    try:
        with (
            run_files(pickle.dumps(job), world_size) as files,
            started(files, outputs, method, timeout) as run,
        ):
            return _outcome(run, limit)
    except LaunchError as error:
        raise error.with_traceback(None) from None  # the frames in between tell a reader nothing


def warm_up() -> None:
    """Start importing what ranks need, in the background, so that this process' first launch is fast too."""
    if FITTING == "fork":
        warm_server()


def _outcome(run: Run, limit: float | None) -> list[Any]:
    """Return the values of a run that went well.

    Raises:
        LaunchError: it did not.
        KeyboardInterrupt: somebody stopped it; says where the ranks were.
    """
    try:
        in_time = run.until_settled(limit)
        if run.all_returned():
            run.dismiss()
            if not run.has_failed():
                return run.values()
        stories = run.stories()
    except KeyboardInterrupt:
        what = "launch() was interrupted and its ranks were ended:"
        raise KeyboardInterrupt(describe_unfinished(run.stories(), what, cell_labels())) from None
    if not in_time:
        what = f"the run did not end within its limit of {limit:g} s; its ranks were ended:"
        raise LaunchTimeoutError(describe_unfinished(stories, what, cell_labels()))
    first = first_failure(stories)
    report = describe(stories, run.timeout, cell_labels())
    raise RankFailedError(report, first.rank, unpack_error(first.raised))


def _check(fn: object, world_size: object, backend: str, timeout: float, threads: int) -> None:
    if not callable(fn):
        raise UsageError(f"launch() needs a function to run on every rank, not {fn!r}")
    if not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"launch() needs at least 1 rank, not {world_size!r}")
    if backend not in ("gloo", "nccl"):
        raise UsageError(f'the backend is "gloo" or "nccl", not {backend!r}')
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise UsageError(
            f"NCCL needs a GPU for each rank: {world_size} ranks, {torch.cuda.device_count()} GPUs; "
            'launch fewer ranks, or use backend="gloo"'
        )
    if timeout <= 0:
        raise UsageError(f"the timeout is a positive number of seconds, not {timeout!r}")
    if threads < 1:
        raise UsageError(f"a rank needs at least 1 thread, not {threads!r}")


def _rank_environment(threads: int) -> dict[str, str]:
    """Return this process' environment, made fit for ranks: loopback, few threads, no torchrun."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return kept | loopback_variables() | {"OMP_NUM_THREADS": str(threads)}


def _shown(output: Output) -> Callable[[int, str], None]:
    if output == "stream":
        return print_line
    if output == "quiet":
        return lambda rank, line: None
    if callable(output):
        return output
    raise UsageError(f'output is "stream", "quiet" or a function of (rank, line), not {output!r}')
