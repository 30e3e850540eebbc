"""Exercises of lesson 02: where 1 goes, one step of Newton–Schulz, bounds of singular values, the quiz."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from ...newton_schulz import KELLER_JORDAN
from ..exercises.judge import Exercise, MistakeError, numbers, value_of
from .singular_values import QUIET_START, Step, bounds_after, newton_schulz_step, polynomial


def guess_one() -> Exercise:
    """The prediction: where does a singular value of exactly 1 go in one step?"""
    right = sum(KELLER_JORDAN)

    def judge(where: object) -> str | None:
        if not isinstance(where, (int, float)):
            return "Give a number."
        if math.isclose(where, right, abs_tol=0.006):
            return None
        if where == 1:
            return "It would stay at 1 only if a + b + c were 1."
        return f"{where:g} is not it."

    return Exercise(
        judge,
        ("Put s = 1 into a·s + b·s³ + c·s⁵.",),
        "Even a perfect value is pushed away from 1. Nothing in this polynomial aims at 1 exactly.",
    )


def write_step() -> Exercise:
    """The exercise: one step of Newton–Schulz, for wide and square matrices and any coefficients."""

    def judge(function: Step) -> str | None:
        generator = torch.Generator().manual_seed(0)
        for shape, triple in product(((3, 5), (4, 4)), (KELLER_JORDAN, (2.0, -1.5, 0.5))):
            X = torch.randn(shape, generator=generator, dtype=torch.float64)
            if wrong := _judge_step(X / X.norm(), function, triple):
                return wrong
        return None

    hints = (
        "a * X is the first part. What stands before X in the other two can be added up first.",
        "A² is A @ A, not A * A. Then (b * A + c * A @ A) @ X.",
    )
    return Exercise(
        judge,
        hints,
        "No direction was ever looked for. Written with A, a step is three products of matrices.",
    )


def _judge_step(X: Tensor, function: Step, triple: tuple[float, float, float]) -> str | None:
    given = X.clone()
    rows, columns = X.shape
    sizes = f"Here X is {rows} × {columns}, and A = X @ X.T is {rows} × {rows}."
    value = value_of(function, given, *triple, told=f"{{}} {sizes}")
    if value is None:
        return "The function returns nothing. Is there a return?"
    if not isinstance(value, Tensor) or value.shape != X.shape:
        shape = " × ".join(map(str, getattr(value, "shape", ()))) or type(value).__name__
        return f"X is {rows} × {columns}, and so must the result be. Yours is {shape}."
    if not torch.equal(given, X):
        return "The function has changed X itself. Make a new matrix."
    if torch.allclose(value, newton_schulz_step(X, *triple)):
        return None
    other = "The values are not those of aX + bAX + cA²X."
    return next((said for wrong, said in _wrong_steps(X, *triple) if torch.allclose(value, wrong)), other)


def _wrong_steps(X: Tensor, a: float, b: float, c: float) -> list[tuple[Tensor, str]]:
    A = X @ X.T
    return [
        (a * X + (b * A + c * A * A) @ X, "A * A squares each number. A² is the matrix product A @ A."),
        (a * X + b * A @ X, "The last part, with c, is missing."),
        ((b * A + c * A @ A) @ X, "The first part, a * X, is missing."),
        (a * X + (c * A + b * A @ A) @ X, "b and c have changed places: b goes with A, c with A @ A."),
        (a * X + (b * A + c * A @ A @ A) @ X, "That is A³, which makes seventh powers. c goes with A @ A."),
        (a * X + b * X**3 + c * X**5, "X**3 cubes each number. X³ here is X @ X.T @ X."),
    ]


def bound_values(steps: int) -> Exercise:
    """The exercise: the tightest bounds, after ``steps`` steps, of what began at ``QUIET_START`` or above."""
    right = bounds_after(steps)
    starts = torch.linspace(QUIET_START, 1, 200_001, dtype=torch.float64)
    ends = polynomial(starts, steps)

    def judge(lowest: object, highest: object) -> str | None:
        low, high = _number(lowest), _number(highest)
        if low > right.lowest + 0.006:
            start = starts[ends.argmin()]
            return f"A value that begins at {start:.3f} ends at {right.lowest:.3f}, below {low:g}."
        if high < right.highest - 0.006:
            start = starts[ends.argmax()]
            return f"A value that begins at {start:.3f} ends at {right.highest:.3f}, above {high:g}."
        if low < right.lowest - 0.006:
            return f"Nothing that began at {QUIET_START} or above ends near {low:g}. lowest can be larger."
        if high > right.highest + 0.006:
            return f"Nothing that began at {QUIET_START} or above ends near {high:g}. highest can be smaller."
        return None

    hints = (
        "You need no matrix: take many numbers s and put them through the polynomial, again and again.",
        f"s = torch.linspace({QUIET_START}, 1, 100_001), then for each step s = a * s + b * s**3 + c * s**5.",
    )
    praise = (
        f"Whatever began at {QUIET_START} or above is now between {right.lowest:.2f} and {right.highest:.2f}."
    )
    return Exercise(judge, hints, praise)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise MistakeError("Give two numbers.") from None


def quiz(steps: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    expected = {"one": sum(KELLER_JORDAN), "growth": KELLER_JORDAN[0] ** steps, "products": 3.0 * steps}
    why = {
        "one": "Put s = 1 into the polynomial, once.",
        "growth": "For a tiny s only a·s counts: each step multiplies it by a.",
        "products": "Count the @ in your step: X @ X.T, A @ A, (...) @ X. Then count the steps.",
    }
    return numbers(expected, why, within=0.01)
