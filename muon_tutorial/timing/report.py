"""A plan's answer: a table of strategies, which of them to take and why, and what to beware of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from ..errors import GridError, UsageError
from ..plan.assign import newton_schulz_cost
from ..plan.exchange import LocalShards
from ..plan.grid import Grid
from ..plan.strategies import BUCKET_BYTES, zero1
from .machine import Machine
from .model_shape import ModelShape, stage_layers, stage_matrices
from .planner import StepEstimate, adamw_zero1, compare

COLUMNS = ("strategy", "step", "×AdamW", "compute", "exposed", "sends", "shares", "holds", "peak")
AXES = ("dp", "tp", "ep", "pp")
DOUBLINGS = 7  # of bandwidth, and halvings, at which another strategy may win
CLOSE = 1.02  # times the fastest: as good as it


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What every strategy's step costs for a model on a grid of a machine's ranks, in one pipeline stage.

    ``adamw`` are the seconds of ZeRO-1 AdamW's step over the same matrices.
    """

    shape: ModelShape
    sizes: dict[str, int]
    stage: int
    machine: Machine
    bucket_bytes: int
    window: int
    estimates: tuple[StepEstimate, ...]
    adamw: float

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
    {'dp': 64, 'tp': 8, 'ep': 1, 'pp': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"a grid is typed as dp=64,tp=8 with the axes {', '.join(AXES)}; got {text!r}")
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def plan_model(
    shape: ModelShape,
    sizes: dict[str, int],
    machine: Machine,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    window: int = 1,
) -> ModelPlan:
    """Plan for the pipeline stage that has the most to compute.

    Experts lie on dp × tp / ep positions, each whole (expert tensor parallelism 1, as Megatron-LM's).

    Raises:
        GridError: the grid does not divide the model.
    """
    dp, tp, ep, pp = (sizes[axis] for axis in AXES)
    stage = busiest_stage(shape, pp)
    dense, experts = stage_matrices(shape, tp=tp, ep=ep, pp=pp, stage=stage)
    if dp * tp % ep:
        raise GridError(f"ep={ep} does not divide dp × tp = {dp * tp}, the ranks that share the experts")
    grid, expert_grid = Grid.of(dp=dp, tp=tp), Grid.of(dp=dp * tp // ep)
    apart = replace(machine, ranks_per_node=max(1, machine.ranks_per_node // ep))  # neighbours are ep apart
    beside = min(machine.ranks_per_node, dp * tp * pp) - 1
    found = compare(
        dense,
        experts,
        grid,
        expert_grid,
        machine,
        apart,
        bucket_bytes=bucket_bytes,
        window=window,
        beside=beside,
    )
    adamw = 0.0
    for matrices, each, on in ((dense, grid, machine), (experts, expert_grid, apart)):
        buckets = zero1(matrices, each, bucket_bytes=bucket_bytes).buckets
        lengths = [bucket.length(LocalShards(), each.at(0)) for bucket in buckets]
        adamw += adamw_zero1(lengths, each, on, beside=beside)
    return ModelPlan(shape, sizes, stage, machine, bucket_bytes, window, tuple(found), adamw)


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
    return [_recommendation(plan, best), *_turns(plan, best), *_warnings(plan)]


def _recommendation(plan: ModelPlan, best: StepEstimate) -> str:
    line = f"Take {best.strategy}: {say_seconds(best.seconds)} a step"
    others = [one for one in plan.fitting if one is not best]
    if not others:
        return f"{line}."
    second = others[0]
    if second.seconds <= CLOSE * best.seconds:
        need = f"it takes {say_bytes(best.memory)} of memory where {second.strategy} takes"
        return f"{line}. {second.strategy} is about as fast; {need} {say_bytes(second.memory)}."
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


def _warnings(plan: ModelPlan) -> list[str]:
    room, found = plan.machine.memory, []
    for one in plan.estimates:
        if room is not None and one.memory > room:
            found.append(f"{one.strategy} does not fit: {say_bytes(one.memory)} of {say_bytes(room)} a rank.")
    named = {one.strategy: one for one in plan.estimates}
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
