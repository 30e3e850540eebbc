"""Measures this machine in half a minute: products, copies, the cost of an operation, and Gloo's collectives.

First, up to eight processes, one per core, compute at the same time. Then a few ranks send each other tensors
of several sizes over the loopback. A weighted fit turns these times into seconds per byte, message, round and
request. Copies, operations and collectives begin with cold caches, because in a step, too, they follow other
work.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import combinations, cycle, product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.collective import Collective, Kind, Label, Walk
from ..engine.sum_over_grid import sum_over_grid
from ..errors import LaunchTimeoutError, UsageError
from ..evidence.gloo_bytes import GlooTraffic
from ..evidence.predict import step_over_ones
from ..launching.launch import launch
from ..plan.grid import Coordinate, Grid
from ..plan.matrix import Matrix
from ..plan.strategies import replicated
from ..worlds.build_mesh import build_mesh
from ..worlds.live import LiveWorld
from ..worlds.local import LocalWorld
from .compute_seconds import Work
from .machine import Link, Machine, Rates
from .timed_world import traffic_of

SIDES = (16, 32, 64, 128, 256, 512, 1024)
BYTES = (4_096, 65_536, 1_048_576, 8_388_608, 50_331_648)
COLD = 256_000_000
"""Bytes of all tensors that the cores add, one after the other: more than the caches hold."""
SWEPT = 64_000_000
"""Bytes that all ranks together write before each operation or collective, so that caches are cold."""
MOST_PAIRS = 10_000
SENT = (256, 65_536, 1_048_576, 8_388_608)
KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
)
MOST_RANKS = 8
WARM, ROUNDS, SWEEPS = 2, 12, 60
ENDLESS = 1e12
BANDWIDTHS = (ENDLESS, *(2e10 / 1.05**i for i in range(95)))  # bytes per second; the fit tries each
REFITS, NO_BETTER = 8, 1e-6
REPEATED = (256,)
BUSY_LOAD, BUSY_SPREAD = 0.5, 1.3
"""A machine is called busy above this load per core, or if times of equal work differ by this factor."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """One collective as one rank saw it.

    ``busy``: what kept the rank busy. ``moved``: the sum of the bytes that the rank sent and received.
    ``asked``, ``answered``: when the rank made the request and when it had the answer, once per round, in
    seconds on the clock that the machine's processes share.
    """

    busy: GlooTraffic
    moved: int
    asked: tuple[float, ...]
    answered: tuple[float, ...]


GlooSample: TypeAlias = Sequence[RankSample]
"""One collective on all its ranks."""


def took(sample: GlooSample) -> float:
    """The median time from the last rank's request to the last rank's answer, in seconds."""
    asked = map(max, zip(*(one.asked for one in sample), strict=True))
    answered = map(max, zip(*(one.answered for one in sample), strict=True))
    return statistics.median(end - begin for begin, end in zip(asked, answered, strict=True))


def calibrate(limit: float = 28.0) -> Machine:
    """Measure this machine, with one thread per rank, in at most ``limit`` seconds.

    Nothing else should run meanwhile. The result's ``sources["busy"]`` describes any signs of other work.

    Raises:
        UsageError: the machine is too busy to be measured in that time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load, computing, end = os.getloadavg()[0], min(cores, MOST_RANKS), time.perf_counter() + limit
    # With a core per rank, the costs of messages and of rounds cannot be distinguished, so use more ranks.
    counts = sorted({2, *(min(MOST_RANKS, most * cores) for most in (2, 4))})
    samples: list[GlooSample] = []
    try:
        by_core = launch(compute_rates, computing, limit=limit)
        for i, ranks in enumerate(counts):
            left = max(1e-3, end - time.perf_counter())
            until = end - left + 0.8 * left / (len(counts) - i)
            samples += zip(*launch(sample_gloo, ranks, args=(until,), limit=left), strict=True)
    except LaunchTimeoutError:
        pass  # the samples so far may be enough
    each = len(KINDS) * len(SENT)
    if len(samples) < each:
        raise UsageError(
            f"the machine is too busy to be measured in {limit:g} s: load average {load:.1f} on {cores} cores"
        )
    rates = ComputeRates(*median_by_number([astuple(one) for one in by_core]))
    costs = fit_gloo(samples, cores)
    busy = say_busy(
        load, cores, [rate for one in by_core for rate in one.repeated], len(counts) * each - len(samples)
    )
    return Machine(
        name=f"{platform.machine()}, {cores} cores",
        gemm=rates.gemm,
        copy=rates.copy,
        operation=rates.operation,
        turn=costs.turn,
        inside=Link(costs.bandwidth, costs.latency, duplex=False),
        ranks_per_node=2**20,
        cores=cores,
        algorithm="gloo",
        byte=costs.byte,
        message=costs.message,
        sources={
            "all": f"measured here, torch {torch.__version__}, one thread per rank, "
            f"{computing} ranks at a time",
            **({"busy": busy} if busy else {}),
        },
    )


def say_busy(load: float, cores: int, repeated: Sequence[float], missing: int = 0) -> str:
    """Describe the signs that a machine did something else while it was measured; empty if there are none.

    ``load``: the load average before all measurements. ``repeated``: rates of one product on each core,
    before and after the other measurements. ``missing``: how many collectives were left out for lack of time.

    >>> say_busy(0.9, 2, [5.0, 4.5]), say_busy(1.1, 2, [5.0, 5.0, 2.0])[23:-35]
    ('', 'load average 1.1 on 2 cores before, and the same product took up to 2.5 times as long')
    >>> say_busy(0.0, 2, [5.0, 5.0], missing=7)[:58]
    'This machine was busy: 7 collectives not measured in time.'
    """
    spread = max(repeated) / min(repeated)
    signs = [
        *([f"load average {load:.1f} on {cores} cores before"] if load > BUSY_LOAD * cores else []),
        *([f"the same product took up to {spread:.1f} times as long"] if spread > BUSY_SPREAD else []),
        *([f"{missing} collectives not measured in time"] if missing else []),
    ]
    return (
        f"This machine was busy: {', and '.join(signs)}. Calibrate again when it is quiet." if signs else ""
    )


def average_machines(one: Machine, other: Machine) -> Machine:
    """The mean of two calibrations of a machine, number by number; the harmonic mean for bandwidths."""
    names = ("gemm", "copy", "operation", "turn", "byte", "message")
    means = {name: median_by_number([getattr(one, name), getattr(other, name)]) for name in names}
    latency = (one.inside.latency + other.inside.latency) / 2
    bandwidth = 2 / (1 / one.inside.bandwidth + 1 / other.inside.bandwidth)
    return replace(one, inside=replace(one.inside, latency=latency, bandwidth=bandwidth), **means)


def median_by_number(records: Sequence[Any]) -> Any:
    """The median (of two records, the mean), number by number, of tuples and dicts with the same form."""
    first = records[0]
    if isinstance(first, dict):
        return {name: median_by_number([one[name] for one in records]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(median_by_number, zip(*records, strict=True)))
    return statistics.median(records)


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """A core's rates while the other cores compute, too. ``gemm``, ``copy`` and ``operation`` are as in
    ``Machine``; ``repeated``: the rates of one product before and after all other measurements."""

    gemm: dict[str, Rates]
    copy: Rates
    operation: float
    repeated: tuple[float, ...] = ()


def compute_rates(rank: int) -> ComputeRates:
    """Measure this core's rates while the other cores measure, too, because cores share memory in a step."""
    torch.set_num_threads(1)
    gemm = {}
    before = measure_products(torch.float32, REPEATED)[0][1]
    for dtype in (torch.bfloat16, torch.float32):
        dist.barrier()
        gemm[str(dtype).removeprefix("torch.")] = measure_products(dtype)
    dist.barrier()
    copy = measure_copies(cold=COLD // dist.get_world_size())
    dist.barrier()
    operation = measure_operation(gemm, copy)
    after = measure_products(torch.float32, REPEATED)[0][1]
    return ComputeRates(gemm, copy, operation, (before, after))


def measure_products(dtype: torch.dtype, sides: Sequence[int] = SIDES) -> Rates:
    """Operations per second of Newton–Schulz's products, for square matrices with each of these ``sides``.

    Each result goes to new memory, as in a step. With the same memory each time, products are a fifth faster.
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


def measure_copies(sizes: Sequence[int] = BYTES, cold: int = COLD) -> Rates:
    """Bytes read and written per second when a tensor is added to another, for several numbers of bytes.

    For each size, different tensors are used in turn, up to ``cold`` bytes in all. So the caches are cold, as
    when a step reads its gradients, momentum and parameters.
    """
    there, added = torch.ones(2, max(cold // 8, max(sizes) // 12)).unbind()
    rates: list[tuple[float, float]] = []
    for size in sizes:
        each = size // 12
        starts = range(0, there.numel() - each + 1, each)[:MOST_PAIRS]
        pairs = cycle([(there[start : start + each], added[start : start + each]) for start in starts])
        rates.append((float(size), 12 * each / _seconds(partial(_add_next, pairs))))
    return tuple(rates)


def _add_next(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    a, b = next(pairs)
    a.add_(b, alpha=0.5)


def measure_operation(gemm: dict[str, Rates], copy: Rates) -> float:
    """Seconds that each operation takes even with little data.

    A small step is timed, the seconds that ``gemm`` and ``copy`` predict for it are subtracted, and the rest
    is divided by the number of operations. Before each step other data is written, so that caches are cold,
    as after large products in a real step. With warm caches, operations start several times faster.
    """
    plan, at = replicated([Matrix(0, "m", (16, 16))], Grid.of(dp=1)), Grid.of(dp=1).at(0)
    work = Work(Machine("none", gemm, copy, 0.0, 0.0, Link(1.0, 0.0)))
    meta, real = (step_over_ones(plan, at, torch.device(device)) for device in ("meta", "cpu"))
    swept, seconds = torch.ones(SWEPT // 4), []
    with torch.no_grad():
        with work:
            LocalWorld(plan.grid).run([meta.walk()])
        for _ in range(SWEEPS):
            swept.add_(1)
            begin = time.perf_counter()
            LocalWorld(plan.grid).run([real.walk()])
            seconds.append(time.perf_counter() - begin)
    return max(0.0, statistics.median(seconds) - work.product - work.copy) / work.operations


def sample_gloo(rank: int, until: float = math.inf) -> list[RankSample]:
    """Time collectives of several kinds and sizes; begin none after ``until``. All ranks must call it."""
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh({"dp": dist.get_world_size()}))
    swept, samples = torch.ones(SWEPT // 4 // dist.get_world_size()), []
    for kind, size in product(KINDS, SENT):
        late = torch.tensor([float(time.perf_counter() > until)])
        if world.run(sum_over_grid(late, world.at, Label("time is up"))):  # true if time is up on any rank
            break
        samples.append(_sample(world, kind, size, swept))
    return samples


def _sample(world: LiveWorld, kind: Kind, size: int, swept: Tensor) -> RankSample:
    """Time rounds of a collective. Before each round, the ranks write other data (together ``SWEPT`` bytes),
    so that their caches are cold, as in a step. A barrier would not make them begin closer together."""
    request = gloo_request(kind, world.at, size)
    asked, answered = [], []
    for number in range(WARM + ROUNDS):
        swept.add_(1)
        begin = time.perf_counter()
        world.run(_once(request))
        if number >= WARM:
            asked.append(begin)
            answered.append(time.perf_counter())
    traffic = traffic_of(request, world.at, "gloo")
    return RankSample(traffic.busy, traffic.moved.data, tuple(asked), tuple(answered))


def _once(request: Collective) -> Walk:
    yield request


def gloo_request(kind: Kind, at: Coordinate, size: int) -> Collective:
    """A collective that moves about ``size`` bytes of fp32, as the engine would request it."""
    parts, here, each = at.size("dp"), at.position("dp"), size // 4 // at.size("dp")
    whole, label = each * parts, Label(kind)
    if kind == "all_to_all":  # a rank sends nothing to itself
        splits = tuple(0 if place == here else each for place in range(parts))
        send = torch.ones(sum(splits))
        return Collective(kind, ("dp",), send.dtype, send, sum(splits), label, None, splits, splits)
    root = 0 if kind in ("broadcast", "reduce") else None
    send = torch.ones(each if kind == "all_gather" else whole)
    receive = each if kind == "reduce_scatter" else 0 if kind == "reduce" and here != root else whole
    sends = kind != "broadcast" or here == root
    return Collective(kind, ("dp",), send.dtype, send if sends else None, receive, label, root)


@dataclass(frozen=True, slots=True)
class GlooCosts:
    """The costs of a collective: seconds per ``byte``, ``message``, round (``latency``) and request
    (``turn``). ``bandwidth``: how many bytes per second a rank can send and receive, added together."""

    byte: float
    message: float
    latency: float
    turn: float
    bandwidth: float


def fit_gloo(samples: Sequence[GlooSample], cores: int) -> GlooCosts:
    """Fit non-negative costs by least squares.

    Each squared error is divided by its sample's seconds, so long samples count more than they would with
    relative errors.

    Ranks share the cores. The processors' work takes the larger of two times: the sum of all ranks' work
    divided by the number of cores, or the busiest rank's work. A sample takes at least the time that a rank's
    link needs for its bytes. If no sample had more ranks than cores, the seconds per round include the
    seconds per message.
    """

    def shared(work: Sequence[int]) -> float:
        return max(max(work), sum(work) / cores)

    rows = []
    for sample in samples:
        data, messages = [one.busy.data for one in sample], [one.busy.messages_out for one in sample]
        rows.append([shared(data), shared(messages), max(messages), shared([1] * len(sample))])
    table = torch.tensor(rows, dtype=torch.float64)
    if all(len(sample) <= cores for sample in samples):
        table[:, 1] = 0.0
    moved = torch.tensor([max(one.moved for one in each) for each in samples], dtype=torch.float64)
    seconds = torch.tensor([took(sample) for sample in samples], dtype=torch.float64)
    found, least = GlooCosts(0.0, 0.0, 0.0, 0.0, ENDLESS), float("inf")
    for bandwidth in BANDWIDTHS:
        costs = _fit_beside_link(table, moved / bandwidth, seconds)
        link = moved / bandwidth  # the slower of processors and link determines a sample's seconds
        off = table[:, 2:] @ costs[2:] + torch.maximum(table[:, :2] @ costs[:2], link) - seconds
        error = float((off.square() / seconds).sum() / seconds.sum())
        if error < least - NO_BETTER:
            byte, message, latency, turn = costs.tolist()
            found, least = GlooCosts(byte, message, latency, turn, bandwidth), error
    return found


def _fit_beside_link(table: Tensor, link: Tensor, seconds: Tensor) -> Tensor:
    """Fit the costs. ``link``: each sample's seconds on the link. Samples that wait for the link say
    nothing about processors."""
    waits = torch.zeros(len(table), dtype=torch.bool)
    costs = torch.zeros(table.shape[1], dtype=table.dtype)
    for _ in range(REFITS):
        columns, due, weight = table.clone(), seconds.clone(), seconds.sqrt()
        columns[waits, :2] = 0.0
        due[waits] -= link[waits]
        costs = torch.tensor(_fit_above_zero(columns / weight[:, None], due / weight), dtype=table.dtype)
        before, waits = waits, link > table[:, :2] @ costs[:2]
        if bool((waits == before).all()):
            break
    return costs


def _fit_above_zero(rows: Tensor, due: Tensor) -> list[float]:
    """The non-negative coefficients with which the sum of the columns comes closest to ``due``. Every subset
    of the columns is fitted by least squares, and the best fit without a negative coefficient is returned."""
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
    """Median seconds of a run: run for ``at_least`` seconds, or up to four times as long to get five runs."""
    run()
    found: list[float] = []
    start = now = time.perf_counter()
    while now < start + at_least or (len(found) < 5 and now < start + 4 * at_least):
        begin = now
        run()
        now = time.perf_counter()
        found.append(now - begin)
    return statistics.median(found)
