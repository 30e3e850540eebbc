"""Lesson 02: its checkers tell right from wrong, its polynomial fits matrices, every position is drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from muon_tutorial.learn import five_products
from muon_tutorial.learn.inputs.recordings import real_gradient

from .answers import altered, assert_quiz, assert_wrong, judged

STEPS = (1, 2, 5, 7)


right_step, whole = five_products.newton_schulz_step, five_products.newton_schulz


def test_the_right_step_passes_in_any_form_and_the_stub_is_open() -> None:
    assert five_products.write_step().check(right_step)
    six = five_products.write_step().check(
        lambda X, a, b, c: a * X + b * X @ X.T @ X + c * X @ X.T @ X @ X.T @ X
    )
    assert "Yours takes 6 products; par is 3." in six.message


WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda X, a, b, c: a * X + (b * (X @ X.T) + c * (X @ X.T) * (X @ X.T)) @ X, "A * A squares each entry"),
    (lambda X, a, b, c: a * X + b * X @ X.T @ X, "with c, is missing"),
    (lambda X, a, b, c: right_step(X, 0, b, c), "a * X, is missing"),
    (lambda X, a, b, c: right_step(X, a, c, b), "changed places"),
    (lambda X, a, b, c: a * X + b * X**3 + c * X**5, "cubes each entry"),
    (lambda X, a, b, c: a * X + b * X @ X.T, "Here X is 3 × 5, and X @ X.T is 3 × 3."),
    (lambda X, a, b, c: None, "returns nothing. Is there a return?"),
    (lambda X, a, b, c: X @ X.T, "so must the result be"),
    (lambda X, a, b, c: 2 * right_step(X, a, b, c), "are not those of"),
    (lambda X, a, b, c: X.copy_(right_step(X, a, b, c)), "has changed X itself"),
]


without_norm = altered(whole, (" / X.norm().clamp(min=1e-7)", ""))
WRONG_WHOLES: list[tuple[Callable[..., Any], str]] = [
    (altered(whole, ("G.shape[0] > G.shape[1]", "False")), "Right, but costly"),
    (altered(whole, ("return X.T if tall else X", "return X")), "Was it turned back?"),
    (lambda G: whole(G).bfloat16(), "Keep G's dtype"),
    (lambda G: whole(G.bfloat16()).to(G.dtype), "Compute in G's dtype"),
    (lambda G: whole(G, 7), "That is 7 steps, not 5"),
    (altered(whole, ("1e-7", "0.0")), "zeros gives NaN"),
    (altered(whole, ("1e-7", "2e-6")), "differs from torch.optim.Muon's"),
    (partial(whole, steps=4), "That is 4 steps, not 5."),
    (without_norm, "Was X divided by its norm?"),
    (lambda G: G / G.norm(), "That is 0 steps"),
    (lambda G: 2 * whole(G), "not where five steps"),
    (lambda G: without_norm(G / torch.linalg.matrix_norm(G, 2)), "take them from Frobenius norm 1"),
    (lambda G: whole(G.div_(2)), "has changed G itself"),
    (lambda G: None, "returns nothing"),
    (lambda G: 1, "must return a matrix"),
    (lambda G, steps=5: whole(G), "With steps=3 yours is not three steps"),
]


test_an_answer_passes_or_is_told_what_is_wrong_with_it = judged(
    (five_products.write_step, WRONG),
    (five_products.write_all, WRONG_WHOLES),
)


def test_the_cost_is_what_the_products_take() -> None:
    for shape in ((3, 5), (6, 4), (4, 4)):
        made = five_products.count_products(partial(five_products.newton_schulz, torch.ones(shape)))
        assert (made.products, made.flops) == (15, five_products.flops(*shape))


def the_solution(steps: int) -> tuple[float, float]:
    a, b, c = five_products.KELLER_JORDAN
    s = torch.linspace(0.01, 1, 100_001, dtype=torch.float64)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s.min().item(), s.max().item()


def test_a_loop_that_asks_for_the_limit_afterwards_ends() -> None:
    def steps_needed(s: float, a: float, b: float, c: float) -> int | None:
        step = 0
        while s < 0.5:
            s, step = a * s + b * s**3 + c * s**5, step + 1
        return step if step <= 20 else None

    assert five_products.write_lifting().check(steps_needed)


@pytest.mark.parametrize("steps", STEPS)
def test_the_bounds_and_the_quiz_know_right_from_wrong(steps: int) -> None:
    low, high = the_solution(steps)
    assert five_products.bound_values(steps).check(low, high)
    assert five_products.bound_values(steps).check(torch.tensor(low), torch.tensor(high))
    assert five_products.bound_values(steps).check(round(low, 2), round(high, 2))
    wrong: list[tuple[Any, Any, str]] = [
        (low + 0.05, high, "A value that begins at"),
        (low, high - 0.05, f"above {high - 0.05:g}"),
        (low - 0.05, high, "began at 0.01 or above ends near"),
        (low, high + 0.05, "highest can be smaller"),
        (high, low, "Have they changed places?"),
        ("low", high, "Give two numbers."),
    ]
    for case in wrong:
        assert_wrong(five_products.bound_values(steps), *case)
    gflop = steps * (4 * 768**2 * 3072 + 2 * 768**3) / 1e9
    right = {"growth": 3.4445**steps, "products": 3 * steps, "gflop": gflop, "norm": 0.5}
    assert_quiz(five_products.quiz(steps), right)


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
