"""Estimates what a step of each strategy costs for a model on a grid, before anything runs.

All numbers come from the package's own step: a plan is made, one rank of each kind walks each round on the
meta device, and clocks of all ranks show which ranks wait. Experts have another grid than dense matrices,
because their dp is smaller by the factor ep. A rank first steps the dense matrices, then the experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Label, Walk
from ..engine.travel import all_reduce, travel
from ..evidence.memory import plan_memory
from ..newton_schulz import DEFAULT_STEPS
from ..plan.assign import newton_schulz_cost
from ..plan.bucket import Bucket, padded
from ..plan.exchange import LocalShards
from ..plan.grid import Coordinate, Grid
from ..plan.layout import Hop, Partial, Replicate, Route, Shard
from ..plan.matrix import Matrix
from ..plan.strategies import (
    ROUND_BYTES,
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
from .clocks import Speed, run_alone, run_clocks
from .machine import Machine
from .rank_walks import PricedRequest, RankWalks, Trace

ROUND_LIMIT = "round_bytes"
"""The name of the strategies' option that limits a round's bytes."""
GRADIENTS = ("gradient reduce", "gradient all_reduce")
"""The beginnings of the names of phases that average gradients."""
OWN = Speed(free=GRADIENTS)
"""The links have the machine's own speed, but averaging gradients takes no time."""
DDP_BUCKET_BYTES = 25_000_000
"""About DDP's default. Estimates ignore that DDP's first bucket is smaller, and leave out embeddings."""
SHARDING = "dp_shard"
"""The axis along which FSDP2 cuts parameters; ``dp`` then counts replicas."""
RootOf = Callable[[int], int]
"""Maps a root in a trace to the root in the bucket that uses the trace. If the trace was made for this
bucket, this is ``int``, which changes nothing."""

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
"""The strategies if nothing is cut over tp. ``gram`` is missing: it would be the same as ``layerwise``."""
SHARDED: Mapping[str, Builder] = {"owner": owner, "owner_per_replica": owner_per_replica}
"""The strategies for parameters that FSDP2 cuts along ``dp_shard``."""


def gather_all(matrices: Sequence[Matrix], grid: Grid, **options: Any) -> Plan:
    """The plan of a loop over ``full_tensor()``: every rank gathers and orthogonalizes every matrix."""
    plan = owner_per_replica(matrices, grid, **options)
    return replace(plan, strategy="gather_all", buckets=tuple(map(partial(_everywhere, grid), plan.buckets)))


def _everywhere(grid: Grid, bucket: Bucket) -> Bucket:
    """A bucket in which every rank gathers each matrix separately, along its cut axes, innermost first."""
    at, everyone = grid.at(0), range(grid.size("dp"))

    def route(matrix: Matrix) -> Route:
        hops = []
        for number in reversed(range(len(matrix.cuts))):
            axis, cut = matrix.cuts[number]
            outside = replace(matrix, cuts=matrix.cuts[:number]).box(at).shape
            hops.append(Hop(axis, cut, Replicate(), outside))
        return Route(tuple(hops), bucket.compute.dtype)

    entries = tuple(replace(it, workers=everyone, route=route(it.matrix)) for it in bucket.entries)
    stay = Route((), bucket.compute.dtype)
    return replace(bucket, axes=("dp",), entries=entries, compute_layout=LocalShards(), compute=stay)


GATHER_ALL: Mapping[str, Builder] = {"gather_all": gather_all}
"""The baseline under FSDP2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """The costs of a step on the rank that computes most: seconds, bytes, and ``newton_schulz`` operations.

    Muon's own seconds have four parts. ``product``: the matrix products of Newton–Schulz. ``copy``: all other
    computation. ``others``: waiting for ranks that have more to do. ``exposed``: waiting for bytes.
    ``reduction``: the seconds that averaging gradients adds if backward hides none of it. Gradients are
    averaged by the step's own reduce_scatter. If a strategy expects averaged gradients, they are averaged by
    DDP's all_reduce, or by FSDP2's reduce_scatter and all_reduce between replicas. AdamW needs the averages,
    too.

    ``runs``: how many matrices the rank orthogonalizes. ``fair_shares``: the rank's work, relative to an even
    share among the positions of the plan's group. ``shares``: the rank's work, relative to an even share
    among all ranks of the grid. ``held``: bytes of the matrices' parameters and gradients; ``momentum``:
    their momentum; ``master``: master weights; ``peak``: the largest number of bytes that a step adds on any
    rank; ``fsdp``: what FSDP2 or DDP adds while it averages gradients. ``phases`` holds the bytes that the
    rank sends, by phase. ``between``: how many of these bytes leave its node.
    """

    strategy: str
    product: float
    copy: float
    others: float = 0.0
    exposed: float
    reduction: float
    latency: float
    newton_schulz: int = 0
    runs: int = 0
    buckets: int
    fair_shares: float = 0.0
    shares: float = 0.0
    held: int
    momentum: int
    peak: int
    phases: Mapping[str, int]
    between: int = 0
    fsdp: int = 0
    master: int = 0
    flights: tuple[tuple[PricedRequest, int], ...] = field(default=(), repr=False)
    at_factor: tuple[Callable[[float], float], ...] = field(default=(), repr=False)

    @property
    def own(self) -> float:
        """Seconds of the step if backward hides the averaging of gradients completely."""
        return self.product + self.copy + self.others + self.exposed

    @property
    def waiting(self) -> float:
        """Seconds that the rank waits: for other ranks, for bytes, and for gradients."""
        return self.others + self.exposed + self.reduction

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, if backward hides none of the averaging of gradients."""
        return self.own + self.reduction

    @property
    def sent(self) -> int:
        return sum(self.phases.values())

    @property
    def memory(self) -> int:
        """Bytes that the rank needs for the matrices, at the worst moment of a step."""
        return self.held + self.momentum + max(self.peak, self.fsdp)

    def seconds_at(self, factor: float) -> float:
        """Seconds that the step would take if all links were ``factor`` times as fast."""
        return sum(seconds(factor) for seconds in self.at_factor)


def estimate(
    name: str,
    builder: Builder,
    matrices: Sequence[Matrix],
    grid: Grid,
    machine: Machine,
    *,
    round_bytes: int = ROUND_BYTES,
    walks: RankWalks | None = None,
) -> StepEstimate:
    """The cost of a strategy's step on a grid.

    ``walks``: earlier walks for the same machine, to use again.
    """
    plan = builder(matrices, grid, **{ROUND_LIMIT: round_bytes})
    beside = min(machine.ranks_per_node, grid.world_size) - 1
    return estimate_plan(name, plan, walks or RankWalks(machine, beside))


def estimate_plan(name: str, plan: Plan, walks: RankWalks, window: int = 1) -> StepEstimate:
    """Estimate the cost of a plan's step. The estimate's ``strategy`` is ``name``."""
    at, walked = busiest(plan), walks.rounds(plan)
    place = at.position(*walked.axes)
    mine = [(one.traces[one.kinds[walked.at(place)]], one.root) for its in walked.rounds for one in its]
    asks = [(walks.agreement(plan), 1)]
    averages = _averages(plan, at, walks) if plan.expects == "averaged" else []
    around, averaging = run_alone(asks), run_alone(averages)
    computed = run_alone([(trace, 1) for trace, _ in mine], OWN)
    timed = run_clocks(walked, (OWN, Speed()) if plan.expects == "local" else (OWN,), window, place)
    own, whole = timed.seconds[0], timed.seconds[-1]
    worked = [e for b in plan.buckets for e in b.entries if b.works_on(e, at)]
    work = sum(entry.cost for entry in worked)
    once = sum(newton_schulz_cost(e.matrix.sides) for b in plan.buckets for e in b.entries)
    traces: list[tuple[Trace, int, RootOf]] = [(trace, n, int) for trace, n in (*asks, *averages)]
    traces += [(trace, 1, root_of) for trace, root_of in mine]
    held = plan_memory(plan, at)
    root_copies = sum(  # copies of tensors that the rank broadcasts as the root
        turn.asked.root_copy
        for trace, root_of in mine
        for turn in trace
        if turn.asked is not None
        and turn.root is not None
        and root_of(turn.root) == at.position(*turn.asked.axes)
    )

    clocked = {1.0: whole}

    @cache
    def at_factor(factor: float) -> float:
        if factor not in clocked:  # callers who ask for half the speed often ask for twice the speed
            speeds = Speed(factor), Speed(1 / factor)
            clocked.update(zip((factor, 1 / factor), run_clocks(walked, speeds, window).seconds, strict=True))
        speed = Speed(factor)
        return clocked[factor] + run_alone(asks, speed).seconds + run_alone(averages, speed).seconds

    return StepEstimate(
        strategy=name,
        product=computed.product,
        copy=computed.copy + around.copy + root_copies,
        others=timed.others + own - timed.ended,
        exposed=timed.exposed + around.exposed,
        reduction=whole - own + averaging.seconds,
        latency=computed.latency + around.latency + averaging.latency,
        newton_schulz=DEFAULT_STEPS * work,
        runs=len(worked),
        buckets=len(plan.buckets),
        fair_shares=work * at.size(*walked.axes) / once if once else 0.0,
        shares=work * plan.grid.world_size / once if once else 0.0,
        held=held.parameters + held.gradients,
        momentum=held.momentum,
        peak=timed.peak,
        fsdp=averaging.peak,
        at_factor=(at_factor,),
        **_sent(traces, at),
    )


def _sent(walked: Iterable[tuple[Trace, int, RootOf]], at: Coordinate) -> dict[str, Any]:
    """A rank's bytes by phase, its bytes that leave the node, and how often it makes each request.

    Each trace comes with two things: how often it is walked, and the function for its roots.
    """
    flights: Counter[PricedRequest] = Counter()
    phases: Counter[str] = Counter()
    between = 0
    for trace, times, root_of in walked:
        for turn in trace:
            if (asked := turn.asked) is None:
                continue
            sent = asked.sent
            if asked.passed and turn.root is not None:
                root = root_of(turn.root)
                sent = asked.sends(at.position(*asked.axes), at.size(*asked.axes), root)
            flights[asked] += times
            phases[asked.label.phase] += times * sent
            between += times * asked.between if sent else 0
    return {"phases": dict(phases), "between": between, "flights": tuple(flights.items())}


def _averages(plan: Plan, at: Coordinate, walks: RankWalks) -> list[tuple[Trace, int]]:
    """Return the walks that average gradients before a step, and how often each walk is needed."""
    if at.size("dp", SHARDING) == 1:
        return []
    dtype = plan.buckets[0].entries[0].matrix.grad_dtype
    lengths = averaged_at_once(plan, at).items()
    return [(walks.trace(_average(n, dtype, at), at), times) for n, times in lengths if n * times]


def averaged_at_once(plan: Plan, at: Coordinate) -> Counter[int]:
    """The numbers of gradient elements that are averaged together before a step, and how often each occurs.

    DDP's buckets are assumed to have 25 MB. FSDP2 reduces a layer at a time, and each rank keeps its shard.
    """
    lengths = [  # gradients of matrices that are sharded over dp are already reduced
        sum(e.matrix.box(at).numel for e in bucket.entries if e.matrix.cut("dp") is None)
        for bucket in plan.buckets
    ]
    shards = at.size(SHARDING)
    most = DDP_BUCKET_BYTES // plan.buckets[0].entries[0].matrix.grad_dtype.itemsize
    if shards > 1:
        layers: Counter[str] = Counter()
        for bucket in plan.buckets:
            for entry in bucket.entries:
                layers[_layer_of(entry.matrix.name)] += entry.matrix.numel
        most = max(1, max(layers.values(), default=0) // (shards * at.size("tp")))
    times, rest = divmod(sum(lengths), most)
    return Counter({most: times, rest: 1})


def _layer_of(name: str) -> str:
    """The name of the layer that FSDP2 wraps: a matrix's name up to its first number, or all of it.

    >>> _layer_of("layers.11.attention.q")
    'layers.11'
    """
    found = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return found[0] if found else name


def _average(length: int, dtype: torch.dtype, at: Coordinate) -> Walk:
    """Average gradients before a step. The bucket has ``length`` elements on a rank.

    DDP makes an all_reduce. FSDP2 makes a reduce_scatter, then an all_reduce between replicas. Returns the
    gradient.
    """
    shards, by = at.size(SHARDING), "DDP" if at.size(SHARDING) == 1 else "FSDP2"
    flat = torch.empty(length * shards, dtype=dtype, device="meta")
    if shards > 1:
        out = Route((Hop(SHARDING, Partial(), Shard(0), (length * shards,)),), dtype)
        flat = yield from travel(flat, out, at, Label(f"gradient reduce_scatter, by {by}"))
    if at.size("dp") > 1:
        flat = yield from all_reduce(flat, "dp", at, Label(f"gradient all_reduce, by {by}"))
    return flat


def busiest(plan: Plan) -> Coordinate:
    """The coordinate of a rank with the most Newton–Schulz work."""
    work = work_by_position(plan)
    axes = plan.buckets[0].axes if plan.buckets else ()
    return plan.grid.at(0).peer(work.index(max(work)) if work else 0, *axes)


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
    """The cost of AdamW's step, in the form that ``estimate`` gives for Muon.

    ``lengths``: the number of elements of each bucket on a rank. AdamW runs under FSDP2 on a grid with
    ``dp_shard``, otherwise as in ZeRO-1 if ``sharded``, else as under DDP. As for Muon, the parameters that
    FSDP2 gathers in forward and backward are not counted. ``momentum`` holds both moments, always in fp32.
    """
    walks, at, fsdp2 = RankWalks(machine, beside), grid.at(0), grid.size(SHARDING) > 1
    parts = grid.size("dp") if sharded and not fsdp2 else 1
    counted, dtypes = Counter(lengths), (p, torch.float32, torch.float32)
    traces: list[tuple[Trace, int]] = []
    for length, times in counted.items():
        whole = padded(length, parts)
        kept = [torch.empty(whole // parts, dtype=each, device="meta") for each in dtypes]
        walk = _adamw_bucket if sharded and not fsdp2 else _adamw_held
        traces.append((walks.trace(walk(whole, at, g, kept), at), times))
    elements = sum(times * (padded(length, parts) // parts) for length, times in counted.items())
    own, whole_step = run_alone(traces, OWN), run_alone(traces)
    return StepEstimate(
        strategy=f"AdamW, {'FSDP2' if fsdp2 else 'ZeRO-1' if sharded else 'DDP'}",
        product=own.product,
        copy=own.copy,
        exposed=own.exposed,
        reduction=whole_step.seconds - own.seconds,
        latency=whole_step.latency,
        buckets=counted.total(),
        held=sum(times * length for length, times in counted.items()) * (g.itemsize + p.itemsize),
        momentum=2 * torch.float32.itemsize * elements,
        peak=0 if fsdp2 else own.peak,
        fsdp=own.peak if fsdp2 else 0,
        at_factor=(lambda factor: run_alone(traces, Speed(factor)).seconds,),
        **_sent([(trace, times, int) for trace, times in traces], at),
    )


def _adamw_bucket(length: int, at: Coordinate, g: torch.dtype, kept: Sequence[Tensor]) -> Walk:
    """Pack and reduce gradients, run AdamW's operations on a slice, gather and unpack parameters.

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
    """Average gradients as DDP or FSDP2 does, and run AdamW's operations on everything that a rank holds."""
    grad = yield from _average(length, g, at)
    _adamw(grad, kept)


def _adamw(grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """Run AdamW's operations on parameters and their moments (``kept``). Returns the parameters."""
    param, mean, square = kept
    p = param.dtype
    param.mul_(1 - 3e-4)
    mean.lerp_(grad.to(mean.dtype), 0.1)
    square.mul_(0.999).addcmul_(grad, grad, value=0.001)
    return param.addcdiv_(mean.to(p), square.sqrt().add_(1e-8).to(p), value=-3e-4)


def together(parts: Sequence[StepEstimate]) -> StepEstimate:
    """Add up the estimates of several parts of a model, which are stepped one after the other."""
    work = sum(one.newton_schulz for one in parts)

    def added(name: str) -> Any:
        return sum(getattr(one, name) for one in parts)

    def over(name: str) -> float:
        fair = sum(one.newton_schulz / getattr(one, name) for one in parts if getattr(one, name))
        return work / fair if fair else 0.0

    sums = ("product", "copy", "others", "exposed", "reduction", "latency")
    counts = ("runs", "held", "momentum", "between", "master")
    return replace(
        parts[0],
        **{name: added(name) for name in (*sums, *counts)},
        newton_schulz=work,
        buckets=max(one.buckets for one in parts),
        fair_shares=over("fair_shares"),
        shares=over("shares"),
        peak=max(one.peak for one in parts),
        fsdp=max(one.fsdp for one in parts),
        phases=dict(sum((Counter(one.phases) for one in parts), Counter())),
        flights=tuple(flight for one in parts for flight in one.flights),
        at_factor=tuple(each for one in parts for each in one.at_factor),
    )
