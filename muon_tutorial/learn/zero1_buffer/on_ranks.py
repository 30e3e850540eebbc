"""Lesson 05: matrices in buckets, the ranges of them that each rank keeps, and steps on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ... import Bucket, DistMeta, Grid, Ledger, LiveWorld, Matrix, Muon, Plan, Shard, build_mesh, zero1
from ...evidence.predict import predict
from ..inputs import measure
from ..my_muon.reference import local_range as local_range

SHAPES = {"A": (12, 10), "B": (6, 8), "C": (15, 11), "D": (5, 7), "E": (10, 13), "F": (9, 6), "G": (3, 11)}
BUCKETS = (100, 200, 400, 1000)
Cut = Literal["bucket", "list"]
Gather = Literal["all", "boundary"]
CUTS: tuple[Cut, ...] = ("bucket", "list")
ITEM = 4


def plan_of(dp: int, tp: int, bucket: int, gather: Gather = "all", cut: Cut = "bucket") -> Plan:
    """The plan of the seven matrices. A bucket holds at most ``bucket`` entries, or one larger matrix."""
    matrices = [Matrix(i, name, shape, (("tp", Shard(0)),)) for i, (name, shape) in enumerate(SHAPES.items())]
    return zero1(matrices, Grid.of(dp=dp, tp=tp), cut=cut, round_bytes=bucket * ITEM, gather=gather)


def starts_of(plan: Plan) -> list[int]:
    """Where each bucket begins if all buckets lie one after the other."""
    lengths = [length_of(plan, bucket) for bucket in plan.buckets]
    return [sum(lengths[:number]) for number in range(len(lengths))]


def length_of(plan: Plan, bucket: Bucket) -> int:
    return bucket.length(bucket.model_layout, plan.grid.at(0))


def padding_of(plan: Plan) -> int:
    """Entries in the buffers of rank 0 that belong to no matrix."""
    return sum(bucket.padding(plan.grid.at(0)) for bucket in plan.buckets)


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Where one entry lies: in its matrix, in its bucket, and in which rank's slice."""

    matrix: str
    row: int
    column: int
    entry: int
    bucket: int
    in_bucket: int
    rank: int
    offset: int

    def __str__(self) -> str:
        where = f"entry {self.entry} of {self.matrix}, entry {self.in_bucket} of bucket {self.bucket}"
        keeper = f"rank {self.rank} keeps it, at {self.offset} of its slice."
        return f"{self.matrix}[{self.row}, {self.column}] is {where}: {keeper}"


def locate(plan: Plan, matrix: str, row: int, column: int) -> EntryPlace:
    """Where an entry lies. If tp cuts the matrix, the entry is in the piece at tp place 0."""
    meta = next(meta for meta in plan.dist_meta(plan.grid.at(0)) if meta.name == matrix)
    entry = row * meta.shape[1] + column
    in_bucket = meta.global_range[0] + entry
    place, offset = divmod(in_bucket, slice_length(plan, meta.bucket_idx))
    rank = place * plan.grid.size("tp")
    return EntryPlace(matrix, row, column, entry, meta.bucket_idx, in_bucket, rank, offset)


def slice_length(plan: Plan, bucket: int) -> int:
    return length_of(plan, plan.buckets[bucket]) // plan.grid.size("dp")


def whole_buffer(plan: Plan, seed: int) -> list[Tensor]:
    """Each bucket's flat buffer, which no rank keeps whole: momentum of all matrices, and padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, (length_of(plan, bucket),), generator=generator) for bucket in plan.buckets]


def my_slice(plan: Plan, bucket: int, place: int, seed: int) -> Tensor:
    """The slice of a bucket that the rank at a dp position keeps."""
    return whole_buffer(plan, seed)[bucket].chunk(plan.grid.size("dp"))[place].clone()


def whole_matrix(plan: Plan, meta: DistMeta, seed: int) -> Tensor:
    """A matrix, flat, read from the whole buffer of its bucket."""
    return whole_buffer(plan, seed)[meta.bucket_idx][slice(*meta.global_range)]


def split_matrices(plan: Plan) -> list[str]:
    names = [meta.name for meta in plan.dist_meta(plan.grid.at(0))]
    return [name for name in names if len(kept_of(plan, name)) > 1]


def kept_of(plan: Plan, name: str) -> dict[int, int]:
    """How many entries of a matrix each rank keeps. As in the rulers, only ranks at tp position 0 count."""
    found = {}
    for rank in plan.grid.at(0).group("dp"):
        meta = next(meta for meta in plan.dist_meta(plan.grid.at(rank)) if meta.name == name)
        if size := meta.local_range[1] - meta.local_range[0]:
            found[rank] = size
    return found


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
    worked = sum(start < stop for start, stop in (meta.local_range for meta in plan.dist_meta(world.at)))
    collectives, sent = sum(row.collectives for row in rows), sum(row.ring for row in rows)
    seconds = measure.median_seconds(muon.step, steps)
    return BucketCost(size, len(plan.buckets), collectives, padding_of(plan), worked, sent, seconds)


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
