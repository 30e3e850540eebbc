"""Lesson 05 on real ranks: collectives, padding and time of a step, by bucket size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ... import Ledger, LiveWorld, Muon, build_mesh, zero1
from ..inputs import measure
from .ranges import padding_of

LAYERS = 4
LAYER = ((61, 61), (61, 61), (61, 61), (61, 61), (245, 61), (61, 245))
BYTES = (10_000, 40_000, 160_000, 640_000)


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One step with buckets of one size: what rank 0 asked for, and seconds."""

    size: int
    buckets: int
    collectives: int
    padding: int
    kept: int
    seconds: float


def measure_buckets(rank: int, dp: int, tp: int, seed: int, steps: int) -> list[BucketCost]:
    """Steps with buckets of several sizes, on real ranks. Must be called by all ranks."""
    world = LiveWorld(build_mesh({"dp": dp, "tp": tp}))
    return [_measure_bucket(world, size, seed, steps) for size in BYTES]


def _measure_bucket(world: LiveWorld, size: int, seed: int, steps: int) -> BucketCost:
    ledger = Ledger()
    muon = Muon(_matrices(seed), strategy=partial(zero1, bucket_bytes=size), mesh=world, tp_dim=None)
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
        sum(state["momentum_buffer"].numel() for state in muon.state.values()),
        measure.median_seconds(muon.step, steps),
    )


def _matrices(seed: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Matrices of about the shapes that a small GPT has, whole on every rank, each with a gradient."""
    generator, named = torch.Generator().manual_seed(seed), []
    for number, shape in enumerate(LAYER * LAYERS):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        named.append((f"matrix {number}", parameter))
    return named


def say_buckets(costs: Sequence[Sequence[BucketCost]]) -> str:
    """The table of bucket sizes; seconds are those of the slowest rank."""
    lines = ["bucket, at most   buckets   collectives   padding   numbers kept   a step"]
    for number, cost in enumerate(costs[0]):
        slowest = max(of_rank[number].seconds for of_rank in costs)
        lines.append(
            f"{cost.size:9,} bytes   {cost.buckets:7}   {cost.collectives:11}   {cost.padding:7}   "
            f"{cost.kept:12,}   {slowest * 1e3:.1f} ms"
        )
    return "\n".join(lines)
