"""Makes the tables that are measured on real ranks: bytes, seconds and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from muon_tutorial import Coordinate, Grid, LiveWorld, Matrix, build_mesh, launch
from muon_tutorial.engine.collective import Collective, Start, Walk
from muon_tutorial.evidence.memory import PeakMemory, plan_memory
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.evidence.tables import Table, TableRow, median_and_spread
from muon_tutorial.plan.strategies import STRATEGIES, Builder, Plan, zero1
from muon_tutorial.worlds.shadow import walk_alone

from .contender_costs import ContenderCost, read_contenders
from .contenders import AGAINST, CONTENDERS, Workload
from .turns import ratios_by_round, slowest

RANKS = 4
PATIENCE = 120.0

Costs = dict[str, list[ContenderCost]]
"""The measurements of each rank, by contender."""


def read_all(work: Workload, rounds: int, names: Sequence[str] = tuple(CONTENDERS)) -> Costs:
    """Measure each contender on four real ranks, in one run."""
    by_rank = launch(read_contenders, RANKS, args=(list(names), work, rounds), timeout=PATIENCE)
    return {name: [ranks[i] for ranks in by_rank] for i, name in enumerate(names)}


def bytes_table(costs: Costs, command: str) -> Table:
    most = {name: max(ranks, key=lambda one: one.wire.tcp) for name, ranks in costs.items()}
    rows: tuple[TableRow, ...] = tuple(
        {
            "contender": name,
            **{what: getattr(one.asked, what) for what in ("collectives", "payload", "ring")},
            "Gloo data": one.wire.data,
            "Gloo with preambles": one.wire.tcp,
            "counted by the kernel": one.tcp,
        }
        for name, one in most.items()
    )
    notes = (
        "Bytes of one step, forward and backward included, at the rank that sends most. The last two columns "
        "are predicted from what was asked for, and counted on the rank's own TCP sockets; they agree on "
        "every rank to the byte.",
    )
    return Table("Bytes of a step: every contender on the same work", rows, command, notes)


def ratios_table(costs: Costs, command: str) -> Table:
    rows = tuple(_ratio_row(name, costs[name], costs[other]) for name, other in AGAINST.items())
    notes = (
        "Ratios; above 1 Muon costs more. Bytes and state are summed over ranks. Seconds are those of the "
        "slowest rank: a ratio is taken in each round, and the table has the median of these ratios and, in "
        "the next two columns, their quartiles. `collectives alone` repeats a step's collectives with "
        "nothing to compute in between. With tensor parallelism the bytes include activations, for Muon and "
        "AdamW.",
    )
    return Table("Muon against AdamW", rows, command, notes)


def _ratio_row(name: str, mine: Sequence[ContenderCost], its: Sequence[ContenderCost]) -> TableRow:
    state, its_state = (sum(rank.memory.matrix_state for rank in ranks) for ranks in (mine, its))
    alone, *_ = ratios_by_round(_slowest(mine, "collectives"), _slowest(its, "collectives"))
    columns = {"payload": "payload", "ring": "ring", "Gloo data": "gloo"}
    return {
        "contender": name,
        "against": AGAINST[name],
        **{said: _sum(mine, what) / _sum(its, what) for said, what in columns.items()},
        "collectives alone": alone,
        **_whole_step(mine, its),
        "state of the matrices": state / its_state,
    }


def _whole_step(mine: Sequence[ContenderCost], its: Sequence[ContenderCost]) -> TableRow:
    quartiles = ratios_by_round(steps_of(mine), steps_of(its))
    return dict(zip(("whole step", "a quarter below", "a quarter above"), quartiles, strict=True))


def _sum(ranks: Sequence[ContenderCost], column: str) -> int:
    return sum(getattr(one.asked, column) for one in ranks)


def steps_of(ranks: Sequence[ContenderCost]) -> list[float]:
    """Each round's seconds on the slowest rank."""
    return slowest([[*map(sum, zip(rank.learn, rank.finish, strict=True))] for rank in ranks])


def shares_of(ranks: Sequence[ContenderCost]) -> list[float]:
    """The fraction of each round that ``finish`` takes. Each part's time is that of its slowest rank."""
    return [f / (f + x) for f, x in zip(_slowest(ranks, "finish"), _slowest(ranks, "learn"), strict=True)]


def _slowest(ranks: Sequence[ContenderCost], part: str) -> list[float]:
    return slowest([getattr(rank, part) for rank in ranks])


PAIRED = ("Muon zero1, DP=4", "Muon zero1, DP=2×TP=2", "Muon owner, FSDP2, DP=4")
SEQUENCES = (4, 16, 64)


def read_batches(work: Workload, rounds: int) -> dict[int, Costs]:
    """The paired contenders' costs on four real ranks, by the number of sequences in the global batch."""
    both = [each for name in PAIRED for each in (name, AGAINST[name])]
    return {batch: read_all(replace(work, batch=batch), rounds, both) for batch in SEQUENCES}


def batches_table(found: dict[int, Costs], context: int, command: str) -> Table:
    rows: tuple[TableRow, ...] = tuple(
        {
            "contender": name,
            "against": AGAINST[name],
            "tokens in the batch": batch * context,
            "step ms": 1e3 * _middle(steps_of(costs[name])),
            "AdamW's step ms": 1e3 * _middle(steps_of(costs[AGAINST[name]])),
            **_whole_step(costs[name], costs[AGAINST[name]]),
            "optimizer's share": _middle(shares_of(costs[name])),
        }
        for name in next(iter(found.values()))
        if name in AGAINST
        for batch, costs in found.items()
    )
    notes = (
        "The work of forward and backward grows with the batch, but the optimizer's does not: Muon's extra "
        "time is a part of the step that shrinks. Above 1, Muon takes longer. A ratio is taken in each "
        "round; the table has the median of these ratios and their quartiles.",
    )
    return Table("Where the extra time vanishes: larger batches", rows, command, notes)


def seconds_table(costs: Costs, command: str) -> Table:
    rows: list[TableRow] = []
    for name, ranks in costs.items():
        median, low, high = (1e3 * value for value in median_and_spread(steps_of(ranks)))
        row: TableRow = {
            "contender": name,
            "step ms": median,
            "a quarter below": low,
            "a quarter above": high,
            "forward and backward ms": 1e3 * _middle(_slowest(ranks, "learn")),
            "optimizer ms": 1e3 * _middle(_slowest(ranks, "finish")),
            "optimizer's share": _middle(shares_of(ranks)),
            "collectives alone ms": 1e3 * _middle(_slowest(ranks, "collectives")),
        }
        rows.append(row)
    notes = (
        "Medians over rounds, for the slowest rank. Four ranks, each with one thread, share two cores, so "
        "read ratios within a table and not milliseconds. DDP and FSDP2 reduce gradients during backward, "
        "the others in the optimizer's part.",
    )
    return Table("Seconds of a step", tuple(rows), command, notes)


def _middle(values: Sequence[float]) -> float:
    return median_and_spread(values)[0]


def state_table(costs: Costs, command: str) -> Table:
    memory = {name: [rank.memory for rank in ranks] for name, ranks in costs.items()}
    rows: tuple[TableRow, ...] = tuple(
        {
            "contender": name,
            **{what: _most(its, what) for what in ("parameters", "gradients", "state")},
            "state of the matrices": _most(its, "matrix_state"),
            "matrices' state, all ranks": sum(one.matrix_state for one in its),
            "peak in the optimizer": _most(its, "peak"),
        }
        for name, its in memory.items()
    )
    notes = (
        "Bytes, at the rank that holds most; the peak counts every tensor that PyTorch makes after backward "
        "and before the step's end, which leaves out what DDP keeps in C++.",
    )
    return Table("Memory of the contenders", rows, command, notes)


def _most(ranks: Sequence[object], what: str) -> int:
    return max(getattr(rank, what) for rank in ranks)


# Memory of the strategies: predicted by the plan, and measured


AFTER = "after the last request"

VARIANTS: dict[str, Builder] = {
    **{name: STRATEGIES[name] for name in ("replicated", "round_robin")},
    "zero1, gather all": zero1,
    "zero1, boundary": partial(zero1, gather="boundary"),
    **{name: STRATEGIES[name] for name in ("layerwise", "gram", "owner", "owner_per_replica")},
}


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak bytes of one rank's step by phase: from a walk without data, and from a real step."""

    predicted: dict[str, int]
    measured: dict[str, int]


def note_phases(walk: Walk, seen: PeakMemory, peaks: dict[str, int]) -> Walk:
    """A walk that makes the requests of ``walk``, and at each request notes the peak since the previous one.

    ``peaks`` gets each phase's largest peak; the peak after the last request has the phase ``AFTER``.
    Run the walk only inside ``with seen``.
    """
    answers: list[Any] = [None]
    phase = ""
    while phase != AFTER:
        try:
            turn = walk.send(answers.pop())  # no other reference, so the walk decides when to free it
        except StopIteration:
            turn, phase = None, AFTER
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Collective):
            phase = request.label.phase
        if isinstance(request, Collective) or turn is None:
            peaks[phase] = max(peaks.get(phase, 0), seen.lap())
        del request
        if turn is not None:
            answers.append((yield turn))
        del turn


def _peaks(plan: Plan, at: Coordinate, device: str, run: Callable[[Walk], object]) -> dict[str, int]:
    """The most bytes that one rank's step (without gradient flags) adds to its memory, by phase."""
    step = step_over_ones(plan, at, torch.device(device))
    step.present = frozenset(range(len(step.parameters)))
    peaks: dict[str, int] = {}
    with torch.no_grad(), PeakMemory() as seen:
        run(note_phases(step.walk(), seen, peaks))
    return peaks


def read_peaks(rank: int, matrices: Sequence[Matrix], grid: Grid, round_bytes: int) -> dict[str, Peak]:
    """Predicted and measured peaks of every strategy on this rank. All ranks must call it."""
    world = LiveWorld(build_mesh(grid))
    found = {}
    for name, builder in VARIANTS.items():
        plan = builder(matrices, grid, round_bytes=round_bytes)
        predicted = _peaks(plan, world.at, "meta", lambda walk: walk_alone(walk, lambda request: None))
        # A backend frees its buffers in another thread, so the smallest of five is the step's own peak.
        five = [_peaks(plan, world.at, "cpu", world.run) for _ in range(5)]
        found[name] = Peak(predicted, {phase: min(one[phase] for one in five) for phase in five[0]})
    return found


def memory_table(command: str, matrices: Sequence[Matrix], grid: Grid, round_bytes: int) -> Table:
    peaks = launch(read_peaks, grid.world_size, args=(list(matrices), grid, round_bytes), timeout=PATIENCE)
    rows: list[TableRow] = []
    for name, builder in VARIANTS.items():
        plan = builder(matrices, grid, round_bytes=round_bytes)
        held, measured = [plan_memory(plan, grid.at(rank)) for rank in grid.ranks], [it[name] for it in peaks]
        row: TableRow = {
            "strategy": name,
            **{what: _most(held, what) for what in ("parameters", "gradients", "momentum")},
            "AdamW's moments": 2 * _most(held, "parameters"),
            "flat gradients": _most(held, "flat_gradient"),
            "gather buffer": _most(held, "gathered"),
            "whole matrix": _most(held, "whole"),
            "peak, predicted": max(max(one.predicted.values()) for one in measured),
            "peak, measured": max(max(one.measured.values()) for one in measured),
        }
        rows.append(row)
    notes = (
        f"Bytes, at the rank that holds most, with `round_bytes={round_bytes:_}` and five Newton–Schulz "
        "steps. Momentum is one number per element, while AdamW keeps two in fp32; `zero1` cuts it over dp. "
        "The peak is what a step adds to parameters, gradients and momentum, one round at a time. It is "
        "predicted by walking the step over the meta device; a backend may keep a buffer a moment longer.",
    )
    title = f"Memory of the strategies: {grid}, round_bytes of {round_bytes / 1e6:g} MB"
    return Table(title, tuple(rows), command, notes)
