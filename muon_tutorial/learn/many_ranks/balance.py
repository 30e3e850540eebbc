"""Lesson 14: the matrices of a public model, dealt out to owners by entries or by work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

from ...plan.assign import longest_first, newton_schulz_cost
from ...timing.model_shape import stage_matrices
from ...timing.models import find_model

MIXTURE, OWNERS = "deepseek-v3", 16


@cache
def shapes() -> tuple[tuple[int, int], ...]:
    """The matrices of one pipeline stage of ``MIXTURE``, with only those experts that one rank holds."""
    dense, experts = stage_matrices(find_model(MIXTURE), ep=8, pp=16, stage=1)
    return tuple((matrix.shape[0], matrix.shape[1]) for matrix in (*dense, *experts))


def say_shapes() -> str:
    """The shapes in words: how many matrices of each, their entries and their work."""
    lines = [f"{'shape':>15}{'how many':>10}{'million entries':>17}{'GFLOP':>8}"]
    for shape, count in sorted(Counter(shapes()).items(), key=lambda item: -math.prod(item[0])):
        sides = f"{shape[0]:,} × {shape[1]:,}"
        entries, operations = math.prod(shape) / 1e6, newton_schulz_cost(shape) / 1e9
        lines.append(f"{sides:>15}{count:>10}{entries:>17.1f}{operations:>8,.0f}")
    return "\n".join([*lines, f"({MIXTURE}, four layers; GFLOP of one Newton–Schulz iteration)"])


def say_balance() -> str:
    """The most entries and the most work of an owner, if matrices are dealt out by either."""
    amounts = {"entries": list(map(math.prod, shapes())), "work": list(map(newton_schulz_cost, shapes()))}
    lines = [f"{'dealt out by':<14}{'most entries':>14}{'most work':>11}   in fair shares of {OWNERS} owners"]
    for name, costs in amounts.items():
        chosen = longest_first(costs, [0] * OWNERS)
        entries, work = (_most(each, chosen) for each in amounts.values())
        lines.append(f"{name:<14}{entries:>14.2f}{work:>11.2f}")
    return "\n".join(lines)


def _most(amounts: Sequence[int], chosen: Sequence[int]) -> float:
    """The largest sum of an owner's amounts, divided by a fair share."""
    held = [0] * OWNERS
    for amount, place in zip(amounts, chosen, strict=True):
        held[place] += amount
    return max(held) * OWNERS / sum(held)
