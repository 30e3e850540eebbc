"""A plan's answer: a table of strategies, which of them to take and why, and what to beware of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from ..errors import GridError, UsageError
from ..plan.assign import newton_schulz_cost
from ..plan.exchange import LocalShards
from ..plan.grid import Grid
from ..plan.matrix import Matrix
from ..plan.strategies import BUCKET_BYTES, Builder, owner_per_replica, zero1
from .machine import Machine
from .model_shape import ModelShape, stage_layers, stage_matrices
from .planner import (
    SHARDED,
    SHARDING,
    STRATEGIES,
    WITHOUT_TP,
    StepEstimate,
    averaged_at_once,
    compare,
    estimate_adamw,
)

COLUMNS = ("strategy", "step", "×AdamW", "compute", "exposed", "sends", "shares", "holds", "peak")
MOST_PLANNED = 131_072
"""How many ranks a grid may have: for a small model, half a minute of planning."""
AXES = ("dp", "dp_shard", "tp", "ep", "pp")
PREDICTED = "Seconds follow from the machine's file; nobody has held them against a clock at this scale."
DOUBLINGS = 7  # of bandwidth, and halvings, at which another strategy may win
CLOSE = 1.02  # times the fastest: as good as it


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What every strategy's step costs for a model on a grid of a machine's ranks, in one pipeline stage.

    ``adamw`` are the seconds of AdamW's step over the same matrices, sharded as ZeRO-1 shards it, or as FSDP2
    where ``dp_shard`` cuts parameters; ``adamw_parts`` are what they are made of, and ``adamw_ddp`` the same
    under DDP (empty with ``dp_shard``). ``tokens`` is the batch, or None.
    """

    shape: ModelShape
    sizes: dict[str, int]
    stage: int
    machine: Machine
    bucket_bytes: int
    window: int
    estimates: tuple[StepEstimate, ...]
    adamw: float
    adamw_parts: tuple[StepEstimate, ...] = ()
    adamw_ddp: tuple[StepEstimate, ...] = ()
    tokens: int | None = None

    @property
    def ranks(self) -> int:
        """Ranks in all pipeline stages."""
        return math.prod(size for axis, size in self.sizes.items() if axis != "ep")

    @property
    def training(self) -> float | None:
        """Seconds that forward and backward of a batch take at least, or None where nobody can say.

        Six operations for each token and each element that it meets in a matrix, on all ranks at the rate of
        the machine's largest bf16 products: without attention's scores, embeddings, communication and idle
        stages.
        """
        if self.tokens is None or self.shape.active is None:
            return None
        return 6 * self.tokens * self.shape.active / (self.ranks * max(self.machine.gemm["bfloat16"])[1])

    def adamw_at(self, factor: float, sharded: bool = True) -> float:
        """AdamW's seconds, were all links ``factor`` times as fast; under DDP where it is not ``sharded``."""
        return sum(part.seconds_at(factor) for part in (self.adamw_parts if sharded else self.adamw_ddp))

    @property
    def fitting(self) -> list[StepEstimate]:
        """The strategies that a rank has memory for, the fastest first."""
        room = self.machine.memory
        fit = [one for one in self.estimates if room is None or one.memory <= room]
        return sorted(fit, key=lambda one: one.seconds)

    @property
    def best(self) -> StepEstimate | None:
        """The fastest strategy that fits; of those that are about as fast, the one with the least memory."""
        if not self.fitting:
            return None
        least = self.fitting[0].seconds
        close = [one for one in self.fitting if one.seconds <= CLOSE * least]
        return min(close, key=lambda one: one.memory)

    def winner_at(self, factor: float) -> StepEstimate | None:
        """The fastest that fits, were all links ``factor`` times as fast."""
        return min(self.fitting, key=lambda one: one.seconds_at(factor), default=None)


def read_sizes(text: str) -> dict[str, int]:
    """A grid as it is typed.

    Raises:
        UsageError: it is none.

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
    bucket_bytes: int = BUCKET_BYTES,
    window: int = 1,
    tokens: int | None = None,
    strategies: Mapping[str, Builder] | None = None,
) -> ModelPlan:
    """Plan for the pipeline stage that has the most to compute.

    Experts lie on dp × tp / ep positions, each whole (expert tensor parallelism 1, as Megatron-LM's). With
    ``dp_shard``, FSDP2 cuts all matrices along that axis and dp counts replicas; experts are then cut over
    dp_shard × tp / ep. ``strategies`` are all that the grid allows, unless told.

    Raises:
        GridError: the grid does not divide the model.
    """
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    stage = busiest_stage(shape, sizes["pp"])
    dense, experts = stage_parts(shape, sizes, stage, machine)
    beside = min(machine.ranks_per_node, math.prod(sizes.values()) // sizes["ep"]) - 1
    found = compare(
        dense.matrices,
        experts.matrices,
        dense.grid,
        experts.grid,
        dense.machine,
        experts.machine,
        strategies=strategies or _strategies_on(sizes),
        bucket_bytes=bucket_bytes,
        window=window,
        beside=beside,
    )
    adamw = tuple(part.adamw(bucket_bytes, beside) for part in (dense, experts))
    ddp = tuple(part.adamw(bucket_bytes, beside, False) for part in (dense, experts) if sizes[SHARDING] == 1)
    seconds = sum(part.seconds for part in adamw)
    estimates = tuple(found)
    return ModelPlan(
        shape, sizes, stage, machine, bucket_bytes, window, estimates, seconds, adamw, ddp, tokens
    )


@dataclass(frozen=True, slots=True)
class StagePart:
    """The dense matrices of a stage, or its experts: what a rank's grid and machine are for them."""

    matrices: Sequence[Matrix]
    grid: Grid
    machine: Machine

    def adamw(self, bucket_bytes: int, beside: int, sharded: bool = True) -> StepEstimate:
        """AdamW's step over them; under DDP where it is not ``sharded``."""
        at = self.grid.at(0)
        if self.grid.size(SHARDING) > 1:
            plan = owner_per_replica(self.matrices, self.grid, bucket_bytes=bucket_bytes)
            lengths = list(averaged_at_once(plan, at).elements())
        else:
            plan = zero1(self.matrices, self.grid, bucket_bytes=bucket_bytes)
            lengths = [bucket.length(LocalShards(), at) for bucket in plan.buckets]
        return estimate_adamw(lengths, self.grid, self.machine, beside=beside, sharded=sharded)


def stage_parts(
    shape: ModelShape, sizes: Mapping[str, int], stage: int, machine: Machine
) -> tuple[StagePart, StagePart]:
    """The dense matrices of a stage and its experts', each on their grid.

    Raises:
        GridError: the grid does not divide the model.
    """
    dp, shards, tp, ep, pp = (sizes[axis] for axis in AXES)
    dense, experts = stage_matrices(shape, tp=tp, ep=ep, pp=pp, dp_shard=shards, stage=stage)
    shared = shards * tp if shards > 1 else dp * tp
    if shared % ep:
        said = "dp_shard × tp" if shards > 1 else "dp × tp"
        raise GridError(f"ep={ep} does not divide {said} = {shared}, the ranks that share the experts")
    apart = replace(machine, ranks_per_node=max(1, machine.ranks_per_node // ep))  # neighbours are ep apart
    if shards > 1:
        grids = Grid.of(dp=dp, dp_shard=shards, tp=tp), Grid.of(dp=dp, dp_shard=shared // ep)
    else:
        grids = Grid.of(dp=dp, tp=tp), Grid.of(dp=shared // ep)
    return StagePart(dense, grids[0], machine), StagePart(experts, grids[1], apart)


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


def table_of(plan: ModelPlan) -> Table:
    """The strategies as a table for a terminal, the fastest first."""
    grid = ", ".join(f"{axis}={size}" for axis, size in plan.sizes.items() if size > 1) or "one rank"
    size = f"{plan.shape.hidden / 1e9:,.3g} billion elements in matrices".replace("e+03", "000")
    stage = f", stage {plan.stage}" if plan.sizes["pp"] > 1 else ""
    title = Text(f"{plan.shape.name}, {size}, on {grid}{stage}; {plan.machine.name}")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for one in sorted(plan.estimates, key=lambda one: one.seconds):
        cells = (
            say_seconds(one.seconds),
            say_number(one.seconds / plan.adamw) if plan.adamw else "–",
            say_seconds(one.product + one.copy),
            say_seconds(one.waiting),
            say_bytes(one.sent),
            say_number(one.fair_shares),
            say_bytes(one.held + one.momentum),
            say_bytes(one.peak),
        )
        table.add_row(one.strategy, *(cell.replace(" ", "") for cell in cells))
    return table


def _strategies_on(sizes: Mapping[str, int]) -> Mapping[str, Builder]:
    """The strategies that take a grid's parameters, each once."""
    if sizes[SHARDING] > 1:
        return SHARDED
    return STRATEGIES if sizes["tp"] > 1 else WITHOUT_TP


def say(plan: ModelPlan) -> list[str]:
    """What to take and why, where that turns round, and what to beware of: a line each."""
    best = plan.best
    if best is None:
        least = min(plan.estimates, key=lambda one: one.memory)
        room, need = say_bytes(plan.machine.memory or 0), say_bytes(least.memory)
        return [
            f"Nothing fits into {room} a rank: {least.strategy}, which needs least, takes {need} for the "
            "matrices and a step. Take more tp or pp."
        ]
    return [_recommendation(plan, best), *_turns(plan, best), *_beside_training(plan, best), *_warnings(plan)]


def _recommendation(plan: ModelPlan, best: StepEstimate) -> str:
    line = f"Take {best.strategy}: {say_seconds(best.seconds)} a step"
    others = [one for one in plan.fitting if one is not best]
    if not others:
        return f"{line}."
    second = others[0]
    if second.seconds <= CLOSE * best.seconds:
        less, more = say_bytes(best.memory), say_bytes(second.memory)
        need = f"takes as much memory, {more}" if less == more else f"takes {more} of memory, this one {less}"
        return f"{line}. {second.strategy} is about as fast and {need}."
    parts = {
        "computes": (best.product + best.copy, second.product + second.copy),
        "waits": (best.waiting, second.waiting),
    }
    name, (mine, its) = max(parts.items(), key=lambda item: item[1][1] - item[1][0])
    return (
        f"{line}; it {name} {say_seconds(mine)} where {second.strategy}, the next, {name} {say_seconds(its)}."
    )


def _turns(plan: ModelPlan, best: StepEstimate) -> list[str]:
    """Where another strategy wins, going out from today's bandwidth in both directions."""
    lines = []
    for sign, word in ((1, "faster"), (-1, "slower")) if plan.window == 1 else ():
        for power in range(1, DOUBLINGS + 1):
            factor = 2.0 ** (sign * power)
            winner = plan.winner_at(factor)
            if winner is not None and winner.seconds_at(factor) * CLOSE < best.seconds_at(factor):
                lines.append(f"With links {2**power} times {word}, {winner.strategy} is ahead.")
                break
    return lines


def _beside_training(plan: ModelPlan, best: StepEstimate) -> list[str]:
    """What part of a whole step the optimizer is, where the batch is known."""
    if plan.tokens is None:
        return []
    if plan.training is None:
        return [f"Nobody says how many experts of {plan.shape.name} a token meets: no word on the batch."]
    muon, adamw = (100 * seconds / plan.training for seconds in (best.seconds, plan.adamw))
    return [
        f"Forward and backward of {plan.tokens:,} tokens take at least {say_seconds(plan.training)}, all "
        f"products at the machine's best rate: the step adds at most {say_number(muon)} %, AdamW's "
        f"{say_number(adamw)} %."
    ]


def _warnings(plan: ModelPlan) -> list[str]:
    room, found = plan.machine.memory, []
    for one in plan.estimates:
        if room is not None and one.memory > room:
            found.append(f"{one.strategy} does not fit: {say_bytes(one.memory)} of {say_bytes(room)} a rank.")
    named = {one.strategy: one for one in plan.estimates}
    if plan.best is not None and plan.best.strategy == "gram":
        found.append("gram is within a stated bound of one process; the others are equal to it, to the bit.")
    sliced, whole = named.get("zero1 boundary"), named.get("layerwise")
    if sliced is not None and sliced.fair_shares > 2:
        shares, dp = say_number(sliced.fair_shares), plan.sizes["dp"]
        larger = "Larger buckets, or layerwise, do" if sliced.buckets > 1 else "layerwise does"
        found.append(
            f"zero1: so many of dp={dp} ranks share a matrix that the busiest does {shares} fair shares of "
            f"Newton–Schulz, with buckets of {say_bytes(plan.bucket_bytes)}. {larger} less."
        )
    if whole is not None and whole.fair_shares > 1.5:
        found.append(
            f"layerwise: the busiest owner has {say_number(whole.fair_shares)} fair shares of Newton–Schulz. "
            "Where there are few matrices for so many ranks, one matrix is the floor."
        )
    return found


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """The plan as plain data."""
    best = plan.best
    return {
        "model": plan.shape.name,
        "parameters": plan.shape.parameters,
        "in_matrices": plan.shape.hidden,
        "grid": plan.sizes,
        "stage": plan.stage,
        "machine": plan.machine.name,
        "bucket_bytes": plan.bucket_bytes,
        "window": plan.window,
        "adamw_seconds": plan.adamw,
        "adamw_ddp_seconds": plan.adamw_at(1.0, sharded=False) if plan.adamw_ddp else None,
        "tokens": plan.tokens,
        "forward_backward_seconds": plan.training,
        "seconds_are": PREDICTED,
        "take": None if best is None else best.strategy,
        "says": say(plan),
        "strategies": [
            {
                "strategy": one.strategy,
                "seconds": one.seconds,
                "product_seconds": one.product,
                "copy_seconds": one.copy,
                "exposed_seconds": one.waiting,
                "sent_bytes": dict(one.phases),
                "newton_schulz_runs": one.runs,
                "newton_schulz_operations": one.newton_schulz,
                "fair_shares": one.fair_shares,
                "held_bytes": one.held,
                "momentum_bytes": one.momentum,
                "peak_bytes": one.peak,
            }
            for one in plan.estimates
        ],
    }


def say_number(number: float) -> str:
    """Three digits, and thousands as k.

    >>> say_number(1.2345), say_number(16384.2)
    ('1.23', '16.4k')
    """
    return f"{number:.3g}" if number < 999.5 else f"{number / 1000:.3g}k"


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
