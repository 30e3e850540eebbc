"""Lesson 05: its checkers know right from wrong on several grids, and its rulers say what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from muon_tutorial.learn import zero1_buffer as lesson

from .answers import assert_quiz, assert_wrong

GRIDS = [(4, 1), (3, 1), (2, 2), (1, 1)]
Range = tuple[int, int]


def from_the_bucket(whole: Range, place: int, length: int) -> Range:
    start, stop = max(whole[0], place * length), min(whole[1], (place + 1) * length)
    return (start, stop) if start < stop else (0, 0)


def backwards_where_empty(whole: Range, place: int, length: int) -> Range:
    begin = place * length
    return max(whole[0], begin) - begin, min(whole[1], begin + length) - begin


def without_an_end(whole: Range, place: int, length: int) -> Range:
    start, stop = max(whole[0] - place * length, 0), max(whole[1] - place * length, 0)
    return (start, stop) if start < min(stop, length) else (0, 0)


def inclusive(whole: Range, place: int, length: int) -> Range:
    start, stop = lesson.local_range(whole, place, length)
    return (start, stop - 1) if stop else (0, 0)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda whole, place, length: None, "give a pair"),
        (lambda whole, place, length: whole, "reaches out of the slice"),
        (from_the_bucket, "counts from the start of the bucket"),
        (backwards_where_empty, "they share nothing; say (0, 0)"),
        (without_an_end, "reaches out of the slice"),
        (inclusive, "leaves out the last number"),
        (lambda whole, place, length: whole[2], "raised IndexError"),
        (5, "Give a function."),
    ],
)
def test_wrong_ranges_are_told_what_is_wrong_with_them(answer: Any, says: str) -> None:
    assert_wrong(lesson.range_exercise(), answer, says)


def test_the_right_range_passes_and_the_stub_is_open() -> None:
    assert lesson.range_exercise().check(lesson.local_range)
    assert lesson.range_exercise().check(lambda whole, place, length: list(from_plan(whole, place, length)))
    assert lesson.range_exercise().check(lambda whole, place, length: ...).passed is None


def from_plan(whole: Range, place: int, length: int) -> Range:
    shared = sorted(set(range(*whole)) & set(range(place * length, (place + 1) * length)))
    return (shared[0] - place * length, shared[-1] + 1 - place * length) if shared else (0, 0)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
@pytest.mark.parametrize("bucket", lesson.BUCKETS)
def test_the_prediction_knows_right_from_wrong(dp: int, tp: int, bucket: int) -> None:
    plan = lesson.plan_of(dp, tp, bucket)
    right = lesson.split_matrices(plan)
    assert lesson.split_exercise(plan).check(right)
    odd: list[Any] = ["A", ["A", "Z"], 5, None, [["A"]]]
    wrong: list[tuple[Any, str]] = [(answer, "list of names") for answer in odd]
    wrong += [(right[1:], "keep parts of it")] if right else []
    wrong += [([*right, name], "lies whole") for name in lesson.SHAPES if name not in right]
    for case in wrong:
        assert_wrong(lesson.split_exercise(plan), *case)


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp, 400)
    kept = sum(stop - start for start, stop in (m.local_range for m in plan.dist_meta(plan.grid.at(0))))
    right = {"kept": kept, "padding": lesson.padding_of(plan), "buckets": 5 if tp == 1 else 3}
    wrong = {"kept": (kept + 1, "last column"), "padding": (99, "above the rulers")}
    assert_quiz(lesson.quiz(plan), right, {**wrong, "buckets": (1, "Press the button")})


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_parts_taken_with_local_range_make_the_matrix(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp, 400)
    for meta in plan.dist_meta(plan.grid.at(0)):
        slices = [lesson.my_slice(plan, meta.bucket_idx, place, 0) for place in range(dp)]
        parts = [
            kept[slice(*lesson.local_range(meta.global_range, place, len(kept)))]
            for place, kept in enumerate(slices)
        ]
        assert torch.equal(torch.cat(parts), lesson.whole_matrix(plan, meta, 0))


@pytest.mark.parametrize(("dp", "tp"), [*GRIDS, (9, 1), (2, 5)])
def test_the_rulers_say_where_every_matrix_lies(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp, 200)
    said = lesson.draw_rulers(plan).alt
    assert all(
        f"{meta.name} from {meta.global_range[0]} to {meta.global_range[1]}" in said
        for meta in plan.dist_meta(plan.grid.at(0))
    )


@pytest.mark.live
def test_larger_buckets_mean_fewer_collectives_and_equal_shares() -> None:
    from muon_tutorial import launch

    measured: Callable[..., list[lesson.BucketCost]] = lesson.measure_buckets
    costs = launch(measured, 2, args=(2, 1, 0, 1))
    collectives = [cost.collectives for cost in costs[0]]
    assert collectives == sorted(collectives, reverse=True)
    assert len(set(collectives)) == len(collectives)
    assert all(abs(cost.kept - other.kept) <= 2 * cost.buckets for cost, other in zip(*costs, strict=True))
    assert all(f"{cost.collectives}" in lesson.say_buckets(costs) for cost in costs[0])
