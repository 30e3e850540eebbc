"""Turns a plan into an answer: a table of strategies, which one to take and why, and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import GridError, UsageError
from ..newton_schulz import DEFAULT_STEPS
from ..plan.assign import newton_schulz_cost
from ..plan.exchange import LocalShards
from ..plan.grid import Grid
from ..plan.layout import Shard
from ..plan.matrix import Matrix
from ..plan.strategies import ROUND_BYTES, Builder, Plan, owner_per_replica, zero1
from .machine import Machine
from .model_shape import ModelShape, stage_layers, stage_matrices
from .rank_walks import RankWalks
from .step_cost import (
    GATHER_ALL,
    ROUND_LIMIT,
    SHARDED,
    SHARDING,
    STRATEGIES,
    WITHOUT_TP,
    StepEstimate,
    averaged_at_once,
    estimate_adamw,
    estimate_plan,
    together,
)

if TYPE_CHECKING:
    from rich.table import Table

SECONDS = ("strategy", "step", "own", "products", "copies", "others", "bytes", "gradients", "×AdamW")
BYTES = ("strategy", "inside", "between", "shares", "held", "state", "peak", "averaging", "memory")
KEPT = ("held", "momentum", "master", "peak", "fsdp")
MOST_PLANNED = 131_072
"""The largest number of ranks on a grid; planning for so many takes half a minute for a small model."""
MOST_PLACED, MANY_PLACED = 5 * 10**8, 15 * 10**6
"""A plan keeps numbers for each pair of a matrix and a rank. With more than ``MOST_PLACED`` pairs, planning
is refused. From ``MANY_PLACED`` pairs on, it takes longer than half a minute."""
AXES = ("dp", "dp_shard", "tp", "ep", "pp")
PREDICTED = (
    "Seconds are computed from the machine's file; they have not been checked against measurements at this "
    "scale."
)
ROUNDS, WINDOWS = (1, 8, 64), (1, 2, 4)
"""The options that a search tries: multiples of the given ``round_bytes``, and windows."""
SEARCHED, CLOSE = 3, 1.02
"""How many of the most promising strategies are searched, and up to which ratio of their seconds two
strategies count as equally fast."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a rank's parameters, gradients, momentum and master weights.

    If ``momentum`` is None, it has the gradients' dtype. If ``master`` is None, there are no master weights.
    """

    param: torch.dtype = torch.bfloat16
    grad: torch.dtype = torch.float32
    momentum: torch.dtype | None = None
    master: torch.dtype | None = None

    def __str__(self) -> str:
        names = {"parameters": self.param, "gradients": self.grad, "momentum": self.momentum or self.grad}
        said = [f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in names.items()]
        master = "no" if self.master is None else str(self.master).removeprefix("torch.")
        return ", ".join([*said, f"{master} master weights"])


@dataclass(frozen=True, slots=True, eq=False)
class StagePart:
    """A stage's dense matrices, or its experts' matrices, with their grid.

    ``walks``: the walks of single ranks that were made so far.
    """

    matrices: Sequence[Matrix]
    grid: Grid
    walks: RankWalks

    @property
    def placed(self) -> int:
        """The number of pairs of a matrix and a rank."""
        return len(self.matrices) * self.grid.world_size

    def plan(self, builder: Builder, round_bytes: int) -> Plan:
        return builder(self.matrices, self.grid, **{ROUND_LIMIT: round_bytes})

    def adamw(self, round_bytes: int, sharded: bool = True) -> StepEstimate:
        """AdamW's step over these matrices, ``sharded`` as in ZeRO-1 or FSDP2, or replicated as under DDP."""
        at, first, walks = self.grid.at(0), self.matrices[0], self.walks
        if self.grid.size(SHARDING) > 1:
            lengths = [*averaged_at_once(self.plan(owner_per_replica, round_bytes), at).elements()]
        else:
            lengths = [one.length(LocalShards(), at) for one in self.plan(zero1, round_bytes).buckets]
        options: dict[str, Any] = {"g": first.grad_dtype, "p": first.dtype, "beside": walks.beside}
        return estimate_adamw(lengths, self.grid, walks.machine, sharded=sharded, **options)


@dataclass(frozen=True, slots=True)
class Choice:
    """Options of Muon, and the cost of its step with them."""

    builder: Builder
    round_bytes: int
    window: int
    estimate: StepEstimate

    @property
    def call(self) -> str:
        """The call that makes a Muon with these options."""
        builder: Any = self.builder
        options = dict(builder.keywords) if isinstance(builder, partial) else {}
        builder = builder.func if isinstance(builder, partial) else builder
        said = [f"{name}={value!r}" for name, value in options.items()]
        said.append(f"{ROUND_LIMIT}={self.round_bytes:_}")
        return f"Muon(params, strategy=partial({builder.__name__}, {', '.join(said)}), window={self.window})"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The cost of every strategy's step, for one pipeline stage of a model on a grid of a machine's ranks.

    ``adamw_parts``: the cost of AdamW's steps over the same matrices, sharded as in ZeRO-1 or, if
    ``dp_shard`` cuts parameters, as in FSDP2. ``adamw_ddp``: their cost under DDP; empty with ``dp_shard``.
    ``rest``: a rank's bytes for the parameters that AdamW steps (embeddings, head and norms), with their
    gradients, both moments and master weights. ``tokens``: the batch, or None.
    """

    shape: ModelShape
    sizes: dict[str, int]
    stage: int
    machine: Machine
    round_bytes: int
    window: int
    parts: tuple[StagePart, ...]
    builders: Mapping[str, Builder]
    estimates: tuple[StepEstimate, ...]
    adamw_parts: tuple[StepEstimate, ...] = ()
    adamw_ddp: tuple[StepEstimate, ...] = ()
    rest: int = 0
    dtypes: Dtypes = field(default_factory=Dtypes)
    tokens: int | None = None

    @property
    def adamw(self) -> float:
        return self.adamw_at(1.0)

    def memory(self, one: StepEstimate) -> int:
        """Bytes that a rank holds at a step's peak, for matrices, the rest of the model, and the step itself.

        Activations, and the parameters that FSDP2 gathers in forward and backward, are not counted.
        """
        return one.memory + one.master + self.rest

    @property
    def ranks(self) -> int:
        """The number of ranks in all pipeline stages."""
        return math.prod(size for axis, size in self.sizes.items() if axis != "ep")

    @property
    def training(self) -> float | None:
        """A lower bound on the seconds of a batch's forward and backward; None if the bound is not known.

        The bound counts six operations for each token and each matrix element that the token uses, at the
        machine's best rate for products, on all ranks. Attention's scores, embeddings, communication and
        idle stages are not counted.
        """
        if self.tokens is None or self.shape.active is None:
            return None
        best = max(rate for rates in self.machine.gemm.values() for _, rate in rates)
        return 6 * self.tokens * self.shape.active / (self.ranks * best)

    def adamw_at(self, factor: float, sharded: bool = True) -> float:
        """AdamW's seconds with links ``factor`` times as fast. If not ``sharded``, AdamW runs under DDP."""
        return sum(part.seconds_at(factor) for part in (self.adamw_parts if sharded else self.adamw_ddp))

    @property
    def fitting(self) -> list[StepEstimate]:
        """The strategies that fit in a rank's memory, the fastest first."""
        return sorted((one for one in self.offered if _fits(self, one)), key=lambda one: one.seconds)

    @property
    def offered(self) -> list[StepEstimate]:
        """The strategies that the package has, so not the baseline ``gather_all``."""
        return [one for one in self.estimates if one.strategy not in GATHER_ALL]

    @property
    def best(self) -> StepEstimate | None:
        """The fastest strategy that fits; if several are about as fast, the one with the least memory."""
        if not self.fitting:
            return None
        least = self.fitting[0].seconds
        close = [one for one in self.fitting if one.seconds <= CLOSE * least]
        return min(close, key=self.memory)

    def winner_at(self, factor: float) -> StepEstimate | None:
        """The fastest strategy that fits if links are ``factor`` times as fast; if several are equally fast,
        the first of them."""
        return min(self.fitting, key=lambda one: float(f"{one.seconds_at(factor):.9g}"), default=None)


def read_sizes(text: str) -> dict[str, int]:
    """Read a grid as it is typed on the command line.

    Raises:
        UsageError: the text is not a grid, or the grid has too many ranks.

    >>> read_sizes("dp=64,tp=8")
    {'dp': 64, 'dp_shard': 1, 'tp': 8, 'ep': 1, 'pp': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or len(size) > 18 or int(size) < 1:
            raise UsageError(f"a grid is typed as dp=64,tp=8 with the axes {', '.join(AXES)}; got {text!r}")
        sizes[axis] = int(size)
    ranks = math.prod(size for axis, size in sizes.items() if axis != "ep")
    if ranks > MOST_PLANNED:
        raise UsageError(f"a grid of {ranks:,} ranks; plans are made for up to {MOST_PLANNED:,}")
    return {axis: sizes.get(axis, 1) for axis in AXES}


def plan_model(
    shape: ModelShape,
    sizes: Mapping[str, int],
    machine: Machine,
    *,
    round_bytes: int = ROUND_BYTES,
    window: int = 1,
    tokens: int | None = None,
    strategies: Mapping[str, Builder] | None = None,
    dtypes: Dtypes | None = None,
) -> ModelPlan:
    """Plan for the pipeline stage that has the most to compute.

    Experts are replicated on dp × tp / ep positions, and each of them is whole (expert tensor parallelism 1
    in Megatron-LM's terms). With ``dp_shard``, FSDP2 cuts all matrices along that axis and dp counts
    replicas; experts are then cut over dp_shard × tp / ep. Without ``strategies``, every strategy that the
    grid allows is planned.

    Raises:
        GridError: the grid does not divide the model, there are too many pairs of a matrix and a rank, or
            there is no matrix.
    """
    sizes, dtypes = {axis: sizes.get(axis, 1) for axis in AXES}, dtypes or Dtypes()
    stage = busiest_stage(shape, sizes["pp"])
    parts = tuple(part for part in stage_parts(shape, sizes, stage, machine, dtypes) if part.matrices)
    if not parts:
        raise GridError("there is no matrix to plan for")
    for part in parts:
        if part.placed > MOST_PLACED:
            held, more = len(part.matrices), "ep or pp" if shape.experts else "pp"
            ranks = part.grid.world_size
            raise GridError(f"each of {ranks:,} ranks would hold {held:,} matrices; take more {more}")
    builders = strategies or strategies_on(sizes)
    estimates = [
        estimate_parts(name, [part.plan(builder, round_bytes) for part in parts], parts, window, dtypes)
        for name, builder in builders.items()
    ]
    ddp = tuple(part.adamw(round_bytes, False) for part in parts if sizes[SHARDING] == 1)
    return ModelPlan(
        shape,
        sizes,
        stage,
        machine,
        round_bytes,
        window,
        parts,
        builders,
        tuple(estimates),
        adamw_parts=tuple(with_dtypes(part.adamw(round_bytes), dtypes, 8) for part in parts),
        adamw_ddp=ddp,
        rest=_rest(shape, sizes, stage, dtypes),
        dtypes=dtypes,
        tokens=tokens,
    )


def say_if_long(shape: ModelShape, sizes: Mapping[str, int], machine: Machine) -> str:
    """A sentence to print before a plan that takes longer than half a minute; else empty.

    Raises:
        GridError: the grid does not divide the model.
    """
    parts = stage_parts(shape, sizes, busiest_stage(shape, sizes["pp"]), machine, Dtypes())
    placed = [part.placed for part in parts]
    if sum(placed) < MANY_PLACED or max(placed) > MOST_PLACED:  # planning refuses such a large plan
        return ""
    held, ranks = sum(len(part.matrices) for part in parts), parts[0].grid.world_size
    more = "a larger ep or pp" if shape.experts else "a larger pp"
    return f"Planning {held:,} matrices on {ranks:,} ranks takes over half a minute; {more} shortens it."


def estimate_parts(
    name: str, plans: Sequence[Plan], parts: Sequence[StagePart], window: int, dtypes: Dtypes
) -> StepEstimate:
    """The estimate of a strategy's step over dense matrices and then over experts, on their grids."""
    pairs = zip(plans, parts, strict=True)
    each = together([estimate_plan(name, plan, part.walks, window) for plan, part in pairs])
    itemsize = (dtypes.momentum or dtypes.grad).itemsize
    kept = replace(each, momentum=each.momentum // dtypes.grad.itemsize * itemsize)
    return with_dtypes(kept, dtypes, itemsize)


def with_dtypes(one: StepEstimate, dtypes: Dtypes, state: int) -> StepEstimate:
    """The estimate with the bytes of master weights, if there are any. ``state``: bytes of momentum per
    element."""
    each = 0 if dtypes.master is None else dtypes.master.itemsize
    return replace(one, master=one.momentum // state * each)


def _rest(shape: ModelShape, sizes: Mapping[str, int], stage: int, dtypes: Dtypes) -> int:
    """A rank's bytes for the parameters that AdamW steps. AdamW's state is divided as in ZeRO-1 or FSDP2."""
    mine, elements = stage_layers(shape, sizes["pp"], stage), 0
    for other in shape.others:  # tp cuts tables by rows; a rank's elements are rounded up
        ways = (sizes["tp"] if isinstance(other.cut, Shard) else 1) * (sizes["ep"] if other.experts else 1)
        elements += sum(layer in mine for layer in other.layers) * -(-other.size // ways)
    state = 2 * 4 + (0 if dtypes.master is None else dtypes.master.itemsize)
    held = dtypes.param.itemsize + dtypes.grad.itemsize
    shards = sizes[SHARDING]
    return elements * held // shards + elements * state // (shards if shards > 1 else sizes["dp"])


def search(plan: ModelPlan) -> list[Choice]:
    """The most promising strategies, each with its fastest options that fit; the fastest strategy is first.

    A strategy is promising if it takes little time. If a strategy's products take more than twice as long as
    the fastest strategy's products, the excess is not counted, because larger rounds may divide products
    better.
    """
    least = min(one.product for one in plan.estimates)

    def promise(one: StepEstimate) -> float:
        return one.copy + one.exposed + one.reduction + min(one.product, 2 * least)

    found = []
    for one in sorted(plan.offered, key=promise)[:SEARCHED]:
        fit = [each for each in _tried(plan, one) if _fits(plan, each.estimate)]
        found += [min(fit, key=lambda each: each.estimate.seconds)] if fit else []
    return sorted(found, key=lambda each: each.estimate.seconds)


def _tried(plan: ModelPlan, one: StepEstimate) -> Iterator[Choice]:
    """Try a strategy with larger and larger rounds, while the number of rounds falls; then try windows.

    Options that give the same plan, or the same number of rounds in flight, are not tried again.
    """
    builder = plan.builders[one.strategy]

    def planned(round_bytes: int) -> list[Plan]:
        return [part.plan(builder, round_bytes) for part in plan.parts]

    def choice(plans: Sequence[Plan], round_bytes: int, window: int) -> Choice:
        each = estimate_parts(one.strategy, plans, plan.parts, window, plan.dtypes)
        return Choice(builder, round_bytes, window, each)

    best, plans = Choice(builder, plan.round_bytes, plan.window, one), planned(plan.round_bytes)
    yield best
    buckets, before = one.buckets, plans
    for times in ROUNDS[1:]:
        if buckets <= len(plan.parts) or (after := planned(times * plan.round_bytes)) == before:
            break
        larger = choice(after, times * plan.round_bytes, plan.window)
        yield larger
        if larger.estimate.buckets == buckets or not _fits(plan, larger.estimate):
            break
        buckets, before = larger.estimate.buckets, after
        if larger.estimate.seconds < best.estimate.seconds:
            best, plans = larger, after
    rounds = max(each.buckets[-1].round + 1 for each in plans)
    in_flight = {min(plan.window, rounds)}
    for window in WINDOWS:
        if min(window, rounds) not in in_flight:
            in_flight.add(min(window, rounds))
            yield choice(plans, best.round_bytes, window)


def _fits(plan: ModelPlan, one: StepEstimate) -> bool:
    return plan.machine.memory is None or plan.memory(one) <= plan.machine.memory


def stage_parts(
    shape: ModelShape, sizes: Mapping[str, int], stage: int, machine: Machine, dtypes: Dtypes
) -> tuple[StagePart, StagePart]:
    """A stage's dense matrices and its experts' matrices, each with their own grid.

    Raises:
        GridError: the grid does not divide the model.
    """
    dp, shards, tp, ep, pp = (sizes[axis] for axis in AXES)
    options = {"dtype": dtypes.param, "grad_dtype": dtypes.grad}
    dense, experts = stage_matrices(shape, tp=tp, ep=ep, pp=pp, dp_shard=shards, stage=stage, **options)
    shared = shards * tp if shards > 1 else dp * tp
    if shared % ep:
        said = "dp_shard × tp" if shards > 1 else "dp × tp"
        raise GridError(f"ep={ep} does not divide {said} = {shared}, the ranks that share the experts")
    apart = replace(machine, ranks_per_node=max(1, machine.ranks_per_node // ep))  # ranks are ep apart
    beside = min(machine.ranks_per_node, dp * shards * tp * pp) - 1
    if shards > 1:
        grids = Grid.of(dp=dp, dp_shard=shards, tp=tp), Grid.of(dp=dp, dp_shard=shared // ep)
    else:
        grids = Grid.of(dp=dp, tp=tp), Grid.of(dp=shared // ep)
    return (
        StagePart(dense, grids[0], RankWalks(machine, beside)),
        StagePart(experts, grids[1], RankWalks(apart, beside)),
    )


def busiest_stage(shape: ModelShape, pp: int) -> int:
    """The pipeline stage with the most Newton–Schulz work.

    Raises:
        GridError: there are fewer layers than stages.
    """

    def work(stage: int) -> int:
        mine = stage_layers(shape, pp, stage)
        return sum(
            newton_schulz_cost(family.shape) * max(1, family.experts)
            for family in shape.families
            for layer in family.layers
            if layer in mine
        )

    return max(range(pp), key=work)


def tables_of(plan: ModelPlan) -> tuple[Table, Table]:
    """Two tables for a terminal, one of seconds and one of bytes. The fastest strategy comes first."""
    from rich.table import Table
    from rich.text import Text

    grid = ", ".join(f"{axis}={size}" for axis, size in plan.sizes.items() if size > 1) or "one rank"
    stage = f", stage {plan.stage}" if plan.sizes["pp"] > 1 else ""
    size = f"{say_billions(plan.shape.hidden)} elements in matrices"
    title = f"{plan.shape.name}, {size}, on {grid}{stage}; {plan.machine.name}"
    look: dict[str, Any] = {"title_justify": "left", "box": None, "padding": (0, 1, 0, 0), "pad_edge": False}
    seconds, sizes = Table(title=Text(title), **look), Table(**look)
    for table, columns in ((seconds, SECONDS), (sizes, BYTES)):
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
    rows = [*plan.estimates, *([together(plan.adamw_parts)] if plan.adamw_parts else [])]
    for one in sorted(rows, key=lambda one: one.seconds):
        times = (one.seconds, one.own, one.product, one.copy, one.others, one.exposed, one.reduction)
        over = say_number(one.seconds / plan.adamw) if plan.adamw else "–"
        sent = map(say_bytes, (one.sent - one.between, one.between))
        held = (one.held, one.momentum + one.master, one.peak, one.fsdp, plan.memory(one))
        cells = [*sent, say_number(one.shares), *map(say_bytes, held)]
        for table, said in ((seconds, [*map(say_seconds, times), over]), (sizes, cells)):
            table.add_row(one.strategy, *(cell.replace(" ", "") for cell in said))
    return seconds, sizes


def say_layout(plan: ModelPlan) -> str:
    """A text on the layout of ranks, the dtypes, and the memory that is not counted."""
    grid, node = plan.parts[0].grid, plan.machine.ranks_per_node
    axes = [axis for axis in grid.axes if grid.size(axis) > 1]
    spans = {axis: grid.stride(axis) * grid.size(axis) for axis in axes}
    inside = [axis for axis, n in spans.items() if n <= node and (node % n == 0 or plan.ranks <= node)]
    where = f"{' and '.join(inside) or 'no axis'} within one" if plan.machine.between else "only one node"
    fastest = f"{axes[-1]} varies fastest, " if len(axes) > 1 else ""
    ddps = "DDP's copy of all gradients (without gradient_as_bucket_view=True)"
    left_out = "what FSDP2 gathers for forward and backward" if plan.sizes[SHARDING] > 1 else ddps
    return (
        f"Ranks: {' × '.join(axes) or 'one'}; {fastest}{node} ranks per node, {where}. "
        f"Dtypes: {plan.dtypes}. memory includes {say_bytes(plan.rest)} for embeddings, head and norms with "
        f"AdamW's state; activations and {left_out} are not included."
    )


def strategies_on(sizes: Mapping[str, int]) -> Mapping[str, Builder]:
    """The strategies that can run on a grid, without duplicates. ``dp_shard`` adds the baseline."""
    if sizes[SHARDING] > 1:
        return {**SHARDED, **GATHER_ALL}
    return STRATEGIES if sizes["tp"] > 1 else WITHOUT_TP


def say(plan: ModelPlan, found: Sequence[Choice] = ()) -> list[str]:
    """Lines that recommend a strategy, say why, and say at which link speeds another one is faster; then
    warnings.

    ``found`` is the result of ``search``.
    """
    best, tried = plan.best, [choice.estimate for choice in found]
    if best is None and not found:
        least = min(plan.offered, key=plan.memory)
        room, need = say_bytes(plan.machine.memory or 0), say_bytes(plan.memory(least))
        axes = ["tp", "pp", *(["ep"] if plan.shape.experts > plan.sizes["ep"] else [])]
        axes += ["dp_shard (FSDP2, instead of dp)"] if plan.sizes["dp"] > 1 else []
        return [
            f"Nothing fits into {room} per rank. {least.strategy} needs the least memory: {need} for "
            f"model and step. Take more {', '.join(axes[:-1])} or {axes[-1]}."
        ]
    lines = []
    for choice in found[:1]:
        one = choice.estimate
        cost = f"{say_seconds(one.seconds)} per step, {say_bytes(plan.memory(one))} per rank"
        lines.append(f"Fastest found: {choice.call}: {cost}.")
    if best is not None:
        lines.append(_recommendation(plan, best))
    ordered = tried or plan.fitting
    beside = _beside_training(plan, ordered[0])
    return [*lines, *_turns(ordered), *beside, *_warnings(plan), *plan.shape.notes]


def _recommendation(plan: ModelPlan, best: StepEstimate) -> str:
    options = f"With rounds of {say_bytes(plan.round_bytes)} and a window of {plan.window}"
    line = f"{options}, take {best.strategy}: {say_seconds(best.seconds)} per step"
    others = [one for one in plan.fitting if one is not best]
    if not others:
        return f"{line}."
    second = others[0]
    if second.seconds <= CLOSE * best.seconds:
        less, more = say_bytes(plan.memory(best)), say_bytes(plan.memory(second))
        same = f"needs the same memory, {more}"
        need = same if less == more else f"needs {more} of memory instead of {less}"
        return f"{line}. {second.strategy} is about as fast and {need}."
    parts = {
        "computes": (best.product + best.copy, second.product + second.copy),
        "waits for other ranks": (best.others, second.others),
        "waits for bytes": (best.exposed + best.reduction, second.exposed + second.reduction),
    }
    name, (mine, its) = max(parts.items(), key=lambda item: item[1][1] - item[1][0])
    verb, _, what = name.partition(" ")
    return (
        f"{line}; it {verb} {say_seconds(mine)} {what}".rstrip()
        + f", while {second.strategy}, the next fastest, {verb} {say_seconds(its)}."
    )


def _turns(ordered: Sequence[StepEstimate]) -> list[str]:
    """Say which strategy is the fastest at half and at twice the speed of links, and where two are equal."""
    best, lines = ordered[0], []
    for factor, word in ((0.5, "half"), (2.0, "twice")):
        winner = min(ordered, key=lambda one: one.seconds_at(factor))
        if winner.seconds_at(factor) * CLOSE >= best.seconds_at(factor):
            continue
        turns = _turning_point(winner, best, factor)
        where = f"the two take equally long with links at {turns:.2g} times the machine's speed"
        lines.append(f"With links {word} as fast, {winner.strategy} is faster; {where}.")
    stays = f"{best.strategy} stays the fastest, or about as fast, at half and at twice the speed of links."
    return lines or [stays]


def _turning_point(winner: StepEstimate, best: StepEstimate, factor: float) -> float:
    """The speed of links at which two strategies take equally long, between 1 and ``factor``.

    A step's seconds, and so the difference of two steps, are nearly linear in the time that a byte takes. So
    a line through the differences at both ends of the interval is zero close to the speed that is sought. A
    few repetitions are enough.
    """

    def behind(slowness: float) -> float:
        return winner.seconds_at(1 / slowness) - best.seconds_at(1 / slowness)

    ahead, after = 1.0, 1 / factor
    much, little = behind(ahead), behind(after)
    for _ in range(4):
        middle = ahead + (after - ahead) * much / (much - little)
        here = behind(middle)
        if here > 0:
            ahead, much = middle, here
        else:
            after, little = middle, here
    return 1 / middle


def _beside_training(plan: ModelPlan, best: StepEstimate) -> list[str]:
    """A sentence on the optimizer's part of a whole step, if the batch is known."""
    if plan.tokens is None:
        return []
    ranks = plan.sizes["dp"] * plan.sizes[SHARDING]
    if plan.tokens < ranks:
        said = f"A batch of {plan.tokens:,} tokens is less than one for each of dp={ranks:,} ranks"
        return [f"{said}: --batch counts the tokens of all ranks together."]
    if plan.training is None:
        return [
            f"It is unknown how many experts of {plan.shape.name} a token uses, so the optimizer's part of a "
            "batch cannot be computed."
        ]
    muon, adamw = (100 * seconds / plan.training for seconds in (best.seconds, plan.adamw))
    return [
        f"Forward and backward of {plan.tokens:,} tokens take at least {say_seconds(plan.training)}, with "
        f"all products at the machine's best rate. Muon's step adds at most {say_number(muon)} % to this, "
        f"AdamW's step at most {say_number(adamw)} %. Both are for the hidden matrices alone, "
        f"{say_number(100 * plan.shape.hidden / plan.shape.parameters)} % of the parameters."
    ]


def _warnings(plan: ModelPlan) -> list[str]:
    room = say_bytes(plan.machine.memory or 0)
    found = [
        f"{one.strategy} does not fit: {say_bytes(plan.memory(one))} of {room} per rank."
        for one in plan.estimates
        if not _fits(plan, one)
    ]
    found += [plan.machine.bf16_note] if plan.machine.bf16_note else []
    if plan.shape.experts:
        found.append(
            'Muon steps the experts here: if a model stacks them, pass experts="muon" to from_model.'
        )
    named = {one.strategy: one for one in plan.estimates}
    if plan.best is not None and plan.best.strategy == "gram":
        found.append(
            "gram's results are within a stated bound of a single process's results; "
            "all other strategies give the same bits as a single process."
        )
    sliced, whole = named.get("zero1 boundary"), named.get("layerwise")
    if sliced is not None and sliced.fair_shares > 2:
        shares, dp = say_number(sliced.fair_shares), plan.sizes["dp"]
        remedy = "Larger buckets or layerwise reduce" if sliced.buckets > 1 else "layerwise reduces"
        found.append(
            f"zero1: with buckets of {say_bytes(plan.round_bytes)}, many of the dp={dp} ranks share each "
            f"matrix, so the busiest rank does {shares} times its even share of Newton–Schulz. {remedy} this."
        )
    if whole is not None and whole.fair_shares > 1.5:
        shares = say_number(whole.fair_shares)
        line = f"layerwise: the busiest owner has {shares} times its even share of Newton–Schulz"
        # In each part (dense or experts), some rank owns the largest matrix, and no plan can give that rank
        # less work.
        least = sum(max(newton_schulz_cost(it.sides) for it in part.matrices) for part in plan.parts)
        if whole.newton_schulz == DEFAULT_STEPS * least:
            found.append(f"{line}, the least possible: there are too few matrices for so many ranks.")
        else:
            found.append(f"{line}, in {whole.runs} matrices: owners have unequal work.")
    if plan.sizes[SHARDING] > 1:
        whole_bytes = sum(e.numel for part in plan.parts for e in part.matrices) * plan.dtypes.param.itemsize
        found.append(
            f"full_tensor() of all matrices at once would take {say_bytes(whole_bytes)} on every rank."
        )
    return found


def as_data(plan: ModelPlan, found: Sequence[Choice] = ()) -> dict[str, Any]:
    best = plan.best
    return {
        "model": plan.shape.name,
        "parameters": plan.shape.parameters,
        "in_matrices": plan.shape.hidden,
        "grid": plan.sizes,
        "stage": plan.stage,
        "machine": plan.machine.name,
        "round_bytes": plan.round_bytes,
        "window": plan.window,
        "dtypes": str(plan.dtypes),
        "layout": say_layout(plan),
        "notes": list(plan.shape.notes),
        "rest_bytes": plan.rest,
        "adamw_seconds": plan.adamw,
        "adamw_ddp_seconds": plan.adamw_at(1.0, sharded=False) if plan.adamw_ddp else None,
        "tokens": plan.tokens,
        "forward_backward_seconds": plan.training,
        "seconds_are": PREDICTED,
        "take": None if best is None else best.strategy,
        "call": found[0].call if found else None,
        "says": say(plan, found),
        "strategies": [
            {
                "strategy": one.strategy,
                "seconds": one.seconds,
                "product_seconds": one.product,
                "copy_seconds": one.copy,
                "waiting_for_ranks_seconds": one.others,
                "exposed_seconds": one.exposed,
                "gradient_seconds": one.reduction,
                "sent_bytes": dict(one.phases),
                "between_nodes_bytes": one.between,
                "newton_schulz_runs": one.runs,
                "newton_schulz_operations": one.newton_schulz,
                "fair_shares": one.fair_shares,
                **{f"{kept}_bytes": getattr(one, kept) for kept in KEPT},
                "memory_bytes": plan.memory(one),
            }
            for one in (*plan.estimates, together(plan.adamw_parts))
        ],
    }


def say_billions(number: int) -> str:
    """A count of elements in billions.

    >>> say_billions(1_020_000_000_000), say_billions(6_980_000_000)
    ('1,020 billion', '6.98 billion')
    """
    billions = number / 1e9
    return f"{billions:.3g} billion" if billions < 999.5 else f"{billions:,.0f} billion"


def say_number(number: float) -> str:
    """A number with three digits; thousands as k and millions as M.

    >>> say_number(1.2345), say_number(16384.2), say_number(2.3e6)
    ('1.23', '16.4k', '2.3M')
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def say_seconds(seconds: float) -> str:
    """Seconds in the unit that fits.

    >>> say_seconds(0.00123), say_seconds(0.9996), say_seconds(12.34), say_seconds(1234.5)
    ('1.23 ms', '1 s', '12.3 s', '20.6 min')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds / 60:.3g} min"


def say_bytes(number: float) -> str:
    """Bytes in the unit that fits.

    >>> say_bytes(1_500_000), say_bytes(999_900_000), say_bytes(12)
    ('1.5 MB', '1 GB', '12 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g} B"
