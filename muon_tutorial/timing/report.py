"""A plan's answer: a table of strategies, which of them to take and why, and what to beware of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import GridError, UsageError
from ..plan.grid import Grid
from ..plan.strategies import BUCKET_BYTES
from .machine import Machine
from .model_shape import ModelShape, stage_matrices
from .planner import StepEstimate, adamw_zero1, compare

COLUMNS = ("strategy", "step", "×AdamW", "compute", "exposed", "sends", "shares", "state", "peak")
AXES = ("dp", "tp", "ep", "pp")
DOUBLINGS = 7  # of bandwidth, and halvings, at which another strategy may win
CLOSE = 1.02  # what is slower by less is as fast


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What every strategy's step costs for a model on a grid of a machine's ranks.

    ``adamw`` are the seconds of ZeRO-1 AdamW's step over the same matrices.
    """

    shape: ModelShape
    sizes: dict[str, int]
    machine: Machine
    bucket_bytes: int
    estimates: tuple[StepEstimate, ...]
    adamw: float

    @property
    def fitting(self) -> list[StepEstimate]:
        """The strategies whose state and buffers a rank has room for, the fastest first."""
        room = self.machine.memory
        fit = [one for one in self.estimates if room is None or one.state + one.peak <= room]
        return sorted(fit, key=lambda one: one.seconds)

    @property
    def best(self) -> StepEstimate | None:
        """The fastest strategy that fits; of those that are about as fast, the one with the least memory."""
        if not self.fitting:
            return None
        least = self.fitting[0].seconds
        close = [one for one in self.fitting if one.seconds <= CLOSE * least]
        return min(close, key=lambda one: one.state + one.peak)

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
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"a grid is typed as dp=64,tp=8 with the axes {', '.join(AXES)}; got {text!r}")
        sizes[axis] = int(size)
    return sizes


def plan_model(
    shape: ModelShape,
    sizes: dict[str, int],
    machine: Machine,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    window: int = 1,
) -> ModelPlan:
    """Plan for the first pipeline stage, which has the most layers.

    Experts lie on dp × tp / ep positions, each whole (expert tensor parallelism 1, as Megatron-LM's).

    Raises:
        GridError: the grid does not divide the model.
    """
    dp, tp, ep = sizes["dp"], sizes["tp"], sizes["ep"]
    dense, experts = stage_matrices(shape, tp=tp, ep=ep, pp=sizes["pp"])
    if dp * tp % ep:
        raise GridError(f"ep={ep} does not divide dp × tp = {dp * tp}, the ranks that share the experts")
    grid, expert_grid = Grid.of(dp=dp, tp=tp), Grid.of(dp=dp * tp // ep)
    beside = replace(machine, ranks_per_node=max(1, machine.ranks_per_node // ep))
    found = compare(
        dense, experts, grid, expert_grid, machine, beside, bucket_bytes=bucket_bytes, window=window
    )
    held = [
        sum(matrix.box(each.at(0)).numel for matrix in part)
        for each, part in ((grid, dense), (expert_grid, experts))
    ]
    adamw = adamw_zero1(held[0], grid, machine, bucket_bytes=bucket_bytes)
    if experts:
        adamw += adamw_zero1(held[1], expert_grid, beside, bucket_bytes=bucket_bytes)
    return ModelPlan(shape, sizes, machine, bucket_bytes, tuple(found), adamw)


def table_of(plan: ModelPlan) -> Table:
    """The strategies as a table for a terminal, the fastest first."""
    grid = ", ".join(f"{axis}={size}" for axis, size in plan.sizes.items() if size > 1) or "one rank"
    size = f"{plan.shape.hidden / 1e9:.3g} billion elements in matrices"
    title = f"{plan.shape.name}, {size}, on {grid}; {plan.machine.name}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_edge = table.pad_edge = False
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
            say_bytes(one.state),
            say_bytes(one.peak),
        )
        table.add_row(one.strategy, *(cell.replace(" ", "") for cell in cells))
    return table


def say(plan: ModelPlan) -> list[str]:
    """What to take and why, where that turns round, and what to beware of: a line each."""
    best = plan.best
    if best is None:
        most = say_bytes(int(plan.machine.memory or 0))
        return [
            f"No strategy fits into {most} a rank: take more ranks, smaller buckets or tensor parallelism."
        ]
    return [_recommendation(plan, best), *_turns(plan, best), *_warnings(plan)]


def _recommendation(plan: ModelPlan, best: StepEstimate) -> str:
    others = [one for one in plan.fitting if one is not best]
    line = f"Take {best.strategy}: {say_seconds(best.seconds)} a step"
    if not others:
        return f"{line}."
    second = others[0]
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
    for sign, word in ((1, "faster"), (-1, "slower")):
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
        if room is not None and (needs := one.state + one.peak) > room:
            found.append(f"{one.strategy} does not fit: {say_bytes(needs)} of {say_bytes(room)} a rank.")
    named = {one.strategy: one for one in plan.estimates}
    sliced, whole = named.get("zero1, boundary"), named.get("layerwise")
    if sliced is not None and sliced.fair_shares > 2:
        shares, dp = say_number(sliced.fair_shares), plan.sizes["dp"]
        larger = "Make buckets larger, or take layerwise." if sliced.buckets > 1 else "layerwise does not."
        found.append(
            f"zero1: so many of dp={dp} ranks share a matrix that each does {shares} fair shares of "
            f"Newton–Schulz, with buckets of {say_bytes(plan.bucket_bytes)}. {larger}"
        )
    if whole is not None and whole.fair_shares > 1.5:
        found.append(
            f"layerwise: the busiest owner has {whole.fair_shares:.1f} fair shares of Newton–Schulz. Where "
            "there are fewer matrices than ranks, one matrix is the floor."
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
        "machine": plan.machine.name,
        "bucket_bytes": plan.bucket_bytes,
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
                "state_bytes": one.state,
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

    >>> say_seconds(0.00123), say_seconds(12.34)
    ('1.23 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def say_bytes(number: float) -> str:
    """Bytes in the unit that fits.

    >>> say_bytes(1_500_000), say_bytes(12)
    ('1.5 MB', '12 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g} B"
