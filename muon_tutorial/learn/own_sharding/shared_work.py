"""Lesson 11: a model of dense matrices and experts, their possible owners, and the busiest rank's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import longest_first, newton_schulz_cost
from .on_ranks import rows_of

DENSE, EXPERTS = 5, 3
WIDTH = 512


def cost_of(shape: tuple[int, int]) -> float:
    """The work of all five Newton–Schulz iterations on one matrix, in GFLOP."""
    return DEFAULT_STEPS * newton_schulz_cost(shape) / 1e9


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A matrix of the model, and the ranks over which its rows are divided."""

    name: str
    shape: tuple[int, int]
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MixedModel:
    """Dense matrices, cut over all ranks, and experts, each cut over the ranks of its group."""

    dp: int
    tp: int
    matrices: tuple[SharedMatrix, ...]

    @property
    def ranks(self) -> range:
        return range(self.dp * self.tp)

    @property
    def state(self) -> dict[str, list]:
        """The state for ``assign_fn``: full shapes, and the holders of each matrix, by index."""
        return {
            "shapes": [matrix.shape for matrix in self.matrices],
            "holders": [list(matrix.holders) for matrix in self.matrices],
        }

    def params_at(self, rank: int) -> list[Tensor]:
        """One rank's rows of each matrix, without data; matrices of other ranks have 0 rows."""
        params = []
        for (rows, columns), holders in ((matrix.shape, matrix.holders) for matrix in self.matrices):
            held = dict(zip(holders, rows_of(rows, len(holders)), strict=True))
            params.append(torch.empty(held.get(rank, 0), columns, device="meta"))
        return params

    def loads(self, owners: dict[int, int]) -> list[float]:
        work = dict.fromkeys(self.ranks, 0.0)
        for index, rank in owners.items():
            work[rank] += cost_of(self.matrices[index].shape)
        return list(work.values())

    def makespan(self, owners: dict[int, int]) -> float:
        """The work of the busiest rank, in GFLOP."""
        return max(self.loads(owners))


def mixed_model(dp: int, tp: int) -> MixedModel:
    """A model for ``tp`` groups of ``dp`` ranks; group 0 has the fewest and smallest experts."""
    ranks = tuple(range(dp * tp))
    shapes = [(WIDTH * (1 + number % 4), WIDTH) for number in range(DENSE * tp)]
    made = [SharedMatrix(f"dense{number}", shape, ranks) for number, shape in enumerate(shapes)]
    for group in range(tp):
        holders = tuple(rank for rank in ranks if rank % tp == group)
        shape = (WIDTH * (2 + group), WIDTH)
        made += [SharedMatrix(f"expert{group}.{number}", shape, holders) for number in range(EXPERTS + group)]
    return MixedModel(dp, tp, tuple(made))


def as_the_package(model: MixedModel) -> dict[int, int]:
    """The owners that the package's helpers choose: for one set of holders after another, costliest first."""
    owners: dict[int, int] = {}
    loads = dict.fromkeys(model.ranks, 0)
    for holders in dict.fromkeys(matrix.holders for matrix in model.matrices):
        indices = [i for i, matrix in enumerate(model.matrices) if matrix.holders == holders]
        costs = [newton_schulz_cost(model.matrices[i].shape) for i in indices]
        places = longest_first(costs, [loads[rank] for rank in holders])
        for index, cost, place in zip(indices, costs, places, strict=True):
            owners[index] = holders[place]
            loads[holders[place]] += cost
    return owners


def say_model(model: MixedModel) -> str:
    """The model in words, one line per group of equal matrices."""
    alike: dict[tuple[tuple[int, int], tuple[int, ...]], list[str]] = {}
    for matrix in model.matrices:
        alike.setdefault((matrix.shape, matrix.holders), []).append(matrix.name)
    lines = [f"{'matrices':<34}{'shape':>12}{'GFLOP each':>12}   may be owned by"]
    for (shape, holders), names in alike.items():
        who = "any rank" if len(holders) == len(model.ranks) else f"ranks {', '.join(map(str, holders))}"
        said = ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]} ({len(names)})"
        sides = f"{shape[0]} × {shape[1]}"
        lines.append(f"{said:<34}{sides:>12}{cost_of(shape):>12.2f}   {who}")
    return "\n".join(lines)


def longest_first_joint(params: Sequence[Tensor], state: dict[str, list]) -> dict[int, int]:
    """The exercise's reference: each matrix, the costliest first, goes to its least busy holder."""
    busy: dict[int, float] = {}
    owners: dict[int, int] = {}
    for index in sorted(range(len(params)), key=lambda i: -cost_of(state["shapes"][i])):
        owner = owners[index] = min(state["holders"][index], key=lambda rank: busy.get(rank, 0.0))
        busy[owner] = busy.get(owner, 0.0) + cost_of(state["shapes"][index])
    return owners
