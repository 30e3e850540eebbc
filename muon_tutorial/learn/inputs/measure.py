"""Cores, memory and seconds of this machine; lessons show them in cells tagged ``volatile``."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def private_bytes() -> int:
    """Bytes of this process's private memory, or its peak memory where the system does not report that."""
    table = Path("/proc/self/smaps_rollup")
    if table.exists():
        lines = [line.split() for line in table.read_text().splitlines() if line.startswith("Private_")]
        return sum(int(kilobytes) for _, kilobytes, *_ in lines) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def one_thread() -> Iterator[None]:
    """In the ``with`` block, torch uses one thread, so that bits do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``work``, and the seconds it took."""
    start = time.perf_counter()
    value = work()
    return value, time.perf_counter() - start


def median_seconds(work: Callable[[], Any], times: int) -> float:
    """The median seconds of ``times`` runs of ``work``, after one run that does not count."""
    work()
    return statistics.median(timed(work)[1] for _ in range(times))


def fastest(times: int, work: Callable[..., Any], *arguments: Any) -> float:
    """The seconds of the fastest of ``times`` runs: the one that other work on the machine delayed least."""
    work(*arguments)
    return min(timed(lambda: work(*arguments))[1] for _ in range(times))
