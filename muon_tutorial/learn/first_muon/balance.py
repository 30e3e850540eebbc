"""Lesson 04: owners chosen by cost, and five matrices for which longest first is not optimal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ... import Grid, Matrix, Plan, owner, round_robin
from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import longest_first, newton_schulz_cost
from ...plan.strategies import plan_imbalance
from .on_ranks import gpt_shapes

TOY = (8, 7, 6, 5, 4)
"""Costs of five matrices, in any unit, for which longest first on two owners is not optimal."""
TOY_BEST = (0, 0, 1, 1, 1)
"""Owners with the least makespan for ``TOY``."""


def loads_of(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The work of each rank.

    >>> loads_of([8, 7, 6, 5, 4], [0, 1, 1, 0, 0], 2)
    [17.0, 13.0]
    """
    loads = [0.0] * ranks
    for cost, rank in zip(costs, owners, strict=True):
        loads[rank] += cost
    return loads


def deal_longest_first(costs: list[int], ranks: int) -> list[int]:
    """Owners as the package chooses them: costliest first, each to the rank with the least work so far."""
    return longest_first(costs, [0] * ranks)


def toy_makespans() -> dict[str, int]:
    """The makespans of ``TOY`` on two owners: with the costliest first, and the least possible."""
    longest = deal_longest_first(list(TOY), 2)
    return {
        name: int(max(loads_of(TOY, owners, 2)))
        for name, owners in (("longest_first", longest), ("best", TOY_BEST))
    }


LARGE = gpt_shapes(12, 768)
MOST = 16
WORST = 6
Way = Literal["by index", "longest first"]
WAYS: tuple[Way, Way] = ("by index", "longest first")
COSTS = [DEFAULT_STEPS * newton_schulz_cost(shape) for shape in LARGE.values()]
"""Floating-point operations of Newton–Schulz, all its iterations, for each matrix of the large model."""


def plan_of(ranks: int, way: Way) -> Plan:
    """The package's plan for the large model: round robin, or its owners chosen with the costliest first."""
    matrices = [Matrix(number, name, shape) for number, (name, shape) in enumerate(LARGE.items())]
    if way == "by index":
        return round_robin(matrices, Grid.of(dp=ranks), order="index")
    one_bucket = sum(matrix.numel for matrix in matrices) * matrices[0].grad_dtype.itemsize
    return owner(matrices, Grid.of(dp=ranks), round_bytes=one_bucket)


def fair_shares(ranks: int, way: Way = "by index") -> float:
    """The makespan for the large model, relative to a fair share: 1 is perfect."""
    return plan_imbalance(plan_of(ranks, way))
