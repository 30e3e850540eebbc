"""Lesson 05: its checkers tell right from wrong on several grids, and its rulers agree with the plan."""

from __future__ import annotations

from typing import Any

import pytest

from muon_tutorial.learn import zero1_buffer as lesson
from muon_tutorial.learn.zero1_buffer import on_ranks

from .answers import assert_quiz, assert_wrong

GRIDS = [(4, 1), (3, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
@pytest.mark.parametrize("bucket", lesson.BUCKETS)
def test_the_prediction_knows_right_from_wrong(dp: int, tp: int, bucket: int) -> None:
    plan = lesson.plan_of(dp, tp, bucket)
    right, padding = lesson.split_matrices(plan), lesson.padding_of(plan)
    assert lesson.split_exercise(plan).check(right, padding)
    odd: list[Any] = ["A", ["A", "Z"], 5, None, [["A"]]]
    wrong: list[tuple[Any, Any, str]] = [(answer, padding, "list of names") for answer in odd]
    wrong += [(right[1:], padding, "keep parts of it")] if right else []
    wrong += [([*right, name], padding, "lies whole") for name in lesson.SHAPES if name not in right]
    wrong += [(right, padding + 1, "padding: not"), (right, None, "padding: not None")]
    for case in wrong:
        assert_wrong(lesson.split_exercise(plan), *case)


def from_plan(whole: tuple[int, int], place: int, length: int) -> tuple[int, int]:
    shared = sorted(set(range(*whole)) & set(range(place * length, (place + 1) * length)))
    return (shared[0] - place * length, shared[-1] + 1 - place * length) if shared else (0, 0)


def test_ranges_and_bytes_are_known() -> None:
    assert all(lesson.range_exercise().check(answer) for answer in (lesson.local_range, from_plan))
    assert lesson.bytes_exercise(4, 1, 400).check(882, 404)


@pytest.mark.parametrize(("dp", "tp"), [*GRIDS, (7, 1)])
def test_an_entry_lies_where_it_is_said_to(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp, 400)
    for meta in plan.dist_meta(plan.grid.at(0)):
        flat = lesson.whole_matrix(plan, meta, 0)
        for entry in (0, len(flat) // 2, len(flat) - 1):
            found = lesson.locate(plan, meta.name, *divmod(entry, meta.shape[1]))
            kept = lesson.my_slice(plan, found.bucket, found.rank // tp, 0)
            assert (found.entry, kept[found.offset]) == (entry, flat[entry])
    assert str(found) in lesson.draw_entry(plan, found).alt


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int) -> None:
    plan = lesson.plan_of(dp, tp, 400)
    kept = sum(stop - start for start, stop in (m.local_range for m in plan.dist_meta(plan.grid.at(0))))
    right = {"kept": kept, "padding": lesson.padding_of(plan), "buckets": 6 if tp == 1 else 4}
    assert_quiz(lesson.quiz(plan), right)


def test_costs_by_bucket_size_are_compared_on_the_slowest_and_busiest_rank() -> None:
    def cost(collectives: int, worked: int, seconds: float) -> on_ranks.BucketCost:
        return on_ranks.BucketCost(0, 0, collectives, 0, worked, 0, seconds)

    for last, faster in ((4.0, 1.0), (1.9, 2.1), (0.6, 6.7)):
        costs = [[cost(72, 24, 3.9), cost(6, 9, 0.1)], [cost(72, 20, 4.0), cost(6, 8, last)]]
        assert on_ranks.found_costs(costs) == {"matrices": 24, "collectives": 6, "times faster": faster}
