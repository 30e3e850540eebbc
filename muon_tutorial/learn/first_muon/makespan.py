"""Lesson 04: the work of the busiest rank, where matrices are dealt out in turn or the costliest first.

Work is counted in floating-point operations of Newton–Schulz, on the matrices of GPT-2's smallest.
"""

from __future__ import annotations

from typing import Literal

from ... import Grid, Matrix, Plan, owner, round_robin
from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import newton_schulz_cost
from ...plan.strategies import plan_imbalance
from .on_ranks import gpt_shapes

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
    """The makespan for the large model, in fair shares: 1 is perfect."""
    return plan_imbalance(plan_of(ranks, way))
