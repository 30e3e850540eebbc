"""Lesson 10: bills equal the ledger, checkers tell right from wrong, and rounding is as the lesson says."""

from __future__ import annotations

from typing import Any

import pytest

from muon_tutorial.learn import bill as lesson
from muon_tutorial.learn.bill import costs, exercises, rounding
from muon_tutorial.learn.the_mirror.compare import different_bits, step_alone

from .answers import assert_quiz, assert_wrong

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


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
def test_the_bill_by_hand_is_the_ledgers(dp: int, tp: int) -> None:
    assert exercises.bill_exercise(dp, tp).check(lesson.bill)
    wrong = exercises.bill_exercise(dp, tp).check(scaled("dp gather", 3))
    assert dp == 1 or (", dp gather: " in wrong.message and "bfloat16: 2 bytes an entry" in wrong.message)


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
