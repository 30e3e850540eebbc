"""Lesson 05: its checkers tell right from wrong on several grids, and its rulers agree with the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from muon_tutorial.learn import zero1_buffer as lesson

from .answers import PASSES, assert_quiz, assert_wrong, judged

GRIDS = [(4, 1), (3, 1), (2, 2), (1, 1)]
Range = tuple[int, int]


def from_plan(whole: Range, place: int, length: int) -> Range:
    shared = sorted(set(range(*whole)) & set(range(place * length, (place + 1) * length)))
    return (shared[0] - place * length, shared[-1] + 1 - place * length) if shared else (0, 0)


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


def by_hand(sizes: list[int], dp: int, most: int) -> Any:
    """The notebook's solution."""
    buckets: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        if buckets[-1] and sum(sizes[i] for i in buckets[-1]) + size > most:
            buckets.append([])
        buckets[-1].append(index)
    ranges: list[list[Any]] = [[] for place in range(dp)]
    for number, bucket in enumerate(buckets):
        length, start = math.ceil(sum(sizes[i] for i in bucket) / dp), 0
        for i in bucket:
            lies = (start, start + sizes[i])
            for place in range(dp):
                ranges[place].append((number, lies, lesson.local_range(lies, place, length)))
            start += sizes[i]
    return ranges


def changed(change: Callable[[int, Range, Range], Any]) -> Callable[[list[int], int, int], Any]:
    """A plan of all ranks that is right except for one change in every item."""
    return lambda *given: [[change(*item) for item in ranges] for ranges in lesson.all_ranges(*given)]


WRONG_PLANS = [
    (lambda sizes, dp, most: None, "give a list of 4 lists"),
    (lambda sizes, dp, most: [[]] * dp, "rank 0 needs 7 entries"),
    (lambda sizes, dp, most: [[1] * len(sizes)] * dp, "give (bucket, global_range, local_range)"),
    (changed(lambda bucket, whole, local: (0, whole, local)), "it lies in bucket 1, not 0"),
    (changed(lambda bucket, whole, local: (bucket, local, local)), "in its bucket it lies from"),
    (changed(lambda bucket, whole, _: (bucket, whole, whole)), "its local_range is (0, 92), not (0, 120)"),
    (lambda sizes, dp, most: sizes[99], "raised IndexError"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (lesson.range_exercise, [(lesson.local_range, PASSES), (from_plan, PASSES)]),
    (partial(lesson.bytes_exercise, 4, 1, 400), [(882, 404, PASSES)]),
    (lesson.plan_exercise, WRONG_PLANS),
)


def test_the_plan_by_hand_is_the_packages_at_par_and_a_wrong_one_is_drawn() -> None:
    verdict = lesson.plan_exercise().check(by_hand)
    assert verdict.passed
    assert "par is 15." in verdict.message
    drawn = lesson.plan_exercise().check(lambda sizes, dp, most: by_hand(sizes, dp, 10**6)).picture
    assert drawn is not None
    assert "Yours: rank 0:" in drawn.alt
    for sizes, dp, most in lesson.TRIES:
        assert by_hand(list(sizes), dp, most) == lesson.all_ranges(sizes, dp, most)


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
