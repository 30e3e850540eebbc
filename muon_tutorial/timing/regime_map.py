"""Finds and draws which strategy is the fastest, for several numbers of ranks and bandwidths.

A column is planned once; its rows only change the speed of the links, which takes almost no time. All seconds
are predictions from a machine's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..errors import GridError
from ..evidence.svg import svg_document, svg_style
from .recommend import AXES, PREDICTED, ModelPlan, plan_model

MOST_RANKS, APART = 16384, 4
"""The largest grid of a map, and the ratio of ranks between neighbouring columns."""
FACTORS = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""The speeds of links, as multiples of the machine's own speeds."""
FILLS = {
    "replicated": "#d9d9d9",
    "round_robin": "#f4b95f",
    "round_robin gather": "#f0e68c",
    "zero1": "#8cc9f0",
    "zero1 boundary": "#a9b8f4",
    "layerwise": "#7fcfb4",
    "gram": "#c5e08a",
    "owner": "#dda6c6",
    "owner_per_replica": "#f0936a",
    "gather_all": "#b0b0b0",
    "nothing fits": "#ffffff",
}
INK = "#1b1b1b"


@dataclass(frozen=True, slots=True)
class Regime:
    """The winner on ``ranks`` ranks with links ``factor`` times as fast; None if no strategy fits.

    ``over_adamw``: seconds of the winner's step over seconds of AdamW's step, minus 1. Below zero, the winner
    is faster. ``over_ddp`` compares with AdamW under DDP; None if FSDP2 cuts parameters.
    """

    ranks: int
    factor: float
    winner: str | None
    over_adamw: float
    over_ddp: float | None


@dataclass(frozen=True, slots=True)
class RegimeMap:
    """Winners by ranks and bandwidth, for the model, machine and bucket size of a plan."""

    plan: ModelPlan
    regimes: tuple[Regime, ...]

    @property
    def ranks(self) -> list[int]:
        return sorted({one.ranks for one in self.regimes})

    @property
    def winners(self) -> list[str]:
        """All strategies that win somewhere, in the order of ``FILLS``."""
        found = {one.winner or "nothing fits" for one in self.regimes}
        return [name for name in FILLS if name in found]


def survey(plan: ModelPlan) -> RegimeMap:
    """Plan the same model on grids with smaller and larger dp."""
    return RegimeMap(plan, tuple(_regime(one, factor) for one in _columns(plan) for factor in FACTORS))


def _columns(plan: ModelPlan) -> Iterator[ModelPlan]:
    """The plan itself, and the plans of other grids that divide the model."""
    each, there = plan.ranks // plan.sizes["dp"], plan.ranks
    while there * APART <= MOST_RANKS:
        there *= APART
    while there >= each:
        with suppress(GridError):  # a smaller grid may have too few ranks for the experts
            if there == plan.ranks:
                yield plan
            elif there % each == 0:
                yield plan_model(
                    plan.shape,
                    {**plan.sizes, "dp": there // each},
                    plan.machine,
                    round_bytes=plan.round_bytes,
                    window=plan.window,
                    dtypes=plan.dtypes,
                )
        there //= APART


def _regime(plan: ModelPlan, factor: float) -> Regime:
    best = plan.winner_at(factor)
    if best is None:
        return Regime(plan.ranks, factor, None, 0.0, None)
    mine = best.seconds_at(factor)
    ddp = mine / plan.adamw_at(factor, sharded=False) - 1 if plan.adamw_ddp else None
    return Regime(plan.ranks, factor, best.strategy, mine / plan.adamw_at(factor) - 1, ddp)


def draw_map(found: RegimeMap) -> str:
    """The map as an SVG document. A cell has its winner's colour, and shows the winner's time relative to
    AdamW."""
    across, down = len(found.ranks), len(FACTORS)
    width, height = max(8.0, 2.3 + 1.1 * across), 2.8 + 0.6 * down
    figure = Figure(figsize=(width, height), dpi=96, facecolor="#ffffff")
    frame = (1.7 / width, 2.05 / height, 1.1 * across / width, 0.6 * down / height)
    axes = figure.add_axes(frame)
    for one in found.regimes:
        _draw_regime(axes, found.ranks.index(one.ranks), FACTORS.index(one.factor), one)
    here = found.ranks.index(found.plan.ranks), FACTORS.index(1.0)
    axes.add_patch(Rectangle(here, 1, 1, fill=False, edgecolor=INK, linewidth=2.5, zorder=3, clip_on=False))
    _label(axes, found)
    patches = [Patch(facecolor=FILLS[name], edgecolor=INK, label=name) for name in found.winners]
    corner = (0.01, 0.86 / height)
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=corner, ncols=4, fontsize=11, frameon=False
    )
    two = any(one.over_ddp is not None for one in found.regimes)
    adamw = "AdamW's, with ZeRO-1 (top) and DDP (bottom)" if two else "AdamW's, with FSDP2"
    marks = "Bold: faster than AdamW. Framed: the given grid. All links change by the same factor."
    said = f"In a cell: the step's time relative to {adamw}.\n{marks}\n{PREDICTED}"
    figure.text(0.15 / width, 0.12 / height, said, size=9.5, color=INK, linespacing=1.4)
    with svg_style("regimes"):
        return svg_document(figure)


def _draw_regime(axes: Axes, x: int, y: int, one: Regime) -> None:
    name = one.winner or "nothing fits"
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=FILLS[name], edgecolor="#ffffff", linewidth=1.5))
    numbers = [number for number in (one.over_adamw, one.over_ddp) if one.winner and number is not None]
    for number, place in zip(numbers, (0.68, 0.32) if len(numbers) > 1 else (0.5,), strict=False):
        weight = "bold" if round(100 * number) < 0 else "normal"
        axes.text(
            x + 0.5, y + place, _say(number), size=11, ha="center", va="center", color=INK, weight=weight
        )


def _say(over: float) -> str:
    """A relative difference in percent, or as a factor if it is large.

    >>> _say(0.534), _say(-0.12), _say(13.3)
    ('+53 %', '−12 %', '14.3 ×')
    """
    return f"{over:+.0%}".replace("%", " %").replace("-", "−") if over < 9.995 else f"{over + 1:.3g} ×"


def _label(axes: Axes, found: RegimeMap) -> None:
    plan, machine = found.plan, found.plan.machine
    link = machine.between or machine.inside
    columns, rows = range(len(found.ranks)), range(len(FACTORS))
    axes.set(xlim=(0, len(columns)), ylim=(0, len(rows)))
    axes.set_xticks([x + 0.5 for x in columns], [f"{ranks:,}" for ranks in found.ranks], size=11)
    times = [f"×{factor:g}" if factor >= 1 else f"÷{1 / factor:g}" for factor in FACTORS]
    speeds = [
        f"{link.bandwidth * factor / 1e9:.3g} ({said})" for factor, said in zip(FACTORS, times, strict=True)
    ]
    axes.set_yticks([y + 0.5 for y in rows], speeds, size=11)
    axes.set_xlabel("ranks (dp changes)", size=11)
    axes.set_ylabel("GB/s per rank" + (" between nodes" if machine.between else ""), size=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    fixed = "".join(f", {axis}={plan.sizes[axis]}" for axis in AXES[1:] if plan.sizes[axis] > 1)
    axes.set_title(f"{plan.shape.name}{fixed}: the fastest step\n{machine.name}", size=12, loc="left")
