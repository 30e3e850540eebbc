"""Lesson 06: its checkers tell right from wrong on several grids and on real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from muon_tutorial import Grid
from muon_tutorial.learn import the_grid as lesson

from .answers import PASSES, altered, judged

GRIDS = [(2, 3), (3, 1), (1, 4), (1, 1)]


def made(*lists: Any) -> Any:
    return lambda dp, tp: lists if len(lists) != 1 else lists[0]


def with_dp_groups(dp_groups: Any) -> Any:
    """An answer with the right tp groups. ``dp_groups`` turns the right dp groups into the answer's."""
    return lambda dp, tp: (dp_groups(dp, tp, lesson.groups(dp, tp)[0]), lesson.groups(dp, tp)[1])


one_too_short = with_dp_groups(lambda dp, tp, _: [list(range(p, dp * tp - 1, tp)) for p in range(tp)])
by_the_other_step = with_dp_groups(lambda dp, tp, _: [list(range(p, dp * tp, dp)) for p in range(tp)])


@pytest.mark.parametrize("dp_tp", GRIDS)
def test_the_reference_and_other_right_groups_pass(dp_tp: tuple[int, int]) -> None:
    assert lesson.groups_exercise(*dp_tp).check(lesson.groups)
    assert lesson.groups_exercise(*dp_tp).check(from_coordinates)


def from_coordinates(dp: int, tp: int) -> list[tuple[tuple[int, ...], ...]]:
    grid = Grid.of(dp=dp, tp=tp)
    return [
        tuple({tuple(reversed(grid.at(rank).group(axis))): None for rank in grid.ranks})
        for axis in ("dp", "tp")
    ]


COLUMNS, ROWS = [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]


WRONG_GROUPS = [
    (lambda dp, tp: lesson.groups(dp, tp)[::-1], "rows and columns are swapped. [0, 1, 2] is a row"),
    (lambda dp, tp: lesson.groups(tp, dp)[::-1], "rank 1 (dp=0, tp=1) and rank 0 (dp=0, tp=0) differ in tp"),
    (one_too_short, "dp group [2]: rank 5 (dp=1, tp=2) is missing"),
    (by_the_other_step, "dp group [0, 2, 4]: rank 2 (dp=0, tp=2) and rank 0"),
    (with_dp_groups(lambda dp, tp, right: right[1:]), "rank 0 (dp=0, tp=0) is in no dp"),
    (with_dp_groups(lambda dp, tp, right: right * 2), "rank 0 is in two dp groups"),
    (made([[0, 3, 6], [1, 4], [2, 5]], ROWS), "there is no rank 6; ranks go from 0 to 5"),
    (made([[0, 3, 3], [1, 4], [2, 5]], ROWS), "dp group [0, 3, 3]: a rank is in it twice"),
    (made([*COLUMNS, []], ROWS), "a dp group is empty"),
    (made(COLUMNS, [[0, 1, 2], [3, 4]]), "tp group [3, 4]: rank 5 (dp=1, tp=2) is missing"),
    (made(COLUMNS, ROWS), "On a grid of dp 3, tp 2"),
    (made([0, 1], [2, 3]), "dp_groups is no list of lists"),
    (made([[0, 3]]), "return two lists"),
    (lambda dp, tp: dp / 0, "ZeroDivisionError"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (partial(lesson.groups_exercise, 2, 3), WRONG_GROUPS),
    (lesson.mismatch_exercise, [(lambda lists: lists[9], "raised IndexError")]),
)


# On real ranks.


answers = partial(altered, lesson.who_answers)
WAYS = [
    (lesson.who_answers, PASSES),
    (lambda rank, groups: lesson.who_answers(rank, groups)[:1], "Rank 0 heard [[0, 2]]; in its groups, in"),
    (lambda rank, groups: len(lesson.who_answers(rank, groups)) and rank, "Rank 0 returned 0. Return a list"),
    (
        answers(("if rank in ranks", "if ranks"), ("append(found)", "extend([found] * (rank in ranks))")),
        "Rank 0 also asks in 2 groups that it is not in. Only members may.",
    ),
    (
        answers(("dist.all_gather_object(found, rank, group=group)", "found = ranks")),
        "Rank 0 is in 2 groups, and asked in 0",
    ),
    (lambda *given: [tuple(ranks) for ranks in lesson.who_answers(*given)], "Make it a list of lists."),
]


WAITING = [
    (answers(("group = ", "if rank in ranks:\n            group = ")), "Is yours under the if?"),
    (
        lambda rank, groups: lesson.who_answers(rank, groups[::-1] if rank == 0 else groups),
        "Rank 0 makes its groups in another order",
    ),
]
"""Answers with which some ranks wait until they time out."""


test_a_wrong_way_to_answer_is_told_who_left_out_what = judged(
    (partial(lesson.answers_exercise, 2, 2, timeout=5.0), WAYS),
    (partial(lesson.answers_exercise, 2, 2, timeout=6.0), WAITING),
)
