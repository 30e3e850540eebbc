"""Whether owners work at the same time: steps of real ranks in which Newton–Schulz is replaced by sleep.

Sleeping ranks need no core, so that any machine shows what as many machines would: the makespan of the plan,
with real messages around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_tutorial.evidence.memory import PeakMemory
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.launching.launch import launch
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.plan.assign import newton_schulz_cost
from muon_tutorial.plan.strategies import Plan, layerwise, owner, replicated, round_robin, zero1
from muon_tutorial.step import orthogonalize
from muon_tutorial.worlds.live import build_mesh
from muon_tutorial.worlds.shadow import walk_alone

BUILDERS: Mapping[str, Any] = {
    "replicated": replicated,
    "owner": owner,
    "layerwise": layerwise,
    "round_robin": round_robin,
    "round_robin, all_gather": partial(round_robin, back="all_gather"),
    "zero1": zero1,
    "zero1, boundary": partial(zero1, gather="boundary"),
}
PATIENCE = 120.0
NAP = 0.1
EQUAL = ((128, 128),) * 16
UNEQUAL = tuple((128, 32 * (1 + i % 4)) for i in range(16))
EXPERTS = (*((128, 64),) * 48, *((128, 256),) * 16)
ONE, ALL = 1, None  # an owner's matrices in a round: one, whatever its size; or what the default takes
NOTES = (
    "Newton–Schulz is replaced by sleep, in proportion to a matrix's operations, so that ranks need no core "
    "of their own, and matrices are small, so that messages cost little. *a round*: one matrix an owner, as "
    " where every matrix is larger than the limit, or as many as the default limit takes. Messages are "
    "real. *best*: the fair share of the sleep, or the longest one; for equal matrices, as many as the "
    "busiest rank must have. *peak*: the most bytes that a rank's step held beside parameters, gradients and "
    "momentum, measured, and predicted by the same step on tensors without data.",
)


@dataclass(frozen=True, slots=True)
class SleepCase:
    """Matrices of ``shapes`` on ``ranks`` ranks; the costliest one's iterations sleep ``seconds``.

    ``limit`` is the strategies' own limit of a round, in bytes; None leaves the default.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    ranks: int
    seconds: float
    limit: int | None = None

    def sleeps(self) -> list[float]:
        """How long each matrix sleeps: by its operations."""
        costs = [newton_schulz_cost(shape) for shape in self.shapes]
        return [self.seconds * cost / max(costs) for cost in costs]

    @property
    def best(self) -> float:
        """Seconds that no way of giving whole matrices to ranks can beat: the fair share, or the costliest
        matrix; for equal matrices, as many as the busiest rank must have."""
        sleeps = self.sleeps()
        if len(set(sleeps)) == 1:
            return math.ceil(len(sleeps) / self.ranks) * sleeps[0]
        return max(max(sleeps), sum(sleeps) / self.ranks)


@dataclass(frozen=True, slots=True)
class SleepStep:
    """What one strategy's step took: seconds, and the most bytes a rank held, measured and predicted."""

    case: SleepCase
    strategy: str
    seconds: float
    peak: int
    predicted: int


def cases(ranks: Sequence[int]) -> list[SleepCase]:
    """Equal matrices, unequal ones, and experts beside dense ones, on each number of ranks."""
    shapes = {"16 equal": EQUAL, "16 unequal": UNEQUAL, "48 experts, 16 dense": EXPERTS}
    return [
        SleepCase(name, its, count, NAP, limit)
        for count in ranks
        for name, its in shapes.items()
        for limit in (ONE, ALL)
    ]


def run_case(case: SleepCase, strategies: Sequence[str]) -> list[SleepStep]:
    """Steps of every strategy on real ranks: the fastest of some, and one more whose memory is counted."""
    rows = launch(_on_rank, case.ranks, args=(case, list(strategies)), timeout=PATIENCE)
    worst = [[max(column) for column in zip(*its, strict=True)] for its in zip(*rows, strict=True)]
    return [
        SleepStep(case, name, seconds, int(peak), int(predicted))
        for name, (seconds, peak, predicted) in zip(strategies, worst, strict=True)
    ]


def _on_rank(rank: int, case: SleepCase, strategies: Sequence[str]) -> list[tuple[float, int, int]]:
    mesh = build_mesh({"dp": case.ranks})
    naps = dict(zip(case.shapes, case.sleeps(), strict=True))

    def sleep(whole: Tensor, sides: Sequence[int], *_: Any) -> Tensor:
        time.sleep(naps[sides[-2], sides[-1]])
        return whole.clone()

    found = []
    with mock.patch.object(orthogonalize, "newton_schulz_update", sleep):
        for name in strategies:
            found.append(_one(rank, case, name, mesh))
    return found


def _one(rank: int, case: SleepCase, name: str, mesh: Any) -> tuple[float, int, int]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in case.shapes]
    builder = BUILDERS[name] if case.limit is None else partial(BUILDERS[name], round_bytes=case.limit)
    muon = Muon(params, strategy=builder, mesh=mesh, initial_values="compare", compare_every=None)
    for param in params:
        param.grad = torch.ones_like(param)
    muon.step()
    seconds = []
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        dist.barrier()
        start = time.perf_counter()
        muon.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    for param in params:
        param.grad = torch.ones_like(param)
    with PeakMemory() as seen:
        muon.step()
    assert muon.plan is not None
    return min(seconds), seen.peak, _predicted(muon.plan, rank)


def _predicted(plan: Plan, rank: int) -> int:
    step = step_over_ones(plan, plan.grid.at(rank), torch.device("meta"))
    with (
        torch.no_grad(),
        mock.patch.object(orthogonalize, "newton_schulz_update", lambda whole, *_: whole.clone()),
    ):
        walk_alone(step.agree(), lambda request: None)
        with PeakMemory() as seen:
            walk_alone(step.step(), lambda request: None)
    return seen.peak


def sleep_table(steps: Sequence[SleepStep], command: str) -> Table:
    """Seconds of each case and strategy, over the best that whole matrices allow."""
    rows: tuple[TableRow, ...] = tuple(
        {
            "matrices": it.case.name,
            "a round": "one each" if it.case.limit else "default",
            "ranks": it.case.ranks,
            "strategy": it.strategy,
            "seconds": round(it.seconds, 2),
            "best": round(it.case.best, 2),
            "over the best": round(it.seconds / it.case.best, 2),
            "peak MB": round(it.peak / 1e6, 1),
            "predicted MB": round(it.predicted / 1e6, 1),
        }
        for it in steps
    )
    return Table("Owners that work at once", rows, command, NOTES)
