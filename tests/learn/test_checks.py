"""Exercises say what is wrong with an answer and give hints; a prediction stands beside its run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from inspect import getclosurevars
from typing import Any

import numpy as np
import pytest
import torch

from muon_tutorial.learn import (
    cuts,
    first_look,
    first_muon,
    five_products,
    my_loop,
    own_sharding,
    shards_alone,
    the_grid,
    the_mirror,
    why_muon,
    zero1_buffer,
)
from muon_tutorial.learn.bill import exercises as bill
from muon_tutorial.learn.broken_runs import exercises as broken_runs
from muon_tutorial.learn.cheaper import exercises as cheaper
from muon_tutorial.learn.collectives import exercises as collectives
from muon_tutorial.learn.early_return import exercises as early_return
from muon_tutorial.learn.exercises.judge import Diagnosis, Exercise, Par, guesses, numbers, written
from muon_tutorial.learn.many_ranks import exercises as many_ranks
from muon_tutorial.learn.pictures.picture import Picture, blank, finish
from muon_tutorial.learn.widgets.reveal import compare, is_same

from .answers import assert_quiz, assert_wrong

WRITTEN: list[Callable[[], Exercise]] = [
    partial(bill.bill_exercise, 2, 2),
    bill.sends_exercise,
    broken_runs.write_search,
    broken_runs.write_suspects,
    broken_runs.write_waits,
    partial(cheaper.bytes_exercise, 2, 2),
    cheaper.turning_exercise,
    collectives.check_formula,
    collectives.check_seconds,
    early_return.makespan_exercise,
    early_return.recorded_exercise,
    first_muon.check_fair_shares,
    five_products.write_flops,
    five_products.write_lifting,
    many_ranks.enough_exercise,
    many_ranks.fits_exercise,
    many_ranks.most_exercise,
    many_ranks.wires_exercise,
    own_sharding.check_sent,
    shards_alone.check_ratio,
    shards_alone.write_nearness,
    shards_alone.write_shares,
    the_grid.mismatch_exercise,
    partial(cuts.holders_exercise, 2, 3),
    cuts.torn_exercise,
    why_muon.write_loudest,
    why_muon.write_promise,
    zero1_buffer.address_exercise,
    zero1_buffer.range_exercise,
]
"""Exercises whose answers are compared with a reference, and with usual mistakes."""


@pytest.mark.parametrize("make", WRITTEN)
def test_a_usual_mistake_is_told_what_it_is_and_another_one_where_it_differs(make: Callable) -> None:
    exercise: Any = make()
    given = getclosurevars(exercise.judge).nonlocals
    right, cases, slips, say = (given[name] for name in ("right", "cases", "slips", "say"))
    for said, slip in slips:
        assert_wrong(exercise, slip, said)
    assert exercise.check(right)
    due = right(*deepcopy(cases[0]))
    odd = "give a dictionary" if isinstance(due, Mapping) else "[odd], where "
    assert_wrong(exercise, lambda *given: ["odd"], f"For {say.format(*cases[0])}: {odd}")
    if isinstance(due, int | float):
        assert_wrong(exercise, lambda *given: str(due), "give a number, not a text")
    assert (
        exercise.check(lambda *given: ...).passed is exercise.check(lambda *given: (..., ...)).passed is None
    )


GUESSES: list[Callable[[], Exercise]] = [
    *(partial(collectives.guess_bytes, ranks) for ranks in (2, 4, 6)),
    collectives.guess_stuck,
    *(partial(cuts.pieces_exercise, tp) for tp in (1, 2, 3, 7)),
    *(partial(first_muon.guess, ranks) for ranks in (1, 2, 3, 5, 9)),
    first_muon.check_toy,
    *(partial(own_sharding.guess, ranks) for ranks in (2, 4, 8)),
    *(partial(shards_alone.guess, tp) for tp in (2, 4)),
    *(partial(the_grid.predict, *grid) for grid in ((2, 3), (3, 1), (1, 4))),
    partial(zero1_buffer.bytes_exercise, 4, 1, 400),
]


@pytest.mark.parametrize("make", GUESSES)
def test_a_usual_wrong_guess_is_told_what_it_is_and_another_one_where_to_look(make: Callable) -> None:
    exercise: Any = make()
    asked = getclosurevars(exercise.judge).nonlocals["asked"]
    rights = [right for _, right, *_ in asked]
    assert exercise.check(*rights)
    for place, (name, right, told, *mistakes) in enumerate(asked):
        known = [*mistakes, (["odd"], told)]
        for wrong in (wrong for wrong, _ in known if wrong != right):
            reply = next(reply for each, reply in known if each == wrong)
            said = [*rights[:place], wrong, *rights[place + 1 :]]
            assert_wrong(exercise, *said, f"{name}: not {wrong}. {reply}")
        if type(right) in (int, float):
            said = [*rights[:place], str(right), *rights[place + 1 :]]
            assert_wrong(exercise, *said, f"{name}: give a number, not a text.")


@pytest.mark.parametrize(
    ("mine", "right", "passed"),
    [
        ([3, 1], {1, 3}, True),
        ({1, 3}, {1, 3}, True),
        ([1, 1, 3], {1, 3}, False),
        ({(0, 1)}, {(0, 1)}, True),
        ([[0, 1], [2, 1]], {(2, 1), (0, 1)}, True),
        ("Tensor", "tensor", True),
        ("tensors", "tensor", False),
        ([[1], [3]], {1, 3}, False),
        (torch.tensor([3, 1]), {1, 3}, True),
        (torch.tensor([1.0, 2.0]), [1, 2], True),
        (np.array([1.0, 2.5]), (1, 2), False),
        (torch.tensor(2.0), 2, True),
        (2, {2}, False),
    ],
)
def test_values_are_compared_however_they_are_held(mine: object, right: object, passed: bool) -> None:
    assert guesses(("it", right, "Look.")).check(mine).passed is passed
    assert written(lambda: right, [()], say="it").check(lambda: mine).passed is passed


QUIZZES: list[tuple[Callable[[], Exercise], dict[str, float]]] = [
    (partial(collectives.quiz, 2), {"messages": 2, "share": 0.5, "bytes": 3_500_000}),
    (partial(collectives.quiz, 6), {"messages": 10, "share": 0.5, "bytes": 3_500_000}),
    (partial(cuts.quiz, 2, 3), {"columns": 2, "kept": 28, "torn": 2}),
    (partial(cuts.quiz, 3, 1), {"columns": 10, "kept": 47, "torn": 2}),
    (partial(cuts.quiz, 2, 7), {"columns": 0, "kept": 14, "torn": 2}),
    (partial(early_return.quiz, 3), {"window 4": 14, "held": 3, "exposed": 2}),
    (lambda: first_look.quiz(first_look.plan_of(4, 1)), {"copies": 5, "kept": 768}),
    (lambda: first_look.quiz(first_look.plan_of(2, 3)), {"copies": 3, "kept": 528}),
    (partial(first_muon.quiz, 3), {"zeros": 20_480, "busiest": 1.8, "bytes": 40_960}),
    (my_loop.quiz, {"twice": 3, "files": 8, "too_long": 3}),
    (own_sharding.quiz, {"empty": 3, "step": 2}),
    (partial(collectives.quiz, 4), {"messages": 6, "share": 0.5, "bytes": 3_500_000}),
    (partial(cuts.quiz, 1, 4), {"columns": 1, "kept": 42, "torn": 2}),
    (partial(early_return.quiz, 2), {"window 4": 14, "held": 3, "exposed": 2}),
    (lambda: first_look.quiz(first_look.plan_of(1, 4)), {"copies": 2, "kept": 768}),
    (partial(the_grid.quiz, 1, 4), {"groups": 5, "number": 3, "shared": 1}),
    (partial(the_grid.quiz, 2, 3), {"groups": 5, "number": 2, "shared": 1}),
    (partial(the_grid.quiz, 3, 1), {"groups": 4, "number": 0, "shared": 1}),
    (lambda: the_mirror.quiz(the_mirror.plan_of(2, 2)), {"requests": 5, "whole": 4}),
    (lambda: the_mirror.quiz(the_mirror.plan_of(3, 2)), {"requests": 4, "whole": 2}),
]


@pytest.mark.parametrize(("make", "right"), QUIZZES)
def test_a_quiz_knows_right_from_wrong(make: Callable, right: dict[str, float]) -> None:
    assert_quiz(make(), right)


RIGHT: list[tuple[Callable[[], Exercise], list[Any]]] = [
    (partial(collectives.guess_bytes, 4), [6, 24_576]),
    (collectives.guess_stuck, [2]),
    (partial(own_sharding.guess, 4), [[3, 3, 3, 0], [None, None, None, "tensor"]]),
    (partial(the_grid.predict, 2, 3), [[2, 5], [3, 4, 5]]),
]


@pytest.mark.parametrize(("make", "right"), RIGHT)
def test_a_guess_knows_the_right_numbers(make: Callable, right: list[Any]) -> None:
    assert make().check(*right)


def no_negative(value: int) -> str | None:
    return f"{value} is negative." if value < 0 else None


def test_hints_come_one_by_one_and_the_right_answer_is_praised_without_one() -> None:
    exercise = Exercise(no_negative, hints=("first", "second"), praise="Positive.")
    said = [exercise.check(-1).message for _ in range(3)]
    assert [message.split("Hint: ")[1] for message in said] == ["first", "second", "second"]
    assert repr(exercise.check(1)) == "Right. Positive. It took 4 tries, and you stayed with it."


def test_who_comes_back_with_nothing_is_told_how_to_begin() -> None:
    exercise = Exercise(no_negative, hints=("first", "second"), praise="Positive.")
    assert [exercise.check(...).message for _ in range(3)] == [
        "Replace ... with yours, or go on without.",
        *["Replace ... with yours, or go on without. To begin: first"] * 2,
    ]
    assert Exercise(no_negative).check(...) == Exercise(no_negative).check(...)
    assert repr(exercise.check(1)) == "Right. Positive."


@pytest.mark.parametrize(
    ("answers", "passed", "says"),
    [
        ({"a": 1, "b": 2}, True, ""),
        ({"a": 1, "b": 3}, False, "b: 3 is not it. count b"),
        ({"a": 0, "b": 3}, False, "a: 0 is not it. count a"),
        ({"a": 1, "b": ...}, False, "Still open: b."),
        ({"a": 1}, False, "Still open: b."),
        ({"a": 1, "b": "2"}, False, "b: give a number, not a text."),
        ({"a": ..., "b": ...}, None, "Replace"),
        ({"a": 1.0, "b": 2.0}, True, ""),
        *((odd, False, "Give a dictionary of a, b.") for odd in (3, "a", [1], None)),
    ],
)
def test_numbers_judges_each_answer_by_name(answers: Any, passed: bool | None, says: str) -> None:
    verdict = numbers(("a", 1, "count a"), ("b", 2, "count b")).check(answers)
    assert verdict.passed is passed
    assert says in verdict.message


def test_the_reference_is_used_until_an_answer_passes(capsys: pytest.CaptureFixture[str]) -> None:
    exercise = Exercise(no_negative)
    exercise.check(-1)
    assert exercise.accepted_or(5) == 5
    assert "reference" in capsys.readouterr().out
    exercise.check(1)
    assert exercise.accepted_or(5) == 1
    assert capsys.readouterr().out == ""


def test_an_open_optional_exercise_asks_for_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert Exercise(no_negative, optional=True).accepted_or(5) == 5
    assert (
        capsys.readouterr().out
        == "No answer to the optional exercise: from here on, its reference is used.\n"
    )


@pytest.mark.parametrize(("answer", "passed"), [(100, True), (100.9, True), (102, False), ("100", False)])
def test_numbers_may_be_off_by_a_part(answer: object, passed: bool) -> None:
    assert numbers(("a", 100, "count"), within=0.01).check({"a": answer}).passed is passed


def signed(value: int) -> str | Diagnosis | None:
    if value < 0:
        return Diagnosis(f"{value} is negative.", ("Look at its sign.", "Drop the sign."))
    return f"{value} is odd." if value % 2 else None


def test_a_hint_follows_the_diagnosis_and_each_mistake_has_its_own_next_hint() -> None:
    exercise = Exercise(signed, hints=("Halve it.", "Which numbers can be halved?"))
    said = [exercise.check(value).message.split("Hint: ")[1] for value in (-2, 3, -4, 5, -6)]
    assert said == [
        "Look at its sign.",
        "Halve it.",
        "Drop the sign.",
        "Which numbers can be halved?",
        "Drop the sign.",
    ]


@pytest.mark.parametrize(
    ("answer", "says"),
    [(8, "Yours takes 8 steps; par is 4."), (2, "Yours takes 2 steps; par is 4. You are below it!")],
)
def test_a_right_answer_is_told_its_par(answer: int, says: str) -> None:
    verdict = Exercise(signed, praise="It is even.", par=Par("steps", 4, lambda value: value)).check(answer)
    assert verdict.message == f"It is even. {says}"


@pytest.fixture
def card() -> Picture:
    return finish(blank(20, 10)[0], "card", "two dots")


@pytest.mark.parametrize(
    ("mine", "found", "same"),
    [
        (["Gaussian", "rows"], ("gaussian", "rows"), True),
        ("muon", "Muon", True),
        ((0, 3), [0, 3], True),
        (0.7, 0.701, True),
        (0.7, 0.72, False),
        (24_600, 24_576, False),
        (3.0, 3, True),
        ([0, 3], [0, 3, 4], False),
        ("1", 1, False),
        ({1: 7}, {1: 7}, True),
        (True, 1.0, True),
    ],
)
def test_a_prediction_is_right_however_it_is_written(mine: object, found: object, same: bool) -> None:
    assert is_same(mine, found) is same


def test_a_text_in_place_of_a_number_is_told_so() -> None:
    assert "a number is asked for, not a text" in repr(compare({"where": "0.7"}, {"where": 0.7}))


def test_a_wrong_value_says_more_than_an_error_in_a_later_case() -> None:
    twice = ("That is its square.", lambda n: n * n)
    exercise = written(lambda n: 2 * n, [(1,), (3,), (0,)], twice, say="n = {}")
    assert_wrong(exercise, lambda n: n * n / bool(n), "For n = 1: 1, where 2 is right. That is its square.")
    assert_wrong(exercise, lambda n: 2 * n / bool(n), "For n = 0: The function raised ZeroDivisionError")


def test_what_was_typed_stands_beside_what_the_run_gave_and_is_folded_until_then(card: Picture) -> None:
    found = {"messages": 4, "<who>": "all"}
    unread = compare({"messages": ...}, found, card)._repr_html_()
    assert re.fullmatch(
        r"<details><summary>You have not predicted yet.*<td>4</td>.*<img .*</details>", unread
    )
    page = compare({"messages": 3, "<who>": "all"}, found, card)._repr_html_()
    assert "<details>" not in page
    assert "<td>messages</td><td>3</td><td>4</td><td>not as you said</td>" in page
    assert "<td>&lt;who&gt;</td><td>all</td><td>all</td><td>as you said</td>" in page
    assert repr(compare({"messages": 3}, found, card)).splitlines() == [
        "messages: you said 3, the run gave 4. not as you said",
        "<who>: all",
        "two dots",
    ]
