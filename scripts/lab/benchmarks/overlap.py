"""How much of a gradient reduction hides behind backward with ``overlap_grad_reduce``, on real ranks.

Three kinds of rounds take turns in one run: backward alone, backward and then the reduction, and backward
with the reduction in it. The exposed time is how much longer the last kind takes than the first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.launching.launch import launch
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.plan.strategies import Builder, layerwise, zero1
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from .turns import slowest

TITLE = "Gradient reduction during backward"
BUILDERS: dict[str, Builder] = {"zero1": zero1, "layerwise": layerwise}
WIDTH, LAYERS, TOKENS = 256, 12, 12_288
ALONE, LATE, EARLY = "backward alone", "reduced after it", "reduced during it"


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """A chain of ``LAYERS`` square matrices, one per bucket, whose gradients are reduced over ``ranks``."""

    strategy: str
    ranks: int
    tokens: int
    link: str


@dataclass(frozen=True, slots=True)
class OverlapSeconds:
    """Median seconds from before ``backward()`` until gradients are averaged, by kind of round."""

    seconds: dict[str, float]
    same_bits: bool

    @property
    def exposed(self) -> float:
        """The part of the reduction's time that backward did not hide."""
        alone = self.seconds[ALONE]
        return (self.seconds[EARLY] - alone) / (self.seconds[LATE] - alone)


def measure_overlap(cases: Sequence[OverlapCase], rounds: int) -> list[OverlapSeconds]:
    """Time each case on real ranks of this machine; the slowest rank counts."""
    found = []
    for case in cases:
        by_rank = launch(time_rounds, case.ranks, args=(case, rounds), timeout=300)
        seconds = {
            kind: statistics.median(slowest([times[kind] for times, _ in by_rank])) for kind in by_rank[0][0]
        }
        found.append(OverlapSeconds(seconds, all(same for _, same in by_rank)))
    return found


def time_rounds(rank: int, case: OverlapCase, rounds: int) -> tuple[dict[str, list[float]], bool]:
    """One rank's seconds by kind, and whether late and early gradients are equal. All ranks must call."""
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh({"dp": case.ranks}))
    builder = partial(BUILDERS[case.strategy], round_bytes=4 * WIDTH * WIDTH)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    late, early = (
        Muon(model.parameters(), strategy=builder, mesh=world, overlap_grad_reduce=sends)
        for sends in (False, True)
    )
    data = torch.randn(case.tokens, WIDTH, generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {ALONE: [], LATE: [], EARLY: []}
    averaged: dict[str, list[torch.Tensor]] = {}
    for number in range(rounds + 1):
        for kind, its in seconds.items():
            loss = model(data).square().mean()
            dist.barrier()
            begin = time.perf_counter()
            with nullcontext() if kind == EARLY else early.no_sync():
                loss.backward()
            optimizer = early if kind == EARLY else late
            if kind != ALONE:
                optimizer.ready_gradients()
            if number:  # the first one warms up
                its.append(time.perf_counter() - begin)
            readied = optimizer.plan_steps[0].readied
            averaged[kind] = [readied[index].clone() for index in sorted(readied)]
            early.zero_grad()
            late.zero_grad()
    return seconds, all(map(torch.equal, averaged[LATE], averaged[EARLY]))


def overlap_table(found: Sequence[tuple[OverlapCase, OverlapSeconds]], command: str) -> Table:
    """A row per case: seconds of each kind, and the exposed time."""
    rows: list[TableRow] = [
        {
            "strategy": case.strategy,
            "ranks": case.ranks,
            "link": case.link,
            "tokens a rank": case.tokens,
            **{f"{kind} ms": round(1000 * its.seconds[kind], 1) for kind in its.seconds},
            "exposed of the reduction": round(its.exposed, 3),
            "same bits": "yes" if its.same_bits else "no",
        }
        for case, its in found
    ]
    notes = (
        f"{LAYERS} matrices of {WIDTH} × {WIDTH} in fp32, a matrix a bucket. From before `backward()` until "
        "`ready_gradients()` has returned, on the slowest rank; medians of rounds that take turns.",
    )
    return Table(TITLE, tuple(rows), command, notes)
