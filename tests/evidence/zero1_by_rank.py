"""The formula of ``zero1``, rank by rank, with which the prediction and the ledger are compared."""

from __future__ import annotations

from itertools import accumulate

from muon_tutorial import Coordinate, Plan
from muon_tutorial.engine.travel import AT_ONCE
from muon_tutorial.evidence.formulas import tp_gathers, zero1_gather_all


def touched_pieces(plan: Plan, at: Coordinate) -> list[int]:
    """Elements per tensor-parallel rank of each matrix that this rank orthogonalizes and tp cuts."""
    return [
        entry.size
        for bucket in plan.buckets
        for entry in bucket.entries
        if entry.route.hops and bucket.works_on(entry, at)
    ]


def zero1_by_rank(plan: Plan) -> list[int]:
    """Bytes that each rank sends for a ``zero1`` plan that gathers whole buckets, for all ranks at once.

    Bytes that all ranks send equally are summed once, and the tensor-parallel gather of each matrix is added
    to its workers as one range, so thousands of ranks cost no more than a few.
    """
    grid = plan.grid
    D, T = grid.size("dp"), grid.size("tp")
    steps = [_alike(plan)] + [0] * D
    for bucket in plan.buckets:
        for entry in bucket.entries:
            if entry.route.hops:
                cost = tp_gathers(T, [entry.size])
                steps[entry.workers.start] += cost
                steps[min(entry.workers.stop, D)] -= cost
    by_dp = list(accumulate(steps))
    return [by_dp[grid.at(rank)["dp"]] for rank in grid.ranks]


def _alike(plan: Plan) -> int:
    D, flags = plan.grid.size("dp"), 9 * 8
    # Along a short axis, each rank sends them to every other; along a longer one, a ring sums them.
    total = sum(
        (size - 1) * flags if size <= AT_ONCE else 2 * (size - 1) * flags // size for size in plan.grid.sizes
    )
    for bucket in plan.buckets if D > 1 else ():
        g, p = bucket.gradient.dtype.itemsize, bucket.parameter.dtype.itemsize
        total += int(zero1_gather_all(D, bucket.length(bucket.model_layout, plan.grid.at(0)), g, p))
    return total
