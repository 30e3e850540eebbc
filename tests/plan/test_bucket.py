"""The virtual buffer of ZeRO-1 and its master plan."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from muon_tutorial import STRATEGIES, DistMeta, Grid, Matrix, Shard, zero1
from muon_tutorial.plan.bucket import fill_buckets
from muon_tutorial.plan.rounds import IN_FLIGHT

from .cases import Case, cases
from .variants import EVEN_SLICES, VARIANTS


def test_the_default_cap_is_25_megabytes_and_a_heavier_matrix_travels_alone() -> None:
    for builder in STRATEGIES.values():
        assert inspect.signature(builder).parameters["round_bytes"].default == 25_000_000
    assert [*fill_buckets("abcd", [16, 256, 16, 16], 32)] == [("a",), ("b",), ("c", "d")]


@given(case=cases())
@settings(deadline=None, max_examples=20)
def test_layerwise_slices_are_whole_matrices_and_pad_nothing(case: Case) -> None:
    for bucket in case.plan(VARIANTS["layerwise"]).buckets:
        lengths = [bucket.length(bucket.storage_layout, at) for at in case.places if at["tp"] == 0]
        assert sum(lengths) == sum(entry.size for entry in bucket.entries)
        for entry in bucket.entries:
            place = entry.workers.start // (case.grid.size("tp") if "tp" in bucket.axes else 1)
            start = sum(lengths[:place])
            assert start <= entry.offset
            assert entry.offset + entry.size <= start + lengths[place]


@pytest.mark.parametrize("variant", EVEN_SLICES)
@given(case=cases())
@settings(deadline=None, max_examples=20)
def test_one_list_is_cut_into_equal_slices_whatever_the_rounds(variant: str, case: Case) -> None:
    dp, plan = case.grid.size("dp"), case.plan(VARIANTS[variant])
    for buffer in {bucket.buffer for bucket in plan.buckets}:
        its = [bucket for bucket in plan.buckets if bucket.buffer == buffer]
        filled = sum(entry.size for bucket in its for entry in bucket.entries)
        for at in case.places:
            assert sum(bucket.length(bucket.model_layout, at) for bucket in its) < max(filled, 1) + dp
            assert sum(bucket.length(bucket.storage_layout, at) for bucket in its) <= max(1, -(-filled // dp))
            for bucket in its:
                size = bucket.length(bucket.model_layout, at)
                assert bucket.padding(at) == size - sum(e.matrix.box(at).numel for e in bucket.entries)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith(("gram", "cut"))])
@given(case=cases())
@settings(deadline=None, max_examples=20)
def test_rounds_in_flight_hold_the_limit_or_as_many_of_the_largest(variant: str, case: Case) -> None:
    """The limit holds for each flat buffer; under ``owner``, for the bf16 matrices of one rank."""
    plan = case.plan(VARIANTS[variant])
    shared = case.grid.size("tp") if variant.startswith("layerwise") else 1  # their pieces share a buffer
    owned = variant.startswith("owner")
    held: dict[int, int] = {}
    for bucket in plan.buckets:
        weights = Counter[int]()
        for entry in bucket.entries:
            weighs = 2 * entry.matrix.numel if owned else weight(entry.matrix, case)
            weights[entry.workers.start if owned else 0] += weighs
        held[bucket.round] = max(held.get(bucket.round, 0), *weights.values())
    largest = max(2 * it.numel if owned else shared * weight(it, case) for it in case.matrices)
    for first in held:
        flight = [held.get(number, 0) for number in range(first, first + IN_FLIGHT)]
        assert sum(flight) <= max(shared * case.round_bytes, IN_FLIGHT * largest)


def weight(matrix: Matrix, case: Case) -> int:
    """Gradient bytes of a matrix on the tensor-parallel rank with the largest part of it."""
    return max(matrix.box(at).numel for at in case.places) * matrix.grad_dtype.itemsize


def test_buffers_count_the_kinds_and_buckets_count_on() -> None:
    kinds = ((0, torch.float32), (0, torch.bfloat16), (1, torch.float32))
    made = [
        Matrix(index, f"m{index}", (4, 4), (), *kinds[index % 3], kinds[index % 3][1]) for index in range(6)
    ]
    plan = zero1(made, Grid.of(dp=2), round_bytes=1)
    metas = plan.dist_meta(plan.grid.at(0))
    assert [meta.bucket_idx for meta in metas] == list(range(6))
    assert [bucket.round for bucket in plan.buckets] == [0, 0, 1, 1, 2, 2]
    assert [meta.buffer_idx for meta in metas] == [0, 0, 1, 1, 2, 2]


def test_a_straddling_column_parallel_matrix_by_hand() -> None:
    """Two matrices of 6 and 8 elements per rank in a buffer of 14, cut in the middle at 7."""
    made = [Matrix(0, "first", (3, 4), (("tp", Shard(1)),)), Matrix(1, "second", (4, 4), (("tp", Shard(1)),))]
    plan = zero1(made, Grid.of(dp=2, tp=2))
    assert plan.dist_meta(plan.grid.at(0)) == (
        DistMeta("first", (3, 2), (3, 4), 1, 0, 0, (0, 6), (0, 6)),
        DistMeta("second", (4, 2), (4, 4), 1, 0, 0, (6, 14), (6, 7)),
    )
    assert plan.dist_meta(plan.grid.at(2)) == (
        DistMeta("first", (3, 2), (3, 4), 1, 0, 0, (0, 6), (0, 0)),
        DistMeta("second", (4, 2), (4, 4), 1, 0, 0, (6, 14), (0, 7)),
    )
    assert [plan.workers(index) for index in (0, 1)] == [(0, 1), (0, 1, 2, 3)]
