"""Seconds of a step, predicted by the timed world and measured on real ranks, over links of several speeds.

The step is the package's own, over parameters and gradients of ones, without a model around it. Nothing here
was used to fit the machine: ``timing/calibrate`` measures only single collectives and single operations.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch

from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.launching.launch import launch
from muon_tutorial.plan.grid import Grid
from muon_tutorial.plan.layout import Shard
from muon_tutorial.plan.matrix import Matrix
from muon_tutorial.plan.strategies import STRATEGIES, Builder, Plan, zero1
from muon_tutorial.step.step import PlanStep
from muon_tutorial.timing.machine import Machine
from muon_tutorial.timing.timed_world import TimedRun
from muon_tutorial.timing.timeline_cases import walk_ranks
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from .turns import slowest, take_turns

TITLE = "Seconds of a step, predicted and measured"
TELLING = 0.10
"""If two steps' measured seconds differ by more than this fraction, the prediction must tell them apart."""

BUILDERS: dict[str, Builder] = {
    **{name: STRATEGIES[name] for name in ("replicated", "round_robin", "zero1", "layerwise", "owner")},
    "zero1 by boundaries": partial(zero1, gather="boundary"),
}
MBIT = 1e6 / 8
"""Bytes a second of one Mbit/s."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One configuration: the matrices to step, the grid, the strategy and its options, and the link.

    ``mbit`` is the loopback's limit in Mbit/s, for all ranks together; None if nothing limits it.
    ``width`` and ``layers`` are those of the transformer whose hidden matrices are stepped.
    """

    strategy: str
    axes: tuple[tuple[str, int], ...]
    round_bytes: int
    window: int
    width: int
    layers: int
    mbit: int | None = None

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return Grid.of(**dict(self.axes))

    @property
    def plan(self) -> Plan:
        """The plan that is walked."""
        matrices = hidden_matrices(self.width, self.layers, self.grid.size("tp") > 1)
        return BUILDERS[self.strategy](matrices, self.grid, round_bytes=self.round_bytes)

    @property
    def link(self) -> str:
        """The link in words."""
        return link_text(self.mbit)


Measured = tuple[StepCase, float]
"""A case and its seconds on real ranks."""


def link_text(mbit: int | None) -> str:
    """A link in words."""
    return "loopback" if mbit is None else f"{mbit:,} Mbit/s"


GRIDS = ((("dp", 2),), (("dp", 4),), (("dp", 2), ("tp", 2)), (("dp", 8),))
SIZES: Mapping[int | None, tuple[int, int]] = {None: (256, 2), 1000: (256, 1), 200: (128, 2), 50: (128, 1)}
"""Width and layers on each link: slow links get small models, so that a step takes only some seconds."""


def cases(mbit: int | None) -> list[StepCase]:
    """All configurations of one link: every strategy and grid, small and large buckets, windows 1 and 3."""
    width, layers = SIZES[mbit]
    small = 100_000 if mbit else 300_000
    ways = ((small, 1), (small, 3), (25_000_000, 1))
    grids = GRIDS if mbit is None else GRIDS[1:3]
    return [
        StepCase(strategy, axes, size, window, width, layers, mbit)
        for axes in grids
        for strategy in BUILDERS
        for size, window in ways
    ]


def hidden_matrices(width: int, layers: int, cut: bool) -> list[Matrix]:
    """A transformer's hidden matrices; where ``cut``, over tp as Megatron cuts them."""
    rows = [(name, (width, width), 0) for name in "qkv"] + [("o", (width, width), 1)]
    rows += [("up", (4 * width, width), 0), ("down", (width, 4 * width), 1)]
    named = [(f"{layer}.{name}", sides, dim) for layer in range(layers) for name, sides, dim in rows]
    return [
        Matrix(index, name, sides, (("tp", Shard(dim)),) if cut else ())
        for index, (name, sides, dim) in enumerate(named)
    ]


def measure_steps(found: Sequence[StepCase], rounds: int, timeout: float = 600.0) -> list[float]:
    """Seconds of each case's step on real ranks of this machine: the median over rounds of the slowest rank.

    Cases of one grid take turns within a launch, so that other load affects all of them equally.
    """
    seconds: dict[StepCase, float] = {}
    for axes in dict.fromkeys(case.axes for case in found):
        same = [case for case in found if case.axes == axes]
        by_rank = launch(time_steps, same[0].grid.world_size, args=(same, rounds), timeout=timeout)
        seconds |= {case: statistics.median(slowest([its[case] for its in by_rank])) for case in same}
    return [seconds[case] for case in found]


def time_steps(rank: int, found: Sequence[StepCase], rounds: int) -> dict[StepCase, list[float]]:
    """One rank's seconds of each case, by round. All ranks must call."""
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh(found[0].grid))
    steps = {case: step_over_ones(case.plan, world.at, torch.device("cpu"), case.window) for case in found}
    with torch.no_grad():
        return take_turns({case: partial(walk, world, step) for case, step in steps.items()}, rounds)


def walk(world: LiveWorld, step: PlanStep) -> None:
    """Take one step. All ranks must call."""
    world.run(step.step())


def predict_step(case: StepCase, machine: Machine) -> TimedRun:
    """The timed world's prediction for a case: all ranks walked, each with a clock of its own."""
    if case.mbit is not None:  # all ranks share the limited loopback
        machine = machine.on_bus(case.mbit * MBIT)
    return walk_ranks(case.plan, machine, case.window)


NAMES = ("strategy", "grid", "bucket bytes", "window", "link", "width", "layers")
"""A table's names for the parts of a case."""


def named(case: StepCase) -> tuple[str | int, ...]:
    """A case as a row in the table of steps: the values for ``NAMES``, in their order."""
    grid, link = str(case.grid), case.link
    return case.strategy, grid, case.round_bytes, case.window, link, case.width, case.layers


def steps_table(found: Sequence[Measured], said: Sequence[float], command: str) -> Table:
    """A row per case, with the prediction's error."""
    rows: list[TableRow] = [
        {
            **dict(zip(NAMES, named(case), strict=True)),
            "measured ms": round(1000 * measured, 2),
            "predicted ms": round(1000 * predicted, 2),
            "off by": round(predicted / measured - 1, 4),
        }
        for (case, measured), predicted in zip(found, said, strict=True)
    ]
    notes = (
        "Measured: the slowest rank's step between two barriers, median over rounds. Predicted: "
        "`TimedWorld` with the mean of a calibration before and one after each link's steps; a limited "
        "loopback is a bus of that bandwidth which all ranks share, and which saves up what its token bucket "
        "holds.",
    )
    return Table(TITLE, tuple(rows), command, notes)


def windows_table(found: Sequence[Measured], said: Sequence[float], command: str) -> Table:
    """The time that a window of three buckets saves over a window of one: measured and predicted."""
    seconds = {case: (seen, its) for (case, seen), its in zip(found, said, strict=True)}
    rows: list[TableRow] = []
    for case, (measured, predicted) in seconds.items():
        wide = seconds.get(replace(case, window=3))
        if case.window == 1 and wide is not None:
            saved = 100 * (1 - wide[0] / measured), 100 * (1 - wide[1] / predicted)
            rows.append(
                {
                    "strategy": case.strategy,
                    "grid": str(case.grid),
                    "link": case.link,
                    "measured saving %": round(saved[0], 1),
                    "predicted saving %": round(saved[1], 1),
                    "apart by points": round(abs(saved[0] - saved[1]), 1),
                }
            )
    return Table("A window of three buckets against one", tuple(rows), command)


def accuracy_table(found: Sequence[Measured], said: Sequence[float], command: str) -> Table:
    """The errors of predictions, by link and over all, and how often they name the faster of two cases."""
    rows = []
    for link in (*dict.fromkeys(case.link for case, _ in found), "all"):
        both = zip(found, said, strict=True)
        chosen = [(seen, its) for (case, seen), its in both if link in ("all", case.link)]
        seen, its = ([round(1000 * seconds, 2) for seconds in column] for column in zip(*chosen, strict=True))
        rows.append(accuracy(link, seen, its))  # of the rounded values in the table
    return Table("How far predicted seconds are off", tuple(rows), command)


def accuracy(name: str, seen: Sequence[float], said: Sequence[float]) -> TableRow:
    """Median, 90th percentile and largest error, and how many clearly different pairs are ordered right."""
    errors = sorted(abs(predicted / measured - 1) for measured, predicted in zip(seen, said, strict=True))
    pairs = [
        (seen[i] - seen[j]) * (said[i] - said[j]) > 0  # a predicted tie is not right
        for i, j in combinations(range(len(seen)), 2)
        if max(seen[i], seen[j]) > (1 + TELLING) * min(seen[i], seen[j])
    ]
    return {
        "link": name,
        "configurations": len(errors),
        "median error": round(statistics.median(errors), 4),
        "nine in ten below": round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 4),
        "largest": round(errors[-1], 4),
        f"pairs that differ by more than {TELLING:.0%}": len(pairs),
        "told right": round(sum(pairs) / len(pairs), 4) if pairs else None,
    }
