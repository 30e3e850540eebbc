"""Seconds and memory of whole steps on 1, 2, 4 and 8 real ranks, all numbers of ranks in turns in one launch.

Every rank holds all parameters and the same averaged gradients, as under DDP. While some ranks step, the
others wait for the next turn. The strategies are compared with the best that two ranks could do: each steps
the half of the matrices that ``owner`` gives it, as a separate process that sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from muon_tutorial.evidence.tables import Table, TableRow, median_and_spread
from muon_tutorial.launching.launch import launch
from muon_tutorial.launching.timeouts import new_groups_time_out
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.orthogonalizers.named import STOCK

from .peers import SETTINGS, Params
from .step_benchmark import StepSet, give, time_step
from .step_work import state_bytes, watch

PATIENCE = 600.0
"""Seconds that ranks wait for the others' turns."""

APART = "two halves, no communication"
OWNER = "owner"
OVERLAPPED = "owner, window=2"
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    OWNER: {"strategy": "owner", "window": 1},
    OVERLAPPED: {"strategy": "owner", "window": 2},
    "round_robin": {"strategy": "round_robin"},
}
"""The optimizer's options for each strategy, by its name in the tables."""
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class RankCase:
    """One of ``STRATEGIES``, or ``APART``, on some number of ranks."""

    strategy: str
    ranks: int


@dataclass(frozen=True, slots=True)
class RankSteps:
    """A case's steps: seconds of the slowest rank, one per round; the most bytes that a rank's first step
    allocated beyond parameters, gradients and momentum; and the most bytes of momentum that a rank keeps."""

    case: RankCase
    seconds: Sequence[float]
    extra: int
    momentum: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part in a case: its own seconds, and bytes as ``RankSteps`` has them."""

    seconds: list[float]
    extra: int
    momentum: int


def cases(ranks: Sequence[int] = RANKS, strategies: Iterable[str] = STRATEGIES) -> list[RankCase]:
    """Every strategy on every number of ranks, in the order of their turns; on one rank, only ``owner``."""
    found = []
    for count in ranks:
        found += [RankCase(name, count) for name in strategies if count > 1 or name == OWNER]
        found += [RankCase(APART, 2)] if count == 2 else []
    return found


def measure_over_ranks(
    work: StepSet,
    chosen: Sequence[RankCase],
    rounds: int,
    device: str = "cpu",
    orthogonalize: str = STOCK,
) -> list[RankSteps]:
    """Time the cases on real ranks of this machine, one thread each; on ``"cuda"``, one GPU each."""
    count = max(case.ranks for case in chosen)
    backend = "gloo" if device == "cpu" else "nccl"
    args = (work, list(chosen), rounds, device, orthogonalize)
    by_rank = launch(time_cases, count, args=args, backend=backend, timeout=PATIENCE)
    return [_together(case, [rank[case] for rank in by_rank if case in rank]) for case in chosen]


def _together(case: RankCase, parts: Sequence[RankPart]) -> RankSteps:
    slowest = [max(turn) for turn in zip(*(part.seconds for part in parts), strict=True)]
    extra, momentum = max(part.extra for part in parts), max(part.momentum for part in parts)
    return RankSteps(case, slowest, extra, momentum)


def time_cases(
    rank: int, work: StepSet, chosen: Sequence[RankCase], rounds: int, device_type: str, orthogonalize: str
) -> Mapping[RankCase, RankPart]:
    """One rank's part in every case in which it takes part. All ranks must call."""
    torch.set_num_threads(1)
    held = RankSet.of(
        work, torch.device("cuda", rank) if device_type == "cuda" else torch.device(device_type)
    )
    meshes = _meshes(sorted({case.ranks for case in chosen}), device_type)
    steps: dict[RankCase, Muon] = {}
    parts: dict[RankCase, RankPart] = {}
    for case in chosen:
        dist.barrier()
        if rank < case.ranks:
            mine = _stepped(case, held.params, meshes[case.ranks], rank)
            steps[case], parts[case] = held.first_step(case, mine, meshes[case.ranks], orthogonalize)
    for _ in range(rounds):
        for case in chosen:
            dist.barrier()  # the previous turn is over
            given = give(held.params, held.gradients) if rank < case.ranks else []
            dist.barrier()  # all ranks of this turn have their gradients
            if rank < case.ranks:
                parts[case].seconds.append(time_step(steps[case], held.device))
            del given
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class RankSet:
    """All parameters and their gradients, as one rank holds them."""

    device: torch.device
    params: Params
    gradients: Sequence[Tensor]

    @classmethod
    def of(cls, work: StepSet, device: torch.device) -> RankSet:
        """The same on every rank."""
        return cls(device, work.parameters(device), work.gradients(device))

    def first_step(
        self, case: RankCase, mine: Params, mesh: DeviceMesh, orthogonalize: str
    ) -> tuple[Muon, RankPart]:
        """Make a case's optimizer over parameters and take its first step, watched."""
        made: list[Muon] = []

        def begin() -> None:
            made.append(_make(case, mine, mesh, orthogonalize))
            made[0].step()

        given = give(self.params, self.gradients)
        seen = watch(begin, self.device)
        del given
        momentum = state_bytes(made[0])
        return made[0], RankPart([], seen.peak - momentum, momentum)


def _meshes(counts: Sequence[int], device_type: str) -> dict[int, DeviceMesh]:
    """A mesh of the first ranks, for each number of them. All ranks must call."""
    with new_groups_time_out(PATIENCE):
        return {n: DeviceMesh(device_type, list(range(n)), mesh_dim_names=("dp",)) for n in counts}


def _stepped(case: RankCase, params: Params, mesh: DeviceMesh, rank: int) -> Params:
    """The parameters for a rank's optimizer: all, or the half that ``owner`` gives the rank. All ranks of
    the case must call this."""
    if case.strategy != APART:
        return params
    plan = Muon(params, strategy=OWNER, mesh=mesh, **_UNCOMPARED).plan
    assert plan is not None
    return [param for index, param in enumerate(params) if rank in plan.workers(index)]


_UNCOMPARED: Mapping[str, Any] = {"initial_values": "compare", "compare_every": None}
"""Turns comparisons off: the ranks' values drift apart under several cases. Seconds do not depend on that."""


def _make(case: RankCase, params: Params, mesh: DeviceMesh, orthogonalize: str) -> Muon:
    if case.strategy == APART:
        return Muon(params, orthogonalize=orthogonalize, **SETTINGS)
    options = {**STRATEGIES[case.strategy], "mesh": mesh, **_UNCOMPARED}
    return Muon(params, orthogonalize=orthogonalize, **options, **SETTINGS)


RANKS_TITLE = "Whole steps over ranks"


def ranks_table(found: Sequence[RankSteps], orthogonalize: str, command: str) -> Table:
    """Milliseconds of a step, its speedup over ``owner`` on one rank, and memory."""
    base = next(one.seconds for one in found if one.case == RankCase(OWNER, 1))
    rows: list[TableRow] = []
    for one in found:
        middle, low, high = (1e3 * value for value in median_and_spread(one.seconds))
        ratio, *_ = median_and_spread([a / b for a, b in zip(base, one.seconds, strict=True)])
        rows.append(
            {
                "strategy": one.case.strategy,
                "ranks": one.case.ranks,
                "ms": round(middle, 1),
                "quarter below": round(low, 1),
                "quarter above": round(high, 1),
                "times one rank": round(ratio, 2),
                "peak MB": round(one.extra / 1e6, 1),
                "momentum MB": round(one.momentum / 1e6, 1),
            }
        )
    notes = (
        f"Medians and quartiles of {len(base)} steps of the slowest rank, one thread a rank, "
        f"`orthogonalize={orthogonalize!r}`; `times one rank` is the median of the ratios within each turn. "
        "Every rank holds all parameters and their averaged gradients. Memory is that of the rank with most: "
        "`peak MB` beyond parameters, gradients and momentum, while the optimizer was made and took its "
        f"first step. {upper(APART)}: what `owner` could reach on 2 ranks if nothing had to travel.",
        *(f"{upper(text)}." for text in ratios(found).values()),
    )
    return Table(RANKS_TITLE, tuple(rows), command, notes)


def ratios(found: Sequence[RankSteps]) -> dict[str, str]:
    """The goals for ``owner`` as sentences, with the medians of ratios within each turn."""
    seconds = {one.case: one.seconds for one in found}

    def ratio(above: RankCase, below: RankCase) -> float | None:
        if above not in seconds or below not in seconds:
            return None
        pairs = zip(seconds[above], seconds[below], strict=True)
        return median_and_spread([a / b for a, b in pairs])[0]

    asked: dict[str, tuple[str, float | None]] = {}
    for name in (OWNER, OVERLAPPED):
        two = RankCase(name, 2)
        asked |= {
            f"{name}: speed": (
                f"`{name}` on 2 ranks is {{:.2f}} times as fast as on one",
                ratio(RankCase(OWNER, 1), two),
            ),
            f"{name}: apart": (
                "its speed on 2 ranks is {:.2f} of the two halves'",
                ratio(RankCase(APART, 2), two),
            ),
            f"{name}: eight": (
                f"`{name}` on 8 ranks takes {{:.2f}} times as long as on 2",
                ratio(RankCase(name, 8), two),
            ),
        }
    return {name: text.format(value) for name, (text, value) in asked.items() if value is not None}


def upper(text: str) -> str:
    """The text with its first letter capitalized."""
    return text[0].upper() + text[1:]
