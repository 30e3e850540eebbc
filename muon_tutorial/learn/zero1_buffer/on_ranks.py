"""Lesson 05 on real ranks: collectives, bytes and time of a step by bucket size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ... import Ledger, LiveWorld, Muon, build_mesh, zero1
from ...evidence.predict import predict
from ..inputs import measure
from .ranges import Gather, padding_of, plan_of

LAYERS = 4
LAYER = ((61, 61), (61, 61), (61, 61), (61, 61), (245, 61), (61, 245))
BYTES = (10_000, 40_000, 160_000, 640_000)
WAYS: dict[str, Gather] = {"everything": "all", "straddling": "boundary"}


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One step with buckets of one size: this rank's collectives, matrices, bytes and seconds."""

    size: int
    buckets: int
    collectives: int
    padding: int
    worked: int
    sent: int
    seconds: float


def measure_buckets(rank: int, dp: int, tp: int, seed: int, steps: int) -> list[BucketCost]:
    """Measure steps with buckets of several sizes. Must be called by all ranks."""
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    return [_measure_bucket(world, size, seed, steps) for size in BYTES]


def _measure_bucket(world: LiveWorld, size: int, seed: int, steps: int) -> BucketCost:
    ledger = Ledger()
    generator, named = torch.Generator().manual_seed(seed), []
    for number, shape in enumerate(LAYER * LAYERS):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        named.append((f"matrix {number}", parameter))
    builder = partial(zero1, cut="bucket", round_bytes=size)
    muon = Muon(named, strategy=builder, mesh=world, tp_dim=None, window=1)
    world.observers.append(ledger)
    muon.step()
    world.observers.remove(ledger)
    plan = muon.plan
    assert plan is not None
    rows = [row for row in ledger.rows(world.at.rank) if row.phase != "gradient flags"]
    return BucketCost(
        size,
        len(plan.buckets),
        sum(row.collectives for row in rows),
        padding_of(plan),
        sum(start < stop for start, stop in (meta.local_range for meta in plan.dist_meta(world.at))),
        sum(row.ring for row in rows),
        measure.median_seconds(muon.step, steps),
    )


def found_costs(costs: Sequence[Sequence[BucketCost]]) -> dict[str, float]:
    """Matrices on the busiest rank in the smallest buckets; collectives and speedup with the largest."""
    first, *_, last = (max(each.seconds for each in one_size) for one_size in zip(*costs, strict=True))
    matrices, collectives = max(of_rank[0].worked for of_rank in costs), costs[0][-1].collectives
    return {"matrices": matrices, "collectives": collectives, "times faster": round(first / last, 1)}


def sent_for_momentum(dp: int, tp: int, bucket: int) -> dict[str, int]:
    """Bytes that rank 0 sends to make matrices whole: all buckets, or only straddling matrices."""
    found = {}
    for name, gather in WAYS.items():
        plan = plan_of(dp, tp, bucket, gather)
        by_phase = {row.phase: row.ring for row in predict(plan, plan.grid.at(0)).rows(0)}
        found[name] = by_phase.get("dp gather", 0)
    return found
