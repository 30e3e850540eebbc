"""Which strategy for which model on which grid: what a step costs, before anything runs.

Everything is read off the package's own step: a plan is made, and one rank walks it on the meta device, the
rank with the most to compute. Experts live on a grid of their own, since expert parallelism cuts data
parallelism: their plan is walked after that of the dense matrices, as a second step would be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.travel import all_reduce, travel
from ..errors import GridError
from ..evidence.memory import PeakMemory, plan_memory
from ..evidence.predict import step_over_ones
from ..newton_schulz import DEFAULT_STEPS
from ..plan.assign import newton_schulz_cost
from ..plan.bucket import Bucket, padded
from ..plan.grid import Coordinate, Grid
from ..plan.layout import Hop, Partial, Replicate, Route, Shard
from ..plan.matrix import Matrix
from ..plan.strategies import (
    BUCKET_BYTES,
    Builder,
    Plan,
    gram,
    layerwise,
    owner,
    owner_per_replica,
    replicated,
    round_robin,
    work_by_position,
    zero1,
)
from ..step.rank_bucket import RankBucket
from ..step.step import PlanStep, step_bucket
from ..worlds.shadow import walk_alone
from .machine import Machine
from .timed_world import TimedFlight, TimedWorld, travels

SHARDING = "dp_shard"
"""The axis along which FSDP2 cuts parameters; ``dp`` then counts replicas."""

STRATEGIES: Mapping[str, Builder] = {
    "replicated": replicated,
    "round_robin": round_robin,
    "round_robin gather": partial(round_robin, back="all_gather"),
    "zero1": zero1,
    "zero1 boundary": partial(zero1, gather="boundary"),
    "layerwise": layerwise,
    "gram": gram,
    "owner": owner,
}
WITHOUT_TP: Mapping[str, Builder] = {name: each for name, each in STRATEGIES.items() if each is not gram}
"""Where nothing is cut over tp: ``gram`` is ``layerwise`` there."""
SHARDED: Mapping[str, Builder] = {"owner": owner, "owner_per_replica": owner_per_replica}
"""Where FSDP2 cuts parameters along ``dp_shard``: the strategies that take such parameters."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step costs the rank that computes most. Seconds and bytes; ``newton_schulz`` in operations.

    ``copy`` holds everything that is computed beside products, ``waiting`` what communication leaves exposed.
    Where a strategy expects averaged gradients, what averages them is counted with its step: DDP's
    all_reduce, or FSDP2's reduce_scatter and, between replicas, all_reduce. ``runs`` is how
    many matrices the rank orthogonalizes; ``fair_shares``, its work over what it would do if every matrix
    were done at one position and all had as much. ``held`` are parameters and gradients of the matrices,
    ``momentum`` what is kept beside them, ``peak`` the most that a step adds, a bucket by itself. ``phases``
    holds the bytes that the rank sends, by phase.
    """

    strategy: str
    product: float
    copy: float
    waiting: float
    newton_schulz: int
    runs: int
    buckets: int
    fair_shares: float
    held: int
    momentum: int
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

    @property
    def memory(self) -> int:
        """Bytes that the rank needs for the matrices, at the worst moment of a step."""
        return self.held + self.momentum + self.peak

    def seconds_at(self, factor: float) -> float:
        """The step's seconds were all links ``factor`` times as fast; for a window of one."""
        return self.seconds + change_at(factor, self.flights, self.machine)

    @property
    def latency(self) -> float:
        """Seconds of its waiting that no bandwidth shortens; for a window of one."""
        return sum(times * flight.latency for flight, times in self.flights)


Flights = Sequence[tuple[TimedFlight, int]]
"""Collectives of one rank, each with as often as it is made."""


def change_at(factor: float, flights: Flights, machine: Machine) -> float:
    """How many seconds longer collectives one after the other take on links ``factor`` times as fast."""
    return sum(
        times * (flight_seconds(one, machine, factor) - flight_seconds(one, machine))
        for one, times in flights
    )


def flight_seconds(flight: TimedFlight, machine: Machine, factor: float = 1.0) -> float:
    """A collective of a rank walked alone, were its link ``factor`` times as fast and its own."""
    (busy,), (moved,) = flight.busy.values(), flight.moved.values()
    carried = travels(busy if flight.link.duplex else moved, machine)
    moving = carried / (flight.link.bandwidth * factor)
    sending = busy.data * machine.byte + busy.messages_out * machine.message
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
    beside: int | None = None,
) -> StepEstimate:
    """What a strategy's step costs on a grid, by a walk of its busiest rank.

    ``beside`` are the other ranks of its node; all that fit of the grid, unless said.
    """
    plan = builder(matrices, grid, bucket_bytes=bucket_bytes)
    at = busiest(plan)
    step = step_over_ones(plan, at, torch.device("meta"), window)
    if beside is None:
        beside = min(machine.ranks_per_node, grid.world_size) - 1
    walked = _Walked(machine, beside)
    (_walk_whole if window > 1 else _walk_buckets)(walked, step)
    if plan.expects == "averaged" and grid.size("dp") * grid.size(SHARDING) > 1:
        for length, times in averaged_at_once(plan, at).items():
            if length:
                walked.add(_average(length, plan.buckets[0].entries[0].matrix.grad_dtype, at), at, times)
    worked = [e for b in plan.buckets for e in b.entries if b.works_on(e, at)]
    work = sum(entry.cost for entry in worked)
    fair = sum(newton_schulz_cost(e.matrix.sides) / at.size(*b.axes) for b in plan.buckets for e in b.entries)
    held = plan_memory(plan, at)
    return StepEstimate(
        strategy=name,
        product=walked.product,
        copy=walked.copy,
        waiting=walked.waiting,
        newton_schulz=DEFAULT_STEPS * work,
        runs=len(worked),
        buckets=len(plan.buckets),
        fair_shares=work / fair if fair else 0.0,
        held=held.parameters + held.gradients,
        momentum=held.momentum,
        peak=walked.peak,
        phases=walked.phases(at),
        flights=tuple(walked.flights),
        machine=machine,
    )


@dataclass(slots=True, eq=False)
class _Walked:
    """What walks of one rank took, with each flight as often as it was made."""

    machine: Machine
    beside: int
    product: float = 0.0
    copy: float = 0.0
    waiting: float = 0.0
    peak: int = 0
    flights: list[tuple[TimedFlight, int]] = field(default_factory=list)

    def add(self, walk: Walk, at: Coordinate, times: int = 1) -> None:
        """Walk, and count that so many times."""
        with PeakMemory() as memory:
            ran = TimedWorld(at.grid, self.machine).run_alone(walk, at, self.beside)
        self.product += times * ran.total("product", at.rank)
        self.copy += times * ran.total("copy", at.rank)
        self.waiting += times * ran.total("wait", at.rank)
        self.peak = max(self.peak, memory.peak)
        self.flights += [(flight, times) for flight in ran.flights]

    @property
    def seconds(self) -> float:
        """All of them, one after the other."""
        return self.product + self.copy + self.waiting

    def phases(self, at: Coordinate) -> dict[str, int]:
        """Bytes that the rank sends, by phase."""
        found: Counter[str] = Counter()
        for flight, times in self.flights:
            found[flight.label.phase] += times * flight.sent[at.rank].data
        return dict(found)


def _whole_over_dp(bucket: Bucket, at: Coordinate) -> int:
    """Elements of a bucket that DDP averages. What is sharded over dp, its framework reduces in backward."""
    return sum(e.matrix.box(at).numel for e in bucket.entries if e.matrix.cut("dp") is None)


def averaged_at_once(plan: Plan, at: Coordinate) -> Counter[int]:
    """How often gradients of how many elements are averaged together before a step.

    DDP has buckets as large as Muon's. FSDP2 reduces what it wraps: a layer, of which each rank keeps its
    shard.
    """
    lengths = [_whole_over_dp(bucket, at) for bucket in plan.buckets]
    shards = at.size(SHARDING)
    if shards == 1:
        return Counter(lengths)
    layers: Counter[str] = Counter()
    for bucket in plan.buckets:
        for entry in bucket.entries:
            layers[_layer_of(entry.matrix.name)] += entry.matrix.numel
    layer = max(1, max(layers.values(), default=0) // (shards * at.size("tp")))
    times, rest = divmod(sum(lengths), layer)
    return Counter({layer: times, rest: 1})


def _layer_of(name: str) -> str:
    """What FSDP2 wraps: what a number counts; a matrix of its own where there is none.

    >>> _layer_of("layers.11.attention.q")
    'layers.11'
    """
    found = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return found[0] if found else name


def _average(length: int, dtype: torch.dtype, at: Coordinate) -> Walk:
    """What averages gradients before a step, for a bucket of which a rank holds ``length`` elements.

    DDP's all_reduce; under FSDP2 a reduce_scatter, and an all_reduce between replicas. Returns the gradient.
    """
    shards, by = at.size(SHARDING), "DDP" if at.size(SHARDING) == 1 else "FSDP2"
    flat = torch.empty(length * shards, dtype=dtype, device="meta")
    if shards > 1:
        out = Route((Hop(SHARDING, Partial(), Shard(0), (length * shards,)),), dtype)
        flat = yield from travel(flat, out, at, Label(f"gradient reduce_scatter, by {by}"))
    if at.size("dp") > 1:
        flat = yield from all_reduce(flat, "dp", at, Label(f"gradient all_reduce, by {by}"))
    return flat


def _walk_whole(walked: _Walked, step: PlanStep) -> None:
    walked.add(step.step(), step.at)


def _walk_buckets(walked: _Walked, step: PlanStep) -> None:
    """Bucket by bucket, as a window of one does; those that are alike to this rank are walked once.

    Memory that stays between buckets, and steps, is made first: it counts beside every bucket's peak.
    """
    walked.add(step.agree(), step.at)
    assert step.present is not None  # every parameter has a gradient
    alike: dict[Hashable, list[RankBucket]] = {}
    for bucket in step.buckets:
        alike.setdefault(_what_it_sees(bucket.plan, step.at, walked.machine), []).append(bucket)
    for first, *_ in alike.values():
        if any(entry.gram for entry in first.plan.entries):
            with torch.no_grad():
                walk_alone(step_bucket(first, step.present), lambda request: None)
    for first, *others in alike.values():
        walked.add(step_bucket(first, step.present), step.at, 1 + len(others))
    walked.peak += max((bucket.workspace.nbytes() for bucket in step.buckets), default=0)


def _what_it_sees(bucket: Bucket, at: Coordinate, machine: Machine) -> Hashable:
    """What of a bucket decides what a rank computes and sends."""
    layouts = (bucket.model_layout, bucket.storage_layout, bucket.compute_layout)
    held = [tuple(piece.box.numel for piece in bucket.buffer_slices(layout, at)) for layout in layouts]
    lengths = [bucket.length(layout, at) for layout in layouts]
    entries = [
        (
            e.matrix.shape,
            e.matrix.cuts,
            e.matrix.dtype,
            e.matrix.grad_dtype,
            bucket.works_on(e, at),
            len(e.workers),
        )
        for e in bucket.entries
    ]
    places = [_seen_from(at, bucket.axes, e.workers.start, machine) for e in bucket.entries]
    return tuple(entries), tuple(held), tuple(lengths), tuple(places)


def _seen_from(at: Coordinate, axes: tuple[str, ...], worker: int, machine: Machine) -> Hashable:
    """What of a matrix' first worker's place may matter to a rank.

    Whether they stand in one line, since a piece that several ranks hold is sent by the one in the worker's;
    and whether they are neighbours, at the ends of a chain. In Gloo's trees every distance matters.
    """
    away, positions = worker - at.position(*axes), at.size(*axes)
    if machine.algorithm == "gloo":
        return away % positions
    other = at.peer(worker, *axes)
    lines = tuple(other[axis] == at[axis] for axis in at.grid.axes)
    return lines, away % positions if away % positions in (0, 1, positions - 1) else None


def busiest(plan: Plan) -> Coordinate:
    """The coordinate of a rank with the most Newton–Schulz work."""
    work = work_by_position(plan)
    axes = plan.buckets[0].axes if plan.buckets else ()
    return plan.grid.at(0).peer(work.index(max(work)) if work else 0, *axes)


def adamw_zero1(
    lengths: Iterable[int],
    grid: Grid,
    machine: Machine,
    *,
    g: torch.dtype = torch.float32,
    p: torch.dtype = torch.bfloat16,
    beside: int = 0,
) -> float:
    """Seconds of ZeRO-1 AdamW's step over buckets of so many elements, on the same grid; nothing overlaps."""
    return estimate_adamw(lengths, grid, machine, g=g, p=p, beside=beside).seconds


def estimate_adamw(
    lengths: Iterable[int],
    grid: Grid,
    machine: Machine,
    *,
    g: torch.dtype = torch.float32,
    p: torch.dtype = torch.bfloat16,
    beside: int = 0,
    sharded: bool = True,
) -> StepEstimate:
    """What AdamW's step costs over buckets of so many elements a rank holds, as ``estimate`` says of Muon's.

    ZeRO-1's; on a grid with ``dp_shard`` FSDP2's, which gathers parameters in forward and backward whatever
    steps them: that is not counted here, nor with Muon's strategies. Where it is not ``sharded``, DDP's.
    ``momentum`` holds both moments, of fp32 whatever the parameters are.
    """
    walked, at, fsdp2 = _Walked(machine, beside), grid.at(0), grid.size(SHARDING) > 1
    parts = grid.size("dp") if sharded and not fsdp2 else 1
    counted, dtypes = Counter(lengths), (p, torch.float32, torch.float32)
    for length, times in counted.items():
        whole = padded(length, parts)
        kept = [torch.empty(whole // parts, dtype=each, device="meta") for each in dtypes]
        walk = _adamw_bucket if sharded and not fsdp2 else _adamw_held
        walked.add(walk(whole, at, g, kept), at, times)
    elements = sum(times * (padded(length, parts) // parts) for length, times in counted.items())
    return StepEstimate(
        strategy=f"AdamW, {'FSDP2' if fsdp2 else 'ZeRO-1' if sharded else 'DDP'}",
        product=walked.product,
        copy=walked.copy,
        waiting=walked.waiting,
        newton_schulz=0,
        runs=0,
        buckets=counted.total(),
        fair_shares=0.0,
        held=sum(times * length for length, times in counted.items()) * (g.itemsize + p.itemsize),
        momentum=2 * torch.float32.itemsize * elements,
        peak=walked.peak,
        phases=walked.phases(at),
        flights=tuple(walked.flights),
        machine=machine,
    )


def _adamw_bucket(length: int, at: Coordinate, g: torch.dtype, kept: Sequence[Tensor]) -> Walk:
    """Gradients packed and reduced, AdamW's operations on a slice, parameters gathered and unpacked.

    ``kept`` stays between steps: the slices of parameters and of both moments.
    """
    parts, p = at.size("dp"), kept[0].dtype
    flat = torch.empty(length, dtype=g, device="meta")
    flat.copy_(flat)
    out = Route((Hop("dp", Partial(), Shard(0), (length,)),) if parts > 1 else (), g)
    back = Route((Hop("dp", Shard(0), Replicate(), (length,)),) if parts > 1 else (), p)
    grad = yield from travel(flat, out, at, Label("gradient reduce_scatter"))
    del flat
    grad.div_(parts)
    whole = yield from travel(_adamw(grad, kept), back, at, Label("parameter all_gather"))
    whole.copy_(whole)


def _adamw_held(length: int, at: Coordinate, g: torch.dtype, kept: Sequence[Tensor]) -> Walk:
    """Gradients averaged as DDP or FSDP2 does, and AdamW's operations on all that a rank holds."""
    grad = yield from _average(length, g, at)
    _adamw(grad, kept)


def _adamw(grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """AdamW's operations on parameters, whose moments are ``kept`` with them. Returns the parameters."""
    param, mean, square = kept
    p = param.dtype
    param.mul_(1 - 3e-4)
    mean.lerp_(grad.to(mean.dtype), 0.1)
    square.mul_(0.999).addcmul_(grad, grad, value=0.001)
    return param.addcdiv_(mean.to(p), square.sqrt().add_(1e-8).to(p), value=-3e-4)


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
    beside: int | None = None,
) -> list[StepEstimate]:
    """Every strategy's step over the dense matrices, and then over the experts, on their grids.

    Each part is that of its own busiest rank, which need not be the same one.

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
        _together(
            [
                estimate(name, builder, *job, bucket_bytes=bucket_bytes, window=window, beside=beside)
                for job in jobs
            ]
        )
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
        held=sum(one.held for one in parts),
        momentum=sum(one.momentum for one in parts),
        peak=max(one.peak for one in parts),
        phases=dict(sum((Counter(one.phases) for one in parts), Counter())),
        flights=tuple(flight for one in parts for flight in one.flights),
    )
