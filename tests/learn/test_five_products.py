"""Lesson 02: its checkers know right from wrong, its polynomial is the matrices', every position is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from muon_tutorial.learn import five_products
from muon_tutorial.learn.inputs.recordings import real_gradient
from muon_tutorial.learn.pictures.picture import Picture

from .answers import assert_quiz, assert_wrong

STEPS = (1, 2, 5, 7)


def right_step(X: Tensor, a: float, b: float, c: float) -> Tensor:
    A = X @ X.T
    return a * X + (b * A + c * A @ A) @ X


def test_the_right_step_passes_in_any_form_and_the_stub_is_open() -> None:
    assert five_products.write_step().check(lambda X, a, b, c: ...).passed is None
    assert five_products.write_step().check(right_step)
    assert five_products.write_step().check(
        lambda X, a, b, c: a * X + b * X @ X.T @ X + c * X @ X.T @ X @ X.T @ X
    )


WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda X, a, b, c: a * X + (b * (X @ X.T) + c * (X @ X.T) * (X @ X.T)) @ X, "A * A squares each number"),
    (lambda X, a, b, c: a * X + b * X @ X.T @ X, "with c, is missing"),
    (lambda X, a, b, c: right_step(X, 0, b, c), "a * X, is missing"),
    (lambda X, a, b, c: right_step(X, a, c, b), "changed places"),
    (lambda X, a, b, c: a * X + b * X**3 + c * X**5, "cubes each number"),
    (lambda X, a, b, c: a * X + b * X @ X.T, "The function raised RuntimeError"),
    (lambda X, a, b, c: a * X + b * X @ X.T, "Here X is 3 × 5, and A = X @ X.T is 3 × 3."),
    (lambda X, a, b, c: None, "returns nothing. Is there a return?"),
    (lambda X, a, b, c: X @ X.T, "so must the result be"),
    (lambda X, a, b, c: 2 * right_step(X, a, b, c), "are not those of"),
    (lambda X, a, b, c: X.copy_(right_step(X, a, b, c)), "has changed X itself"),
]


@pytest.mark.parametrize(("function", "says"), WRONG)
def test_wrong_steps_are_told_what_is_wrong_with_them(function: Callable[..., Any], says: str) -> None:
    assert_wrong(five_products.write_step(), function, says)


def test_the_guess_knows_where_one_goes() -> None:
    assert five_products.guess_one().check(0.701)
    assert five_products.guess_one().check(0.7)
    for where, says in ((1, "only if"), (1.2, "1.2"), ("1", "number")):
        assert_wrong(five_products.guess_one(), where, says)


def the_solution(steps: int) -> tuple[float, float]:
    a, b, c = five_products.KELLER_JORDAN
    s = torch.linspace(0.01, 1, 100_001, dtype=torch.float64)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s.min().item(), s.max().item()


@pytest.mark.parametrize("steps", STEPS)
def test_the_bounds_know_right_from_wrong(steps: int) -> None:
    low, high = the_solution(steps)
    assert five_products.bound_values(steps).check(low, high)
    assert five_products.bound_values(steps).check(round(low, 2), round(high, 2))
    wrong: list[tuple[Any, Any, str]] = [
        (low + 0.05, high, "A value that begins at"),
        (low, high - 0.05, f"above {high - 0.05:g}"),
        (low - 0.05, high, "began at 0.01 or above ends near"),
        (low, high + 0.05, "highest can be smaller"),
        ("low", high, "Give two numbers."),
    ]
    for case in wrong:
        assert_wrong(five_products.bound_values(steps), *case)
    assert five_products.bound_values(steps).check(low, ...).passed is None


@pytest.mark.parametrize("steps", STEPS)
def test_the_quiz_knows_right_from_wrong(steps: int) -> None:
    right = {"one": 0.701, "growth": 3.4445**steps, "products": 3 * steps}
    wrong = {"one": (1, "s = 1"), "growth": (9, "multiplies"), "products": (steps, "@")}
    assert_quiz(five_products.quiz(steps), right, wrong)


@pytest.mark.parametrize("steps", STEPS)
def test_the_polynomial_tells_where_the_matrix_goes(steps: int) -> None:
    G = real_gradient().matrix.T
    X = Y = G / G.norm()
    for _ in range(steps):
        Y = five_products.newton_schulz_step(Y, *five_products.KELLER_JORDAN)
    predicted = five_products.polynomial(torch.linalg.svdvals(X), steps)
    assert torch.allclose(torch.linalg.svdvals(Y), predicted.sort(descending=True).values)
    assert five_products.only_values_moved(X, Y)
    assert not five_products.only_values_moved(X, Y + 0.01)


def test_values_that_begin_above_the_quiet_start_keep_the_bounds() -> None:
    for values in five_products.spectra().values():
        assert values.norm().item() == pytest.approx(1)
        ends = five_products.polynomial(values[values >= five_products.QUIET_START], 5)
        bounds = five_products.bounds_after(5)
        assert bounds.lowest - 1e-6 <= ends.min() <= ends.max() <= bounds.highest + 1e-6


def test_its_pictures_say_what_they_show() -> None:
    drawn: list[tuple[Picture, str]] = [
        (
            five_products.picture_before_after(real_gradient().matrix, 5),
            "after Newton–Schulz, 5 steps",
        ),
        (five_products.draw_film(), "After 5 steps"),
        (five_products.picture_of_variants(), "YouJiacheng: from 0.01 on"),
    ]
    for picture, says in drawn:
        assert says in picture.alt
        assert picture.width <= 900


def test_the_measurement_has_a_row_for_each_number_of_steps() -> None:
    G = real_gradient().matrix
    rows = five_products.measure_steps(G, 5, times=1)
    assert [row.steps for row in rows] == list(range(6))
    assert rows[5].error < rows[0].error
    assert len(five_products.say_steps(rows, G).splitlines()) == 8
