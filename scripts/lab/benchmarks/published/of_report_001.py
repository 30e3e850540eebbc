"""The figures of the published reproduction report. The sizes come from its traces, and the GPUs' link from
its author.

See ``scripts.lab.report_001``, which traces each headline figure back to its events.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import torch

from muon_tutorial import Coordinate, Grid, Matrix, Shard, zero1
from muon_tutorial.engine.collective import Collective, Kind, Label, Walk
from muon_tutorial.evidence.traces.profiler_trace import CollectiveSum
from muon_tutorial.learn.cheaper.published_traces import TraceSummary, report, step_sizes
from muon_tutorial.timing.timed_world import TimedWorld
from muon_tutorial.timing.timeline_cases import walk_ranks

from ...report_001 import MS
from .devices import machine_of

DTYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16}


@cache
def traced() -> dict[str, TraceSummary]:
    return report()


def like_for_like() -> float:
    """On the report's grid: bytes of ZeRO-1 Muon, with its tp gather, divided by those of ZeRO-1 AdamW."""
    sizes = step_sizes(traced()["adamw"], traced()["muon"])
    return float((sizes.zero1_muon() + sizes.tp_gather()) / sizes.zero1_adamw())


def kernels(name: str) -> float:
    """Milliseconds per step of a run's communication kernels, according to its trace."""
    return traced()[name].kernels / traced()[name].steps / MS


def kernels_over_adamw() -> float:
    return kernels("muon") / kernels("adamw")


def communicating(name: str) -> float:
    """Predicted milliseconds of a run's collectives in one step, on the report's author's link."""
    grid = Grid.of(dp=2, tp=2)
    walks = [_collectives(traced()[name].collectives, grid.at(rank)) for rank in grid.ranks]
    run = TimedWorld(grid, machine_of("RTX A4000")).run(walks)
    return sum(flight.end - flight.begin for flight in run.flights if 0 in flight.group and flight.end) * 1e3


def communicating_over_adamw() -> float:
    return communicating("muon") / communicating("adamw")


def _collectives(rows: Sequence[CollectiveSum], at: Coordinate) -> Walk:
    """The collectives of one step. In groups smaller than the world, row 0 runs over dp, row 1 over tp."""
    for row, axis in zip(rows, ("dp", "tp", "", "", ""), strict=False):
        axes = ("dp", "tp") if row.group == at.grid.world_size else (axis,)
        dtype = DTYPES[row.dtype]
        mine = torch.empty(row.sent, dtype=dtype, device="meta")
        yield Collective(cast(Kind, row.kind), axes, dtype, mine, row.received, Label(row.kind))


def overlapped() -> float:
    """For the largest matrix: seconds of a step with window 3, divided by those with window 1.

    This matrix is 92 % of the model, so the plan has this matrix alone, in one bucket.
    """
    return _step(window=3) / _step(window=1)


def _step(window: int) -> float:
    grid = Grid.of(dp=2, tp=2)
    plan = zero1([Matrix(0, "largest", (4096, 4096), (("tp", Shard(0)),))], grid)
    return walk_ranks(plan, machine_of("RTX A4000"), window).seconds
