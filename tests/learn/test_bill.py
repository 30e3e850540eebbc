"""Lesson 10: bills equal the ledger, checkers tell right from wrong, and rounding is as the lesson says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from muon_tutorial.learn import bill as lesson
from muon_tutorial.learn.bill import costs, exercises, rounding
from muon_tutorial.learn.the_mirror.compare import different_bits, step_alone

from .answers import assert_quiz, assert_wrong, judged

GRIDS = [(3, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_who_works_on_a_matrix_is_known(dp: int, tp: int) -> None:
    runs = costs.runs_of(costs.plans_of(dp, tp), "o")
    exercise = exercises.runs_exercise(dp, tp)
    assert runs["replicated"] == dp * tp
    assert (runs["round_robin"], runs["owner"]) == (tp, 1)
    assert exercise.check(*runs.values())
    for place, name in enumerate(runs):
        wrong = [*runs.values()]
        wrong[place] += 1
        assert_wrong(exercise, *wrong, f"{name}: not {wrong[place]}.")


def scaled(phase: str, factor: int) -> Any:
    return lambda *given: {
        name: sent * (factor if name == phase else 1) for name, sent in lesson.bill(*given).items()
    }


WRONG_BILLS = [
    (scaled("gradient reduce_scatter", 2), "gradient reduce_scatter: yours"),
    (scaled("dp gather", 2), "dp gather: yours"),
    (lambda total, touched, dp, tp: lesson.bill(total, total, dp, tp), "tp gather: yours"),
    (lambda total, touched, dp, tp: {"dp gather": 3}, "Give a dictionary with the keys"),
    (lambda total: {}, "raised TypeError"),
]


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_bill_by_hand_is_the_ledgers_and_par_is_its_total(dp: int, tp: int) -> None:
    verdict = exercises.bill_exercise(dp, tp).check(lesson.bill)
    assert verdict
    total = costs.bill_of("", costs.plans_of(dp, tp)["zero1"]).total
    assert f"Yours takes {total:g} bytes" in verdict.message
    open_bill = dict.fromkeys(exercises.BILL_PHASES, ...)
    assert_wrong(
        exercises.bill_exercise(dp, tp), lambda *given: {**open_bill, "dp gather": 1}, "is still open"
    )


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (partial(exercises.bill_exercise, 2, 2), WRONG_BILLS)
)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1), (3, 2)])
def test_the_quiz_knows_right_from_wrong(dp: int, tp: int) -> None:
    plans = costs.plans_of(dp, tp)
    bills = {name: costs.bill_of(name, plan) for name, plan in plans.items()}
    right = {
        "saved": bills["zero1"].total - bills[costs.BOUNDARY].total,
        "state": bills["zero1"].state,
        "runs": len(plans["zero1"].workers(0)),
    }
    assert_quiz(exercises.quiz(dp, tp), right)


def test_one_entry_over_a_rounding_edge_moves_a_whole_matrix() -> None:
    gradients = rounding.mean_of(0, 2)
    nudged = rounding.nudged(gradients)
    assert different_bits(gradients, nudged) == 1
    place = (gradients["o"] != nudged["o"]).nonzero()[0].tolist()
    before, after = gradients["o"][tuple(place)], nudged["o"][tuple(place)]
    assert abs(before - after) <= abs(before) * 2**-12
    assert different_bits(step_alone(gradients, 0), step_alone(nudged, 0)) > 100
    assert rounding.nudge(0, 2).size == "hundreds"


def test_orders_of_summation_give_other_gradients() -> None:
    tried, gradients, weights = (int(line.split()[-1]) for line in rounding.say_orders(0, 8, 6).splitlines())
    assert (tried, gradients) == (5, 5)
    assert 0 <= weights <= 5


def test_a_sum_stays_within_its_bound_and_a_spoilt_one_does_not() -> None:
    mean = rounding.mean_of(0, 4)
    assert 0 <= rounding.sum_error(mean, 0, 4)[1] <= 1
    spoilt = {name: whole * (1 + 2**-18) for name, whole in mean.items()}
    assert rounding.sum_error(spoilt, 0, 4)[1] > 1
    assert "as a fraction of its bound" in rounding.say_sum(0, 4)
