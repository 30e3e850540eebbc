"""Measures this machine in some seconds: products, copies, what an operation costs, and what Gloo does.

One process computes; then a few ranks send each other tensors of several sizes over the loopback. What
sending costs is fitted to those, in relative terms, as seconds a byte, a message and a round.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, cycle

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.collective import Collective, Kind, Label, Walk
from ..evidence.gloo_bytes import GlooTraffic, gloo_sent
from ..evidence.predict import step_over_ones
from ..launching.launch import launch
from ..plan.grid import Coordinate, Grid
from ..plan.matrix import Matrix
from ..plan.strategies import replicated
from ..worlds.live import LiveWorld, build_mesh
from ..worlds.local import LocalWorld
from .machine import Link, Machine, Rates
from .work import Work

SIDES = (16, 32, 64, 128, 256, 512, 1024)
BYTES = (4_096, 65_536, 1_048_576, 8_388_608, 50_331_648)
SENT = (256, 65_536, 1_048_576, 8_388_608)
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all")
MOST_RANKS = 8
FEW, MANY = 12, 40
ENDLESS = 1e12  # bytes a second: what a loopback costs is the processor's


@dataclass(frozen=True, slots=True)
class GlooSample:
    """One collective on real ranks: what this one sent of how many, and the seconds of each time."""

    ranks: int
    sent: GlooTraffic
    seconds: tuple[float, ...]


def calibrate(
    name: str | None = None, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
) -> Machine:
    """This machine, measured with one thread a rank, in some seconds. Nothing else should run meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gemm = {str(dtype).removeprefix("torch."): measure_products(dtype) for dtype in dtypes}
        copy = measure_copies()
        operation = measure_operation(gemm, copy)
    finally:
        torch.set_num_threads(threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # With a core for each rank, a message's work and a round's delay look alike: more ranks tell them apart.
    counts = (2, min(MOST_RANKS, max(4, 2 * cores)))
    samples = [slowest(each) for ranks in counts for each in zip(*launch(sample_gloo, ranks), strict=True)]
    byte, message, latency, turn = fit_gloo(samples, cores)
    return Machine(
        name=name or f"{platform.machine()}, {cores} cores",
        gemm=gemm,
        copy=copy,
        operation=operation,
        turn=turn,
        inside=Link(ENDLESS, latency),
        ranks_per_node=2**20,
        cores=cores,
        algorithm="gloo",
        byte=byte,
        message=message,
        sources={"all": f"measured here, torch {torch.__version__}, one thread a rank"},
    )


def measure_products(dtype: torch.dtype, sides: Sequence[int] = SIDES) -> Rates:
    """Operations a second of square products, by side: those of Newton–Schulz, each with memory of its own.

    A plain product of one matrix, again and again into the same memory, is a fifth faster.
    """
    rates: list[tuple[float, float]] = []
    for side in sides:
        matrices = [torch.randn(side, side).to(dtype) / side for _ in range(3)]
        seconds = _seconds(partial(_newton_schulz_products, cycle(matrices)))
        rates.append((float(side), 6 * side**3 / seconds))
    return tuple(rates)


def _newton_schulz_products(matrices: Iterator[Tensor]) -> Tensor:
    X = next(matrices)
    A = X @ X.mT
    B = torch.addmm(A, A, A, beta=-4.8, alpha=2.0)
    return torch.addmm(X, B, X, beta=3.4)


def measure_copies(sizes: Sequence[int] = BYTES) -> Rates:
    """Bytes read and written a second by adding one tensor to another, by the bytes of an operation."""
    rates: list[tuple[float, float]] = []
    for size in sizes:
        a = torch.ones(size // 12)
        seconds = _seconds(partial(a.add_, torch.ones_like(a), alpha=0.5))
        rates.append((float(size), 12 * a.numel() / seconds))
    return tuple(rates)


def measure_operation(gemm: dict[str, Rates], copy: Rates) -> float:
    """Seconds of an operation beside its data: a step over small matrices, divided by its operations."""
    matrices = [Matrix(index, f"m{index}", (16, 16)) for index in range(24)]
    plan, at = replicated(matrices, Grid.of(dp=1)), Grid.of(dp=1).at(0)
    work = Work(Machine("none", gemm, copy, 0.0, 0.0, Link(1.0, 0.0)))
    meta, real = (step_over_ones(plan, at, torch.device(device)) for device in ("meta", "cpu"))
    with torch.no_grad():
        with work:
            LocalWorld(plan.grid).run([meta.step()])
        seconds = _seconds(lambda: LocalWorld(plan.grid).run([real.step()]))
    return max(0.0, seconds - work.product - work.copy) / work.operations


def sample_gloo(rank: int) -> list[GlooSample]:
    """Collectives of several kinds and sizes over all ranks. All of them must call."""
    world = LiveWorld(build_mesh({"dp": dist.get_world_size()}))
    return [_sample(world, kind, size) for kind in KINDS for size in SENT]


def _sample(world: LiveWorld, kind: Kind, size: int) -> GlooSample:
    request = _request(kind, world.at, size)
    seconds = []
    for _ in range(FEW if size > SENT[-2] else MANY):
        dist.barrier()
        begin = time.perf_counter()
        world.run(_once(request))
        seconds.append(time.perf_counter() - begin)
    return GlooSample(world.grid.world_size, gloo_sent(request, world.at), tuple(seconds))


def _once(request: Collective) -> Walk:
    yield request


def _request(kind: Kind, at: Coordinate, size: int) -> Collective:
    parts, each = at.size("dp"), size // 4 // at.size("dp")
    send = torch.ones(each if kind == "all_gather" else each * parts)
    splits = (each,) * parts if kind == "all_to_all" else None
    return Collective(kind, ("dp",), send.dtype, send, each * parts, Label(kind), None, splits, splits)


def slowest(by_rank: Sequence[GlooSample]) -> GlooSample:
    """One collective as its slowest rank saw it, time by time."""
    return replace(by_rank[0], seconds=tuple(map(max, zip(*(one.seconds for one in by_rank), strict=True))))


def fit_gloo(samples: Sequence[GlooSample], cores: int) -> tuple[float, float, float, float]:
    """Seconds a byte, a message, a round and a request, by relative least squares, none below zero.

    Ranks beyond the cores take turns: what the processor does counts as often as there are ranks for a core.
    Where there were none beyond, a message's seconds are a round's.
    """
    rows = []
    for sample in samples:
        share, middle = max(1.0, sample.ranks / cores), statistics.median(sample.seconds)
        costs = (share * sample.sent.data, share * sample.sent.messages_out, sample.sent.messages_out, share)
        rows.append([cost / middle for cost in costs])
    table = torch.tensor(rows, dtype=torch.float64)
    if all(sample.ranks <= cores for sample in samples):
        table[:, 1] = 0.0
    byte, message, latency, turn = _fit_above_zero(table, torch.ones(len(rows), dtype=torch.float64))
    return byte, message, latency, turn


def _fit_above_zero(rows: Tensor, due: Tensor) -> list[float]:
    """The best of all fits that leave some columns out and whose others are not below zero."""
    columns = range(rows.shape[1])
    filled = [column for column in columns if bool(rows[:, column].any())]
    best, least = [0.0 for _ in columns], float("inf")
    for count in range(1, len(filled) + 1):
        for kept in combinations(filled, count):
            found = torch.linalg.lstsq(rows[:, list(kept)], due[:, None]).solution[:, 0]
            error = float((rows[:, list(kept)] @ found - due).square().sum())
            if bool((found >= 0).all()) and error < least:
                values = dict(zip(kept, found.tolist(), strict=True))
                best, least = [values.get(column, 0.0) for column in columns], error
    return best


def _seconds(run: Callable[[], object], at_least: float = 0.15) -> float:
    """The median of enough runs to fill ``at_least`` seconds."""
    run()
    found: list[float] = []
    until = time.perf_counter() + at_least
    while len(found) < 5 or time.perf_counter() < until:
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
