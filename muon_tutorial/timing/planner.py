"""Which strategy for which model on which grid: what a step costs, before anything runs.

Everything is read off the package's own step: a plan is made, one rank of each kind walks each round on the
meta device, and clocks of all ranks say who waits for whom. Experts live on a grid of their own, since expert
parallelism cuts data parallelism: their step follows that of the dense matrices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from .clocks import alone, run_clocks
from .machine import Machine
from .rank_walks import RankWalks, Trace
from .timed_world import TimedFlight

ROUND_LIMIT = "round_bytes"
"""The option of strategies that limits a round's bytes."""
GRADIENTS = ("gradient reduce", "gradient all_reduce")
"""How the phases begin that average gradients."""
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


def gather_all(matrices: Sequence[Matrix], grid: Grid, **options: Any) -> Plan:
    """What a loop over ``full_tensor()`` does: every rank gathers and orthogonalizes every matrix."""
    plan = owner_per_replica(matrices, grid, **options)
    return replace(plan, strategy="gather_all", buckets=tuple(map(partial(_everywhere, grid), plan.buckets)))


def _everywhere(grid: Grid, bucket: Bucket) -> Bucket:
    """A bucket whose matrices are gathered one by one, along the axes that cut them, the innermost first."""
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


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step costs. Seconds and bytes, of the rank that computes most; ``newton_schulz`` in operations.

    ``product`` are matrix products, so Newton–Schulz; ``copy``, all that is computed beside them; ``others``,
    waiting for ranks that have more to do; ``exposed``, waiting for bytes. Together they are Muon's own
    seconds. ``reduction`` is what averaging gradients adds where none of it is hidden in backward: the step's
    reduce_scatter, or, where a strategy expects averaged gradients, DDP's all_reduce, or FSDP2's
    reduce_scatter and, between replicas, all_reduce. AdamW pays it too.

    ``runs`` is how many matrices the rank orthogonalizes; ``fair_shares``, its work over what it would do if
    every matrix were done at one position and all had as much; ``shares``, its work over a fair share of all
    ranks. ``held`` are parameters and gradients of the matrices, ``momentum`` what is kept beside them,
    ``master`` master weights, ``peak`` the most that a step adds on any rank, ``fsdp`` what FSDP2 adds, or
    DDP, while it averages gradients.
    ``phases`` holds the bytes that the rank sends, by phase; of these, ``between`` leave its node.
    """

    strategy: str
    product: float
    copy: float
    others: float
    exposed: float
    reduction: float
    latency: float
    newton_schulz: int
    runs: int
    buckets: int
    fair_shares: float
    shares: float
    held: int
    momentum: int
    peak: int
    phases: Mapping[str, int]
    between: int = 0
    fsdp: int = 0
    master: int = 0
    flights: tuple[tuple[TimedFlight, int], ...] = field(default=(), repr=False)
    at_factor: tuple[Callable[[float], float], ...] = field(default=(), repr=False)

    @property
    def own(self) -> float:
        """The step where gradients are averaged in time, during backward."""
        return self.product + self.copy + self.others + self.exposed

    @property
    def waiting(self) -> float:
        """What the rank waits: for others, for bytes, and for gradients."""
        return self.others + self.exposed + self.reduction

    @property
    def seconds(self) -> float:
        """The whole step, with all of the gradients' reduction exposed."""
        return self.own + self.reduction

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in a step."""
        return sum(self.phases.values())

    @property
    def memory(self) -> int:
        """Bytes that the rank needs for the matrices, at the worst moment of a step."""
        return self.held + self.momentum + max(self.peak, self.fsdp)

    def seconds_at(self, factor: float) -> float:
        """The step's seconds, were all links ``factor`` times as fast."""
        return sum(seconds(factor) for seconds in self.at_factor)


def estimate(
    name: str,
    builder: Builder,
    matrices: Sequence[Matrix],
    grid: Grid,
    machine: Machine,
    *,
    round_bytes: int = ROUND_BYTES,
    window: int = 1,
    beside: int | None = None,
    walks: RankWalks | None = None,
) -> StepEstimate:
    """What a strategy's step costs on a grid: clocks of all ranks, of which one of each kind is walked.

    ``beside`` are the other ranks of a node; all that fit of the grid, unless said. ``walks`` are those made
    before, for the same machine and ranks beside.
    """
    plan = builder(matrices, grid, **{ROUND_LIMIT: round_bytes})
    walks = walks or RankWalks(machine, beside_on(grid, machine) if beside is None else beside)
    return estimate_plan(name, plan, walks, window)


def beside_on(grid: Grid, machine: Machine) -> int:
    """The other ranks of a node, where a grid is all there is."""
    return min(machine.ranks_per_node, grid.world_size) - 1


def estimate_plan(name: str, plan: Plan, walks: RankWalks, window: int) -> StepEstimate:
    """What the step of a plan costs; ``name`` is what it is called."""
    at, rounds = busiest(plan), walks.rounds(plan)
    axes = plan.buckets[0].axes
    sizes = tuple(plan.grid.size(axis) for axis in axes)
    run = partial(run_clocks, rounds, axes, sizes, window=window)
    own, place = run(without=GRADIENTS), at.position(*axes)
    asks = [walks.agreement(plan)]
    averages = _averages(plan, at, walks) if plan.expects == "averaged" else []
    around = run_clocks(alone(asks), (), ())
    averaging = run_clocks(alone(averages), (), ())
    whole = run().seconds if plan.expects == "local" else own.seconds + averaging.seconds
    worked = [e for b in plan.buckets for e in b.entries if b.works_on(e, at)]
    work = sum(entry.cost for entry in worked)
    once = sum(newton_schulz_cost(e.matrix.sides) for b in plan.buckets for e in b.entries)
    traces: list[tuple[Trace, Mapping[int, int]]] = [(trace, {}) for trace in (*asks, *averages)]
    traces += [(one.traces[one.kinds[place]], one.roots) for its in rounds for one in its]
    held = plan_memory(plan, at)

    def at_factor(factor: float) -> float:
        rest = (run_clocks(alone(part), (), (), factor=factor).seconds for part in (asks, averages))
        return run(factor=factor).seconds + sum(rest)

    return StepEstimate(
        strategy=name,
        product=float(own.product[place]),
        copy=float(own.copy[place] + around.copy[0]),
        others=float(own.others[place] + own.seconds - own.now[place]),
        exposed=float(own.exposed[place] + around.exposed[0]),
        reduction=whole - own.seconds,
        latency=float(own.latency[place] + around.latency[0] + averaging.latency[0]),
        newton_schulz=DEFAULT_STEPS * work,
        runs=len(worked),
        buckets=len(plan.buckets),
        fair_shares=work * at.size(*axes) / once if once else 0.0,
        shares=work * plan.grid.world_size / once if once else 0.0,
        held=held.parameters + held.gradients,
        momentum=held.momentum,
        peak=int(own.peak.max()),
        fsdp=int(averaging.peak.max()),
        at_factor=(at_factor,),
        **_sent(traces, place, at.size(*axes)),
    )


def _sent(
    traces: Iterable[tuple[Trace, Mapping[int, int]]], place: int = 0, parts: int = 1
) -> dict[str, Any]:
    """What the rank at a place of its group sends: bytes by phase, those that leave its node, collectives.

    With each trace come the roots that are meant by those that it names.
    """
    counted: Counter[int] = Counter()
    flights: dict[int, TimedFlight] = {}
    phases: Counter[str] = Counter()
    between = 0
    for trace, roots in traces:
        for turn in trace:
            if turn.flight is None:
                continue
            sent = turn.sent
            if turn.passed and turn.root is not None:
                sent = turn.sends(place, parts, roots.get(turn.root, turn.root))
            counted[id(turn)] += 1
            flights[id(turn)] = turn.flight
            phases[turn.flight.label.phase] += sent
            between += turn.between if sent else 0
    found = tuple((flight, counted[key]) for key, flight in flights.items())
    return {"phases": dict(phases), "between": between, "flights": found}


def _averages(plan: Plan, at: Coordinate, walks: RankWalks) -> list[Trace]:
    """Walks of what averages gradients before a step that expects them averaged."""
    if at.size("dp", SHARDING) == 1:
        return []
    dtype, found = plan.buckets[0].entries[0].matrix.grad_dtype, []
    for length, times in averaged_at_once(plan, at).items():
        found += [walks.trace(_average(length, dtype, at), at)] * times if length else []
    return found


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
    walks, at, fsdp2 = RankWalks(machine, beside), grid.at(0), grid.size(SHARDING) > 1
    parts = grid.size("dp") if sharded and not fsdp2 else 1
    counted, dtypes = Counter(lengths), (p, torch.float32, torch.float32)
    traces: list[Trace] = []
    for length, times in counted.items():
        whole = padded(length, parts)
        kept = [torch.empty(whole // parts, dtype=each, device="meta") for each in dtypes]
        walk = _adamw_bucket if sharded and not fsdp2 else _adamw_held
        traces += [walks.trace(walk(whole, at, g, kept), at)] * times
    elements = sum(times * (padded(length, parts) // parts) for length, times in counted.items())
    run = partial(run_clocks, alone(traces), (), ())
    own, whole_step = run(without=GRADIENTS), run()
    return StepEstimate(
        strategy=f"AdamW, {'FSDP2' if fsdp2 else 'ZeRO-1' if sharded else 'DDP'}",
        product=float(own.product[0]),
        copy=float(own.copy[0]),
        others=0.0,
        exposed=float(own.exposed[0]),
        reduction=whole_step.seconds - own.seconds,
        latency=float(whole_step.latency[0]),
        newton_schulz=0,
        runs=0,
        buckets=counted.total(),
        fair_shares=0.0,
        shares=0.0,
        held=sum(times * length for length, times in counted.items()) * (g.itemsize + p.itemsize),
        momentum=2 * torch.float32.itemsize * elements,
        peak=0 if fsdp2 else int(own.peak.max()),
        fsdp=int(own.peak.max()) if fsdp2 else 0,
        at_factor=(lambda factor: run(factor=factor).seconds,),
        **_sent([(trace, {}) for trace in traces]),
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


def together(parts: Sequence[StepEstimate]) -> StepEstimate:
    """The steps of several parts of a model, one after the other, as one."""
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
