"""Measures seconds and memory of whole steps on 1, 2, 4 and 8 real ranks, which take turns in one launch.

Every rank holds all parameters and the same averaged gradients, as under DDP. While some ranks step, the
others wait for the next turn. The strategies are compared with the best that two ranks could do (``APART``):
each rank steps only the half of the matrices that ``owner`` gives it, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from muon_tutorial import Muon, launch
from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.launching.group_timeouts import new_groups_time_out
from muon_tutorial.orthogonalizers.named import STOCK

from .other_muons import SETTINGS, Params
from .step_benchmark import StepSet, give
from .step_work import state_bytes, watch_first_step
from .turns import in_milliseconds, ratios_by_round, slowest, timed

PATIENCE = 600.0
"""Seconds that ranks wait while other ranks have their turns."""

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
    """A case's steps, on one rank or as the maximum over ranks. ``seconds``: one number per round. ``extra``:
    bytes that the first step allocated beyond parameters, gradients and momentum. ``momentum``: bytes of the
    momentum."""

    case: RankCase
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
    options: dict[str, Any] = {"backend": "gloo" if device == "cpu" else "nccl", "timeout": PATIENCE}
    args = (work, list(chosen), rounds, device, orthogonalize)
    by_rank = launch(time_cases, max(case.ranks for case in chosen), args=args, **options)
    found = []
    for case in chosen:
        parts = [rank[case] for rank in by_rank if case in rank]
        extra, momentum = max(part.extra for part in parts), max(part.momentum for part in parts)
        found.append(RankSteps(case, slowest([part.seconds for part in parts]), extra, momentum))
    return found


def time_cases(
    rank: int, work: StepSet, chosen: Sequence[RankCase], rounds: int, device_type: str, orthogonalize: str
) -> Mapping[RankCase, RankSteps]:
    """One rank's measurements in the cases in which it takes part. All ranks must call it."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device(device_type)
    params, gradients = work.parameters(device), work.gradients(device)
    counts = sorted({case.ranks for case in chosen})
    with new_groups_time_out(PATIENCE):
        meshes = {n: DeviceMesh(device_type, list(range(n)), mesh_dim_names=("dp",)) for n in counts}
    steps: dict[RankCase, Muon] = {}
    parts: dict[RankCase, RankSteps] = {}
    for case in chosen:
        dist.barrier()
        if rank < case.ranks:
            make = _maker(case, params, meshes[case.ranks], rank, orthogonalize)
            given = give(params, gradients)
            steps[case], seen = watch_first_step(make, device)
            del given
            momentum = state_bytes(steps[case])
            parts[case] = RankSteps(case, [], seen.peak - momentum, momentum)
    for _ in range(rounds):
        for case in chosen:
            dist.barrier()  # the previous turn is over
            given = give(params, gradients) if rank < case.ranks else []
            dist.barrier()  # all ranks of this turn have their gradients
            if rank < case.ranks:
                parts[case].seconds.append(timed(steps[case].step, device))
            del given
    return parts


def _maker(
    case: RankCase, params: Params, mesh: DeviceMesh, rank: int, orthogonalize: str
) -> Callable[[], Muon]:
    """Return a function that makes a rank's optimizer, for all parameters or, with ``APART``, for the half
    that ``owner`` gives the rank. All ranks of the case must call this."""
    settings = {"orthogonalize": orthogonalize, **SETTINGS}
    if case.strategy != APART:
        return partial(Muon, params, mesh=mesh, **STRATEGIES[case.strategy], **_UNCOMPARED, **settings)
    plan = Muon(params, strategy=OWNER, mesh=mesh, **_UNCOMPARED).plan
    assert plan is not None
    mine = [param for index, param in enumerate(params) if rank in plan.workers(index)]
    return partial(Muon, mine, **settings)


_UNCOMPARED: Mapping[str, Any] = {"initial_values": "compare", "compare_every": None}
"""Turns comparisons between ranks off, because in these cases the ranks' values drift apart. The drift does
not change the seconds."""


def ranks_table(found: Sequence[RankSteps], orthogonalize: str, command: str) -> Table:
    base = next(one.seconds for one in found if one.case == RankCase(OWNER, 1))
    rows: list[TableRow] = []
    for one in found:
        ratio, *_ = ratios_by_round(base, one.seconds)
        row: TableRow = {
            "strategy": one.case.strategy,
            "ranks": one.case.ranks,
            **in_milliseconds(one.seconds),
            "times one rank": round(ratio, 2),
            "peak MB": round(one.extra / 1e6, 1),
            "momentum MB": round(one.momentum / 1e6, 1),
        }
        rows.append(row)
    notes = (
        f"Medians and quartiles of {len(base)} steps of the slowest rank, one thread a rank, "
        f"`orthogonalize={orthogonalize!r}`; `times one rank` is the median of the ratios within each turn. "
        "Every rank holds all parameters and their averaged gradients. Memory is that of the rank with most: "
        "`peak MB` is what it allocated beyond parameters, gradients and momentum, while the optimizer was "
        f"made and took its first step. {APART.capitalize()}: what `owner` could reach on 2 ranks if "
        "nothing had to travel.",
    )
    return Table("Whole steps over ranks", tuple(rows), command, notes)
