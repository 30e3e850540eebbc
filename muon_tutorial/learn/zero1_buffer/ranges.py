"""Lesson 05: five small matrices in buckets, and the ranges of them that each rank keeps.

Sizes are odd on purpose, so that buckets need padding and slices cut through matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import Bucket, DistMeta, Grid, Matrix, Plan, Shard, zero1
from ...plan.bucket import Interval

SHAPES = {"A": (12, 10), "B": (7, 9), "C": (15, 11), "D": (8, 6), "E": (10, 13)}
BUCKETS = (100, 200, 400, 1000)
ITEM = 4

LocalRange = Callable[[Interval, int, int], Interval]


def plan_of(dp: int, tp: int, bucket: int) -> Plan:
    """The plan of the five matrices; a bucket holds at most ``bucket`` numbers, or one larger matrix."""
    matrices = [
        Matrix(index, name, shape, (("tp", Shard(0)),)) for index, (name, shape) in enumerate(SHAPES.items())
    ]
    return zero1(matrices, Grid.of(dp=dp, tp=tp), bucket_bytes=bucket * ITEM)


def starts_of(plan: Plan) -> list[int]:
    """Where each bucket begins, if all lay one after the other."""
    lengths = [length_of(plan, bucket) for bucket in plan.buckets]
    return [sum(lengths[:number]) for number in range(len(lengths))]


def length_of(plan: Plan, bucket: Bucket) -> int:
    return bucket.length(bucket.model_layout, plan.grid.at(0))


def padding_of(plan: Plan) -> int:
    """Numbers in the buffers of rank 0 that belong to no matrix."""
    return sum(bucket.padding(plan.grid.at(0)) for bucket in plan.buckets)


def say_plan(plan: Plan, rank: int) -> str:
    """The master plan as one rank reads it, a line a matrix."""
    lines = ["matrix  bucket  in the bucket  in the rank's slice"]
    for meta in plan.dist_meta(plan.grid.at(rank)):
        lines.append(
            f"{meta.name:6}  {meta.bucket_idx:6}  {_say(meta.global_range):13}  {_say(meta.local_range)}"
        )
    return "\n".join(lines)


def _say(interval: Interval) -> str:
    return f"{interval[0]} to {interval[1]}" if interval[0] < interval[1] else "nothing"


def whole_buffer(plan: Plan, seed: int) -> list[Tensor]:
    """For each bucket, the flat buffer that no rank keeps whole: momentum of all matrices, and padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, (length_of(plan, bucket),), generator=generator) for bucket in plan.buckets]


def my_slice(plan: Plan, bucket: int, place: int, seed: int) -> Tensor:
    """What the rank at a dp position keeps of a bucket."""
    whole = whole_buffer(plan, seed)[bucket]
    return whole.chunk(plan.grid.size("dp"))[place].clone()


def whole_matrix(plan: Plan, meta: DistMeta, seed: int) -> Tensor:
    """A matrix of the buffer, flat, read where it would lie if one rank kept all."""
    return whole_buffer(plan, seed)[meta.bucket_idx][slice(*meta.global_range)]


def split_matrices(plan: Plan) -> list[str]:
    """The matrices of which more than one slice has a part."""
    names = [meta.name for meta in plan.dist_meta(plan.grid.at(0))]
    return [name for name in names if len(keepers(plan, name)) > 1]


def keepers(plan: Plan, name: str) -> list[int]:
    """The ranks that keep a part of a matrix: as in the rulers, of those at tp position 0."""
    line = map(plan.grid.at, plan.grid.at(0).group("dp"))
    found = ((at.rank, meta) for at in line for meta in plan.dist_meta(at) if meta.name == name)
    return [rank for rank, meta in found if meta.local_range[0] < meta.local_range[1]]


def local_range(global_range: Interval, place: int, length: int) -> Interval:
    """Where a matrix lies in a slice, counted from the start of the slice: the exercise's reference."""
    begin = place * length
    first = max(global_range[0], begin) - begin
    last = min(global_range[1], begin + length) - begin
    return (first, last) if first < last else (0, 0)
