"""Which strategy for which model on which grid: what a step costs, before anything runs.

Everything is read off the package's own step: a plan is made, and one rank walks it on the meta device, the
rank with the most to compute. Experts live on a grid of their own, since expert parallelism cuts data
parallelism: their plan is walked after that of the dense matrices, as a second step would be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch

from ..engine.collective import Label, Walk
from ..engine.travel import all_reduce
from ..errors import GridError
from ..evidence.memory import PeakMemory, plan_memory
from ..evidence.predict import step_over_ones
from ..plan.assign import newton_schulz_cost
from ..plan.bucket import Bucket
from ..plan.exchange import LocalShards
from ..plan.grid import Coordinate, Grid
from ..plan.matrix import Matrix
from ..plan.strategies import BUCKET_BYTES, Builder, Plan, layerwise, owner, replicated, round_robin, zero1
from ..step.rank_bucket import RankBucket
from ..step.step import PlanStep, step_bucket
from .machine import Machine
from .timed_world import TimedFlight, TimedWorld, travels

STEPS = 5  # Newton–Schulz iterations
ADAMW_BYTES = 4 * 7  # an element's gradient, two moments and parameter are read, the last three written

STRATEGIES: Mapping[str, Builder] = {
    "replicated": replicated,
    "round_robin": partial(round_robin, back="all_gather"),
    "zero1": zero1,
    "zero1, boundary": partial(zero1, gather="boundary"),
    "layerwise": layerwise,
    "owner": owner,
}


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step costs the rank that computes most. Seconds and bytes; ``newton_schulz`` in operations.

    ``runs`` is how many matrices it orthogonalizes, ``fair_shares`` its work over what each rank would do if
    every matrix were done once. ``phases`` holds the bytes that it sends, by phase;
    ``state`` what it keeps between steps, ``peak`` the most that a step adds to that. ``copy`` holds
    everything that is computed beside products. ``waiting`` is what communication leaves exposed. Where a
    strategy expects averaged gradients, DDP's all_reduce is counted with its step.
    """

    strategy: str
    product: float
    copy: float
    waiting: float
    newton_schulz: int
    runs: int
    buckets: int
    fair_shares: float
    state: int
    peak: int
    phases: Mapping[str, int]
    flights: tuple[tuple[TimedFlight, int], ...] = field(repr=False)
    machine: Machine = field(repr=False)

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.product + self.copy + self.waiting

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in a step."""
        return sum(self.phases.values())

    def seconds_at(self, factor: float) -> float:
        """The step's seconds were all links ``factor`` times as fast; for a window of one."""
        moving = sum(times * flight_seconds(one, self.machine, factor) for one, times in self.flights)
        return self.product + self.copy + moving


def flight_seconds(flight: TimedFlight, machine: Machine, factor: float = 1.0) -> float:
    """A collective that finds its links free, these ``factor`` times as fast."""
    (sent,) = flight.sent.values()
    moving = travels(sent, machine) / (flight.link.bandwidth * factor)
    sending = sent.data * machine.byte + sent.messages_out * machine.message
    return flight.latency + max(moving, sending)


def estimate(
    name: str,
    builder: Builder,
    matrices: Sequence[Matrix],
    grid: Grid,
    machine: Machine,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    window: int = 1,
) -> StepEstimate:
    """What a strategy's step costs on a grid, by a walk of its busiest rank."""
    plan = builder(matrices, grid, bucket_bytes=bucket_bytes)
    at = busiest(plan)
    step = step_over_ones(plan, at, torch.device("meta"), window, ns_steps=STEPS)
    walked = _walk_whole(step, machine) if window > 1 else _walk_buckets(step, machine)
    if plan.expects == "averaged" and grid.size("dp") > 1:
        lengths = Counter(bucket.length(LocalShards(), at) for bucket in plan.buckets)
        for length, times in lengths.items():
            walked.add(_average(length, plan.buckets[0].entries[0].matrix.grad_dtype, at), at, times)
    worked = [e.matrix for b in plan.buckets for e in b.entries if b.works_on(e, at)]
    work = sum(STEPS * _operations(matrix) for matrix in worked)
    fair = STEPS * sum(map(_operations, matrices)) / grid.world_size
    return StepEstimate(
        strategy=name,
        product=walked.product,
        copy=walked.copy,
        waiting=walked.waiting,
        newton_schulz=work,
        runs=len(worked),
        buckets=len(plan.buckets),
        fair_shares=work / fair if fair else 0.0,
        state=plan_memory(plan, at).momentum,
        peak=walked.peak,
        phases=walked.phases(at),
        flights=tuple(walked.flights),
        machine=machine,
    )


@dataclass(slots=True, eq=False)
class _Walked:
    """What walks of one rank took, with each flight as often as it was made."""

    machine: Machine
    product: float = 0.0
    copy: float = 0.0
    waiting: float = 0.0
    peak: int = 0
    flights: list[tuple[TimedFlight, int]] = field(default_factory=list)

    def add(self, walk: Walk, at: Coordinate, times: int = 1) -> None:
        with PeakMemory() as memory:
            ran = TimedWorld(at.grid, self.machine).run_alone(walk, at)
        self.product += times * ran.total("product", at.rank)
        self.copy += times * ran.total("copy", at.rank)
        self.waiting += times * ran.total("wait", at.rank)
        self.peak = max(self.peak, memory.peak)
        self.flights += [(flight, times) for flight in ran.flights]

    def phases(self, at: Coordinate) -> dict[str, int]:
        """Bytes that the rank sends, by phase."""
        found: Counter[str] = Counter()
        for flight, times in self.flights:
            found[flight.label.phase] += times * flight.sent[at.rank].data
        return dict(found)


def _average(length: int, dtype: torch.dtype, at: Coordinate) -> Walk:
    """What DDP does for a bucket of a plan that expects averaged gradients: an all_reduce."""
    mine = torch.empty(length, dtype=dtype, device="meta")
    yield from all_reduce(mine, "dp", at, Label("gradient all_reduce, by DDP"))


def _walk_whole(step: PlanStep, machine: Machine) -> _Walked:
    walked = _Walked(machine)
    walked.add(step.step(), step.at)
    return walked


def _walk_buckets(step: PlanStep, machine: Machine) -> _Walked:
    """Bucket by bucket, as a window of one does; those that are alike to this rank are walked once."""
    walked = _Walked(machine)
    walked.add(step.agree(), step.at)
    assert step.present is not None  # every parameter has a gradient
    alike: dict[Hashable, list[RankBucket]] = {}
    for bucket in step.buckets:
        alike.setdefault(_what_it_sees(bucket.plan, step.at), []).append(bucket)
    for first, *others in alike.values():
        walked.add(step_bucket(first, step.present), step.at, 1 + len(others))
    return walked


def _what_it_sees(bucket: Bucket, at: Coordinate) -> Hashable:
    """What of a bucket decides what a rank computes and sends."""
    layouts = (bucket.model_layout, bucket.storage_layout, bucket.compute_layout)
    held = [tuple(piece.box.numel for piece in bucket.buffer_slices(layout, at)) for layout in layouts]
    lengths = [bucket.length(layout, at) for layout in layouts]
    matrices = [
        (e.matrix.shape, e.matrix.cuts, e.matrix.dtype, e.matrix.grad_dtype, bucket.works_on(e, at))
        for e in bucket.entries
    ]
    shared = [len(e.workers) for e in bucket.entries]  # with how many others
    places = [_seen_from(at.position(*bucket.axes), e.workers, at.size(*bucket.axes)) for e in bucket.entries]
    return tuple(matrices), tuple(held), tuple(lengths), tuple(shared), tuple(places)


def _seen_from(here: int, workers: range, positions: int) -> int | None:
    """How far on the first worker is, where that may matter: who sends along a chain depends on its ends."""
    away = (workers.start - here) % positions
    return away if away in (0, 1, positions - 1) else None


def busiest(plan: Plan) -> Coordinate:
    """The coordinate of a rank with the most Newton–Schulz work."""
    loads: dict[tuple[str, ...], list[int]] = {}  # by position, as differences to the one before
    for bucket in plan.buckets:
        load = loads.setdefault(bucket.axes, [0] * (plan.grid.at(0).size(*bucket.axes) + 1))
        for entry in bucket.entries:
            work = _operations(entry.matrix)
            load[entry.workers.start] += work
            load[entry.workers.stop] -= work
    most, axes, position = 0, ("dp",), 0
    for each, load in loads.items():
        for place, work in enumerate(accumulate(load)):
            if work > most:
                most, axes, position = work, each, place
    return plan.grid.at(0).peer(position, *axes)


def _operations(matrix: Matrix) -> int:
    """Of one iteration; a stack's are those of all its matrices."""
    *stack, rows, columns = matrix.sides
    return newton_schulz_cost((rows, columns)) * (stack[0] if stack else 1)


def adamw_zero1(
    elements: int, grid: Grid, machine: Machine, *, bucket_bytes: int = BUCKET_BYTES, g: int = 4, p: int = 2
) -> float:
    """Seconds of ZeRO-1 AdamW's step over as many elements a tensor-parallel rank, on the same grid.

    Gradients are reduced and parameters gathered a bucket at a time, as ``zero1`` does; nothing overlaps.
    """
    dp = grid.size("dp")
    copying = machine.copy_seconds(ADAMW_BYTES * -(-elements // dp))
    if dp == 1:
        return copying
    link = machine.link(grid.at(0).group("dp"))
    buckets = max(1, -(-elements * g // bucket_bytes))
    latency = 2 * buckets * link.latency * min(dp - 1, 2 * (dp - 1).bit_length())
    return copying + elements * (g + p) * (dp - 1) / dp / link.bandwidth + latency


def compare(
    matrices: Sequence[Matrix],
    experts: Sequence[Matrix],
    grid: Grid,
    expert_grid: Grid,
    machine: Machine,
    expert_machine: Machine,
    *,
    strategies: Mapping[str, Builder] = STRATEGIES,
    bucket_bytes: int = BUCKET_BYTES,
    window: int = 1,
) -> list[StepEstimate]:
    """Every strategy's step over the dense matrices, and then over the experts, on their grids.

    Raises:
        GridError: there is no matrix.
    """
    jobs = [
        (part, its, on)
        for part, its, on in ((matrices, grid, machine), (experts, expert_grid, expert_machine))
        if part
    ]
    if not jobs:
        raise GridError("there is no matrix to plan for")
    return [
        _together([estimate(name, builder, *job, bucket_bytes=bucket_bytes, window=window) for job in jobs])
        for name, builder in strategies.items()
    ]


def _together(parts: Sequence[StepEstimate]) -> StepEstimate:
    """All of them, one after the other."""
    work = sum(one.newton_schulz for one in parts)
    fair = sum(one.newton_schulz / one.fair_shares for one in parts if one.fair_shares)
    return replace(
        parts[0],
        product=sum(one.product for one in parts),
        copy=sum(one.copy for one in parts),
        waiting=sum(one.waiting for one in parts),
        newton_schulz=work,
        runs=sum(one.runs for one in parts),
        buckets=max(one.buckets for one in parts),
        fair_shares=work / fair if fair else 0.0,
        state=sum(one.state for one in parts),
        peak=max(one.peak for one in parts),
        phases=dict(sum((Counter(one.phases) for one in parts), Counter())),
        flights=tuple(flight for one in parts for flight in one.flights),
    )
