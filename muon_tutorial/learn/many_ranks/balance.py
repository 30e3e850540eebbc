"""Lesson 14: owners of matrices, balanced by entries or by work, and models to try them on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ... import Grid, Matrix, owner
from ...plan.assign import longest_first, newton_schulz_cost
from ...plan.strategies import plan_imbalance, work_by_position
from ...timing.model_shape import stage_matrices
from ...timing.models import find_model

Shape = tuple[int, int]
ONE_BUCKET = 2**62


@dataclass(frozen=True, slots=True)
class OwnedModel:
    """The matrices of a public model's pipeline stage, and the number of owners that share them."""

    name: str
    shapes: tuple[Shape, ...]
    owners: int

    def plan_work(self, chosen: Sequence[int]) -> tuple[list[int], float]:
        """Each owner's operations in an ``owner`` plan, and the busiest owner's in fair shares."""
        matrices = [Matrix(i, f"m{i}", shape) for i, shape in enumerate(self.shapes)]
        plan = owner(matrices, Grid.of(dp=self.owners), assign=list(chosen), round_bytes=ONE_BUCKET)
        return work_by_position(plan), plan_imbalance(plan)

    def entries(self, chosen: Sequence[int]) -> list[int]:
        """The number of entries in each owner's matrices."""
        held = [0] * self.owners
        for shape, place in zip(self.shapes, chosen, strict=True):
            held[place] += math.prod(shape)
        return held


@cache
def owned_models() -> tuple[OwnedModel, ...]:
    """For three models: the matrices of one pipeline stage, with only those experts that one rank holds."""
    asked = (("deepseek-v3", 8, 16, 1, 16), ("kimi-k2", 8, 16, 0, 12), ("qwen3-30b-a3b", 4, 12, 1, 24))
    found = []
    for name, ep, pp, stage, owners in asked:
        dense, experts = stage_matrices(find_model(name), ep=ep, pp=pp, stage=stage)
        shapes = tuple((matrix.shape[0], matrix.shape[1]) for matrix in (*dense, *experts))
        found.append(OwnedModel(name, shapes, owners))
    return tuple(found)


def by_entries(shapes: Sequence[Shape], owners: int) -> list[int]:
    """The first idea: give each matrix, the largest first, to the owner with the fewest entries so far."""
    return longest_first([math.prod(shape) for shape in shapes], [0] * owners)


def assign(shapes: Sequence[Shape], owners: int) -> list[int]:
    """Give each matrix, the costliest first, to the owner with the least work so far."""
    return longest_first(list(map(newton_schulz_cost, shapes)), [0] * owners)


def say_shapes() -> str:
    """The first model's shapes in words: how many matrices of each, their entries and their work."""
    model = owned_models()[0]
    lines = [f"{'shape':>15}{'how many':>10}{'million entries':>17}{'GFLOP':>8}"]
    for shape, count in sorted(Counter(model.shapes).items(), key=lambda item: -math.prod(item[0])):
        sides = f"{shape[0]:,} × {shape[1]:,}"
        entries, operations = math.prod(shape) / 1e6, newton_schulz_cost(shape) / 1e9
        lines.append(f"{sides:>15}{count:>10}{entries:>17.1f}{operations:>8,.0f}")
    return "\n".join([*lines, f"({model.name}, four layers; GFLOP of one Newton–Schulz iteration)"])
