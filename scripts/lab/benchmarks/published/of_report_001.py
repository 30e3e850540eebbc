"""The figures of the published reproduction report: sizes come from its traces, the link from its author.

See ``scripts.lab.report_001``, which traces each of its headline figures back to the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import cast

import torch

from muon_tutorial.engine.collective import Collective, Kind, Label, Walk
from muon_tutorial.evidence.traces.profiler_trace import CollectiveSum
from muon_tutorial.learn.cheaper.published_traces import TraceSummary, packaged_summaries, step_sizes
from muon_tutorial.plan.grid import Coordinate, Grid
from muon_tutorial.plan.layout import Shard
from muon_tutorial.plan.matrix import Matrix
from muon_tutorial.plan.strategies import zero1
from muon_tutorial.timing.timed_world import TimedWorld
from muon_tutorial.timing.timeline_cases import walk_ranks

from ...report_001 import MS
from .claim import Claim, counted, seconds
from .devices import RTX_A4000, machine_of

DTYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16}


@cache
def traced() -> dict[str, TraceSummary]:
    """The data read from the report's traces."""
    return packaged_summaries()


def like_for_like() -> float:
    """Bytes of ZeRO-1 Muon over those of ZeRO-1 AdamW on the report's grid, including the gather over tp."""
    sizes = step_sizes(traced()["adamw"], traced()["muon"])
    return float((sizes.zero1_muon() + sizes.tp_gather()) / sizes.zero1_adamw())


def kernels(name: str) -> float:
    """Milliseconds per step of a run's communication kernels, according to its trace."""
    return traced()[name].kernels / traced()[name].steps / MS


def communicating(name: str) -> float:
    """Predicted milliseconds per step of the same collectives on the author's link."""
    grid = Grid.of(dp=2, tp=2)
    walks = [_collectives(traced()[name].collectives, grid.at(rank)) for rank in grid.ranks]
    run = TimedWorld(grid, machine_of(RTX_A4000)).run(walks)
    return sum(flight.end - flight.begin for flight in run.flights if 0 in flight.group and flight.end) * 1e3


def _collectives(rows: Sequence[CollectiveSum], at: Coordinate) -> Walk:
    """One step's collectives: over all ranks, or each gather over an axis of its own, first dp's."""
    for row, axis in zip(rows, ("dp", "tp", "", "", ""), strict=False):
        axes = ("dp", "tp") if row.group == at.grid.world_size else (axis,)
        dtype = DTYPES[row.dtype]
        mine = torch.empty(row.sent, dtype=dtype, device="meta")
        yield Collective(cast(Kind, row.kind), axes, dtype, mine, row.received, Label(row.kind))


def overlapped() -> float:
    """Seconds of a step with a window of three over one with a window of one: the report's largest matrix.

    That matrix is 92 % of the model, so there is one bucket.
    """
    return _step(window=3) / _step(window=1)


def _step(window: int) -> float:
    grid = Grid.of(dp=2, tp=2)
    plan = zero1([Matrix(0, "largest", (4096, 4096), (("tp", Shard(0)),))], grid)
    return walk_ranks(plan, machine_of(RTX_A4000), window).seconds


REPORT = (
    "a report that reproduced it",
    "https://discuss.huggingface.co/t/"
    "reproducing-validating-distributed-muon-moonshotai-performance-communication-results/170969",
)
TRACES = (
    "its traces",
    "https://huggingface.co/datasets/bird-of-paradise/muon-distributed-reproducibility",
)
LINK = "PCIe 4.0 ×4, as its author says, of which 0.8 is reached, as our files assume of any link in a node."

CLAIMS: Sequence[Claim] = (
    counted(
        "communication of Muon on dp=2 × tp=2 over AdamW's, by the report",
        0.57, "×", *REPORT, "all",
        "Bytes, like with like: ZeRO-1 both, in fp32, the gather over tp included; sizes from its traces.",
        like_for_like,
        "Theirs is a sum of times in which each collective counts four times, and AdamW's run does other "
        "work: it all-reduces the whole model, unsharded, where Muon's begins with gradients averaged and "
        "ends before parameters are gathered. `python -m scripts.lab.report_001` follows it.",
        below=1.0,
    ),
    seconds(
        "milliseconds a step of AdamW's all_reduces on its four GPUs",
        kernels("adamw"), "ms", *TRACES, "all", LINK, partial(communicating, "adamw"),
        "A kernel's time holds its waiting for peers, and such links rarely let GPUs write to each other "
        "directly: its largest all_reduce moves 4.7 GB/s of the 7.9 that the link could.",
    ),
    seconds(
        "the two runs' communication kernels as they were, Muon's over AdamW's",
        kernels("muon") / kernels("adamw"), "×", *TRACES, "all", LINK,
        lambda: communicating("muon") / communicating("adamw"),
        "Muon's first gather took 8.6 ms for 9.3 MB, its second 5.2 ms for 16.8 MB: the first one waits for "
        "the other rank. Rank 0's trace alone cannot tell how long.",
        below=1.0,
    ),
    seconds(
        "a step with async_op=True over one without, by the report",
        2.1, "×", *REPORT, "all",
        "Its 4096 × 4096 matrix, 92 % of the model, in one bucket on dp=2 × tp=2; windows of 3 and 1.",
        overlapped,
        "Theirs sums the times of kernels that spin while they wait. The span of the GPU's work in the same "
        "traces fell to 0.90. With one bucket there is nothing to overlap with, so ours stays.",
        above=1.1,
    ),
)  # fmt: skip
