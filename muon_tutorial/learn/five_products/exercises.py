"""Exercises of lesson 02: a step, all of Newton–Schulz, its cost, bounds, and the quiz."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...newton_schulz import KELLER_JORDAN, Triple
from ..exercises.judge import Diagnosis, Exercise, Par, first, numbers, value_of, why, written
from . import singular_values
from .singular_values import QUIET_START, SCOPE_STEPS, Step, flops, newton_schulz, polynomial


def all_exercises(steps: int) -> tuple[Exercise, ...]:
    return write_step(), write_all(), bound_values(steps), write_flops(), write_lifting(), quiz(steps)


MOST_STEPS, LIFTED = 20, 0.5


def steps_needed(s: float, a: float, b: float, c: float) -> int | None:
    """The exercise's reference: steps until a value is 0.5 or more; None if 20 are not enough.

    >>> steps_needed(0.001, *KELLER_JORDAN)
    6
    """
    for step in range(MOST_STEPS + 1):
        if s >= LIFTED:
            return step
        s = a * s + b * s**3 + c * s**5
    return None


def write_lifting() -> Exercise:
    """The exercise: how many steps lift a quiet value to a half."""
    triples = (KELLER_JORDAN, (2.0, -1.5, 0.5))
    cases = [(start, *triple) for triple in triples for start in (0.001, 0.1, 0.7)]
    cases += [(0.001, 1.2, 0.0, 0.0), (0.001, 1.4, 0.0, 0.0)]
    cases += [(0.5, 1.0, 0.0, 0.0), (0.6 / 2**MOST_STEPS, 2.0, 0.0, 0.0)]

    def linear(s: float, a: float, b: float, c: float) -> int | None:
        return next((step for step in range(MOST_STEPS + 1) if s * a**step >= LIFTED), None)

    def shifted(by: int, *given: float) -> int | None:
        right = steps_needed(*given)
        return None if right is None else right + by

    def without_last(*given: float) -> int | None:
        right = steps_needed(*given)
        return None if right == MOST_STEPS else right

    slips = (
        ("Check before any step: a value may begin at 0.5.", lambda *at: max(1, steps_needed(*at) or 1)),
        ("0.5 itself is enough.", lambda s, *triple: steps_needed((1 - 1e-12) * s, *triple)),
        ("Check after the last step, too.", without_last),
        ("You count one step too many.", partial(shifted, 1)),
        ("You count one step too few.", partial(shifted, -1)),
        ("s**3 and s**5 count, too, when s is no longer small.", linear),
        ("If 20 steps are not enough, return None.", lambda *given: steps_needed(*given) or 0),
    )
    praise = "Coefficients that lift values fast do not let them settle."
    return written(steps_needed, cases, *slips, say="s = {}, a = {}, b = {}, c = {}", praise=praise)


def outcome() -> dict[str, Any]:
    """Where 1 goes in one step, and whether it settles there."""
    return {"where": round(sum(KELLER_JORDAN), 1), "settles": False}


def write_step() -> Exercise:
    """The exercise: one step of Newton–Schulz, for wide and square matrices and any coefficients."""

    def judge(function: Step) -> str | None:
        generator = torch.Generator().manual_seed(0)
        cases = product(((3, 5), (4, 4)), (KELLER_JORDAN, (2.0, -1.5, 0.5)))
        drawn = ((torch.randn(shape, generator=generator, dtype=torch.float64), abc) for shape, abc in cases)
        return first(_judge_step(X / X.norm(), function, abc) for X, abc in drawn)

    hints = (
        "a * X is the first part. Add up the factors of X in the other two parts first.",
        "A² is A @ A, not A * A. Then (b * A + c * A @ A) @ X.",
    )
    X = torch.eye(3, 5, dtype=torch.float64)
    par = Par("products", 3, lambda function: count_products(lambda: function(X, 2.0, -1.5, 0.5)).products)
    return Exercise(judge, hints, "You did not have to look for any direction.", par)


def _judge_step(X: Tensor, function: Step, triple: Triple) -> str | None:
    given = X.clone()
    rows, columns = X.shape
    sizes = f"Here X is {rows} × {columns}, and X @ X.T is {rows} × {rows}."
    value = value_of(function, given, *triple, told=f"{{}} {sizes}")
    if value is None:
        return "The function returns nothing. Is there a return?"
    if not isinstance(value, Tensor) or value.shape != X.shape:
        shape = " × ".join(map(str, getattr(value, "shape", ()))) or type(value).__name__
        return f"X is {rows} × {columns}, and so must the result be. Yours is {shape}."
    if not torch.equal(given, X):
        return "The function has changed X itself. Make a new matrix."
    if torch.allclose(value, singular_values.newton_schulz_step(X, *triple)):
        return None
    (a, b, c), A = triple, X @ X.T
    wrong = (
        (a * X + (b * A + c * A * A) @ X, "A * A squares each entry. A² is the matrix product A @ A."),
        (a * X + b * A @ X, "The last part, with c, is missing."),
        ((b * A + c * A @ A) @ X, "The first part, a * X, is missing."),
        (a * X + (c * A + b * A @ A) @ X, "b and c have changed places: b goes with A, c with A @ A."),
        (a * X + (b * A + c * A @ A @ A) @ X, "That is A³, which makes seventh powers. c goes with A @ A."),
        (a * X + b * X**3 + c * X**5, "X**3 cubes each entry. X³ here is X @ X.T @ X."),
    )
    other = "The values are not those of a X + b X Xᵀ X + c X Xᵀ X Xᵀ X."
    return why(*((torch.allclose(value, each), said) for each, said in wrong), otherwise=other)


def write_all() -> Exercise:
    """The exercise: all of Newton–Schulz, for wide, tall and square matrices and a gradient of zeros."""

    def judge(function: Callable[..., object]) -> str | Diagnosis | None:
        generator = torch.Generator().manual_seed(1)
        shapes = ((3, 5), (6, 4), (4, 4))
        drawn = (20 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        if wrong := first(_judge_all(G, function) for G in drawn):
            return wrong
        G = 20 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
        fewer = value_of(function, G.clone(), 3)
        if isinstance(fewer, Tensor) and not torch.allclose(fewer, newton_schulz(G, 3), atol=1e-6):
            return "With steps=3 yours is not three steps. How often does the loop run?"
        zeros = function(torch.zeros(3, 5, dtype=torch.float64))
        if isinstance(zeros, Tensor) and zeros.isnan().any():
            hint = "Divide by X.norm().clamp(min=1e-7), as torch does."
            return Diagnosis("A gradient of zeros gives NaN: 0 / 0.", (hint,))
        tiny = 1e-6 * G / G.norm()
        value = value_of(function, tiny.clone(), 5)
        if isinstance(value, Tensor) and not torch.allclose(value, newton_schulz(tiny, 5), atol=1e-6):
            what = "With a norm of 1e-6, your result differs from torch.optim.Muon's."
            return Diagnosis(what, ("Adding 1e-7 changes a small norm; .clamp(min=1e-7) does not.",))
        return None

    hints = (
        "Four parts: lay a tall matrix on its side, divide by its norm, take the steps, and turn it back.",
        "X = G.T if tall else G; X = X / X.norm().clamp(min=1e-7); a loop over step; X.T if tall else X.",
    )
    praise = "This is all of Newton–Schulz. torch.optim.Muon's is the same, in bfloat16."
    return Exercise(judge, hints, praise, keeps=("newton_schulz",))


def _judge_all(G: Tensor, function: Callable[..., object]) -> str | Diagnosis | None:
    rows, columns = G.shape
    given = G.clone()
    value = value_of(function, given, told=f"{{}} Here G is {rows} × {columns}.")
    if value is None:
        return "The function returns nothing. Is there a return?"
    if not isinstance(value, Tensor):
        return f"The function must return a matrix; it returned {type(value).__name__}."
    if value.shape != G.shape:
        return f"G is {rows} × {columns}, and so must the result be. Was it turned back?"
    if value.dtype != G.dtype:
        return f"Keep G's dtype: it came in {G.dtype}, and yours is {value.dtype}."
    if not torch.equal(given, G):
        return "The function has changed G itself."
    if not value.isfinite().all():
        hint = "Without the norm, singular values begin far above 1."
        return Diagnosis("The values fly off to infinity. Was X divided by its norm?", (hint,))
    if not torch.allclose(value, newton_schulz(G)):
        counts = ((torch.allclose(value, newton_schulz(G, steps)), steps) for steps in range(9))
        values = torch.linalg.svdvals(value)
        ends = f"Its singular values lie between {values[-1]:.2f} and {values[0]:.2f}"
        rounded = torch.allclose(value, newton_schulz(G), atol=0.03)
        return why(
            *((near, f"That is {steps} steps, not {SCOPE_STEPS}.") for near, steps in counts),
            (rounded, "That is right to two digits. Compute in G's dtype, here float64, not in bfloat16."),
            otherwise=f"{ends}, not where five steps take them from Frobenius norm 1.",
        )
    made, enough = count_products(lambda: function(G)).flops, flops(rows, columns)
    if made > 1.01 * enough:
        what = f"Right, but costly: {made:,} FLOPs for a {rows} × {columns} matrix. {enough:,} are enough."
        return Diagnosis(what, ("A tall X makes a large X @ X.T. Lay it on its side first.",))
    return None


def bound_values(steps: int) -> Exercise:
    """The exercise: the tightest bounds after ``steps`` steps for values from ``QUIET_START`` to 1."""
    lowest, highest = singular_values.bounds_after(steps)
    starts = torch.linspace(QUIET_START, 1, 200_001, dtype=torch.float64)
    ends = polynomial(starts, steps)

    def judge(*answers: Any) -> str | None:
        try:
            low, high = map(float, answers)
        except (TypeError, ValueError):
            return "Give two numbers."
        if low > high:
            return f"lowest is {low:g}, and highest only {high:g}. Have they changed places?"
        if low > lowest + 0.006:
            return f"A value that begins at {starts[ends.argmin()]:.3f} ends at {lowest:.3f}, below {low:g}."
        if high < highest - 0.006:
            start = starts[ends.argmax()]
            return f"A value that begins at {start:.3f} ends at {highest:.3f}, above {high:g}."
        if low < lowest - 0.006:
            return f"Nothing that began at {QUIET_START} or above ends near {low:g}. lowest can be larger."
        if high > highest + 0.006:
            return f"Nothing that began at {QUIET_START} or above ends near {high:g}. highest can be smaller."
        return None

    hints = (
        "You need no matrix: take many values s and put them through the polynomial, again and again.",
        f"s = torch.linspace({QUIET_START}, 1, 100_001), then for each step s = a * s + b * s**3 + c * s**5.",
    )
    between = f"{lowest:.2f} and {highest:.2f}"
    return Exercise(judge, hints, f"Whatever began at {QUIET_START} or above is now between {between}.")


def write_flops() -> Exercise:
    cases = [(64, 256, 5), (256, 64, 5), (768, 768, 3), (10, 70, 1)]

    def without_square(m: int, n: int, steps: int) -> int:
        return steps * 4 * min(m, n) ** 2 * max(m, n)

    def without_last(m: int, n: int, steps: int) -> int:
        return flops(m, n, steps) - without_square(m, n, steps) // 2

    def on_longer(m: int, n: int, steps: int) -> int:
        return steps * (4 * max(m, n) ** 2 * min(m, n) + 2 * max(m, n) ** 3)

    slips = (
        ("A multiply and an add are two operations: twice as many.", lambda *given: flops(*given) // 2),
        ("A @ A is missing.", without_square),
        ("Two products have the long side: X @ X.T and (…) @ X.", without_last),
        ("That is one step.", lambda m, n, steps: flops(m, n, 1)),
        ("There A is l × l. It should be s × s.", on_longer),
        ("A tall matrix is laid on its side first.", lambda m, n, steps: steps * (4 * m**2 * n + 2 * m**3)),
    )
    hints = (
        "With the shorter side s and the longer l: A is (s × l)(l × s), A @ A is (s × s)(s × s), the last "
        "(s × s)(s × l).",
        "2·s·l·s + 2·s·s·s + 2·s·s·l, times the steps.",
    )
    praise = "4 s² l + 2 s³ a step: cheap where one side is short, cubic in a square."
    return written(flops, cases, *slips, say="{} × {} and {} steps", hints=hints, praise=praise)


def quiz(steps: int) -> Exercise:
    return numbers(
        ("growth", KELLER_JORDAN[0] ** steps, "For a tiny s only a·s counts: each step multiplies it by a."),
        ("products", 3.0 * steps, "Count the @ in a step: X @ X.T, A @ A, (...) @ X. Then count the steps."),
        ("gflop", flops(768, 3072, steps) / 1e9, "Call your flops, and divide by 1e9."),
        ("norm", 0.5, "Four equal squares add up to 1."),
        within=0.01,
    )


_ATEN = torch.ops.aten
_FIRST_FACTOR = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.bmm: 0, _ATEN.baddbmm: 1}


class ProductCounter(TorchDispatchMode):
    """Counts the matrix products in a block, and their FLOPs. A multiply-add counts as two."""

    products = flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _FIRST_FACTOR:
            left, right = args[_FIRST_FACTOR[packet] :][:2]
            self.products += left.shape[0] if left.ndim == 3 else 1
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def count_products(work: Callable[[], object]) -> ProductCounter:
    with ProductCounter() as counter:
        work()
    return counter
