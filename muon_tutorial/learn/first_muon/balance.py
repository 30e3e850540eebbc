"""Lesson 04: owners chosen by cost, where longest first is not the best; sets of matrices to try it on.

Costs are floating-point operations of Newton–Schulz, all its iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...newton_schulz import DEFAULT_STEPS
from ...plan.assign import longest_first, newton_schulz_cost

TOY = (8, 7, 6, 5, 4)
"""Costs of five matrices, in some unit, for which longest first on two owners is not the best."""
TOY_BEST = (0, 0, 1, 1, 1)
"""Owners with the least makespan for ``TOY``."""

BalanceFunction = Callable[[list[int], int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class MatrixSet:
    """Matrices to be dealt out to ``ranks``; ``best`` is the least makespan known, in fair shares."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    ranks: int
    best: float

    @property
    def costs(self) -> list[int]:
        """Operations of Newton–Schulz, a number a matrix."""
        return [DEFAULT_STEPS * newton_schulz_cost(shape) for shape in self.shapes]

    def lost(self, owners: Sequence[int]) -> float:
        """How far the makespan lies above a fair share, as a part of that."""
        return max(loads_of(self.costs, owners, self.ranks)) * self.ranks / sum(self.costs) - 1


_FUSED = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))
_LATENT = (
    (1536, 2048), (3072, 1536), (576, 2048), (4096, 512), (2048, 2048), (1408, 2048), (1408, 2048),
    (2048, 1408),
)  # fmt: skip
_EXPERTS = (
    ((1024, 1024),) * 6 + ((256, 1024),) * 12 + ((704, 1024),) * 24 + ((2816, 1024),) * 9
)  # attention and routed and shared experts
SETS = (
    MatrixSet("five matrices on a pair", tuple((1024, 1024 * width) for width in TOY), 2, 1.0154),
    MatrixSet("fused QKV, 5 layers on 8", _FUSED * 5, 8, 1.0286),
    MatrixSet("experts, 3 layers on 7", _EXPERTS, 7, 1.0010),
    MatrixSet("latent attention, 3 layers on 5", _LATENT * 3, 5, 1.0101),
    MatrixSet("latent attention, 3 layers on 7", _LATENT * 3, 7, 1.0084),
)


def loads_of(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The work of each rank.

    >>> loads_of([8, 7, 6, 5, 4], [0, 1, 1, 0, 0], 2)
    [17.0, 13.0]
    """
    loads = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def deal_longest_first(costs: list[int], ranks: int) -> list[int]:
    """Owners as the package chooses them: the costliest first, each to the rank that has least so far."""
    return longest_first(costs, [0] * ranks)


def toy_makespans() -> dict[str, int]:
    """The makespans of ``TOY`` on two owners: the costliest first, and the least possible."""
    longest = deal_longest_first(list(TOY), 2)
    return {
        name: int(max(loads_of(TOY, owners, 2)))
        for name, owners in (("longest_first", longest), ("best", TOY_BEST))
    }


def percent_lost(balance: BalanceFunction) -> float:
    """How far the makespans of all sets lie above fair shares, in percent, added up."""
    return 100 * sum(each.lost(balance(each.costs, each.ranks)) for each in SETS)


def say_sets() -> str:
    """The sets: longest first beside the best that is known."""
    lines = [f"{'matrices':<33}{'ranks':>6}{'longest first':>15}{'best known':>13}"]
    for each in SETS:
        longest = 1 + each.lost(deal_longest_first(each.costs, each.ranks))
        lines.append(f"{each.name:<33}{each.ranks:>6}{longest:>15.3f}{each.best:>13.3f}")
    return "\n".join([*lines, "(makespan, in fair shares: 1 is a lower bound)"])
