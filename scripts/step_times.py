"""Compares predicted seconds of a step with measured ones, over an unlimited and a limited loopback.

    python scripts/step_times.py

measures more than sixty configurations. Predictions come from calibrations of this machine, which time only
single collectives and operations. One calibration runs before each link's steps, and one after them. The step
is the package's own; all parameters and gradients hold 1. The script also compares sending gradients during
backward and after it. It writes results/step_times.md, .json and .svg in ten minutes, and nothing else should
run. With --again it runs nothing, and only predicts the stored measurements again. A limited loopback needs
Linux, network namespaces and tc (scripts/shaped.sh); without them those rows are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # torch's checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn

from muon_tutorial import Grid, LiveWorld, Muon, build_mesh, launch
from muon_tutorial.evidence.predict import step_over_ones
from muon_tutorial.evidence.tables import Table, TableRow
from muon_tutorial.orthogonalizers.named import STOCK
from muon_tutorial.plan.strategies import STRATEGIES, Builder, Plan, zero1
from muon_tutorial.timing.calibrate import average_machines, calibrate
from muon_tutorial.timing.machine import Machine, machine_from
from muon_tutorial.timing.timed_world import TimedRun
from muon_tutorial.timing.timeline_cases import walk_ranks
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks.contenders import hidden_matrices
from scripts.lab.benchmarks.turns import slowest, take_turns, walk
from scripts.other_process import run_shaped

ROUNDS = {None: 7, 1000: 5, 200: 3, 50: 3}
"""Timed steps on each link. On slow links a few steps suffice, because they take longer and vary less."""
OVERLAP_LINKS, OVERLAP_ROUNDS = (None, 200), 7
TITLE, REDUCTIONS = "Seconds of a step, predicted and measured", "Gradient reduction during backward"
TELLING = 0.10
"""If two steps' measured seconds differ by more than this fraction, the prediction must tell them apart."""

BUILDERS: dict[str, Builder] = {
    **{name: STRATEGIES[name] for name in ("replicated", "round_robin", "zero1", "layerwise", "owner")},
    "zero1 by boundaries": partial(zero1, gather="boundary"),
}
MBIT = 1e6 / 8
"""Bytes per second in one Mbit/s."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One configuration: the matrices to step, the grid, the strategy and its options, and the link.

    ``mbit`` is the loopback's limit in Mbit/s, for all ranks together; None if nothing limits it.
    ``width`` and ``layers`` describe the transformer; its hidden matrices are stepped.
    ``orthogonalize`` is the Newton–Schulz recipe.
    """

    strategy: str
    axes: tuple[tuple[str, int], ...]
    round_bytes: int
    window: int
    width: int
    layers: int
    mbit: int | None = None
    orthogonalize: str = STOCK

    @property
    def grid(self) -> Grid:
        return Grid.of(**dict(self.axes))

    @property
    def plan(self) -> Plan:
        matrices = hidden_matrices(self.width, self.layers, self.grid.size("tp") > 1)
        return BUILDERS[self.strategy](matrices, self.grid, round_bytes=self.round_bytes)

    @property
    def link(self) -> str:
        return link_text(self.mbit)


Measured = tuple[StepCase, float]
"""A case and its seconds on real ranks."""


def link_text(mbit: int | None) -> str:
    return "loopback" if mbit is None else f"{mbit:,} Mbit/s"


GRIDS = ((("dp", 2),), (("dp", 4),), (("dp", 2), ("tp", 2)), (("dp", 8),))
SIZES: Mapping[int | None, tuple[int, int]] = {None: (256, 2), 1000: (256, 1), 200: (128, 2), 50: (128, 1)}
"""Width and layers on each link. Slow links get small models, so that a step takes only some seconds."""


def cases(mbit: int | None, orthogonalize: str = STOCK) -> list[StepCase]:
    """All configurations of one link: every strategy and grid, small and large buckets, windows 1 and 3."""
    width, layers = SIZES[mbit]
    small = 100_000 if mbit else 300_000
    ways = ((small, 1), (small, 3), (25_000_000, 1))
    grids = GRIDS if mbit is None else GRIDS[1:3]
    return [
        StepCase(strategy, axes, size, window, width, layers, mbit, orthogonalize)
        for axes in grids
        for strategy in BUILDERS
        for size, window in ways
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
    """Time each case on one rank; returns its seconds by round. All ranks must call."""
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh(found[0].grid))
    cpu = torch.device("cpu")
    steps = {
        case: step_over_ones(case.plan, world.at, cpu, case.window, orthogonalize=case.orthogonalize)
        for case in found
    }
    with torch.no_grad():
        return take_turns({case: partial(walk, world, step) for case, step in steps.items()}, rounds)


def predict_step(case: StepCase, machine: Machine) -> TimedRun:
    if case.mbit is not None:  # all ranks share the limited loopback
        machine = machine.on_bus(case.mbit * MBIT)
    return walk_ranks(case.plan, machine, case.window, orthogonalize=case.orthogonalize)


def named(case: StepCase) -> TableRow:
    """A case as cells of the table of steps."""
    return {
        "strategy": case.strategy,
        "grid": str(case.grid),
        "bucket bytes": case.round_bytes,
        "window": case.window,
        "link": case.link,
        "width": case.width,
        "layers": case.layers,
    }


def steps_table(found: Sequence[Measured], said: Sequence[float], command: str) -> Table:
    rows: list[TableRow] = [
        {
            **named(case),
            "measured ms": round(1000 * measured, 2),
            "predicted ms": round(1000 * predicted, 2),
            "off by": round(predicted / measured - 1, 4),
        }
        for (case, measured), predicted in zip(found, said, strict=True)
    ]
    notes = (
        "Measured: the slowest rank's step between two barriers, median over rounds. Predicted: `TimedWorld` "
        "with the mean of two calibrations, one before and one after each link's steps. It predicts a "
        "limited loopback as a bus of that bandwidth, which all ranks share, with a token bucket as in tc.",
    )
    return Table(TITLE, tuple(rows), command, notes)


def windows_table(found: Sequence[Measured], said: Sequence[float], command: str) -> Table:
    seconds = {case: (seen, its) for (case, seen), its in zip(found, said, strict=True)}
    rows: list[TableRow] = []
    for case, one in seconds.items():
        wide = seconds.get(replace(case, window=3))
        if case.window == 1 and wide is not None:
            measured, predicted = (100 * (1 - its / ones) for its, ones in zip(wide, one, strict=True))
            row: TableRow = {
                "strategy": case.strategy,
                "grid": str(case.grid),
                "link": case.link,
                "measured saving %": round(measured, 1),
                "predicted saving %": round(predicted, 1),
                "apart by points": round(abs(measured - predicted), 1),
            }
            rows.append(row)
    return Table("A window of three buckets against one", tuple(rows), command)


def accuracy_table(found: Sequence[Measured], said: Sequence[float], command: str) -> Table:
    rows = []
    for link in (*dict.fromkeys(case.link for case, _ in found), "all"):
        both = zip(found, said, strict=True)
        chosen = [(seen, its) for (case, seen), its in both if link in ("all", case.link)]
        seen, its = ([round(1000 * seconds, 2) for seconds in column] for column in zip(*chosen, strict=True))
        rows.append(accuracy(link, seen, its))  # from the table's rounded values
    return Table("How far predicted seconds are off", tuple(rows), command)


def accuracy(name: str, seen: Sequence[float], said: Sequence[float]) -> TableRow:
    """Median, 90th percentile and largest error, and the share of clearly different pairs that are predicted
    in the right order.
    """
    errors = sorted(abs(predicted / measured - 1) for measured, predicted in zip(seen, said, strict=True))
    pairs = [
        (seen[i] - seen[j]) * (said[i] - said[j]) > 0  # a predicted tie counts as wrong
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


# How much of a gradient reduction does backward hide? Three kinds of rounds take turns: backward alone,
# backward and then the reduction, and backward with the reduction during it (``overlap_grad_reduce``).

WIDTH, LAYERS, TOKENS = 256, 12, 12_288
ALONE, LATE, EARLY = "backward alone", "reduced after it", "reduced during it"


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """A chain of ``LAYERS`` square matrices, one per bucket. Their gradients are reduced over ``ranks``."""

    strategy: str
    ranks: int
    tokens: int
    link: str


@dataclass(frozen=True, slots=True)
class OverlapSeconds:
    """Median seconds of ``backward()`` alone, and with gradients averaged after it or during it."""

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
    """One rank's seconds for ``ALONE``, ``LATE`` and ``EARLY``, and whether late and early gradients are
    equal. All ranks must call.
    """
    torch.set_num_threads(1)
    world = LiveWorld(build_mesh({"dp": case.ranks}))
    builder = partial(STRATEGIES[case.strategy], round_bytes=4 * WIDTH * WIDTH)
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
            flat = optimizer.plan_steps[0].averaged
            averaged[kind] = [flat[index].clone() for index in sorted(flat)]
            early.zero_grad()
            late.zero_grad()
    return seconds, all(map(torch.equal, averaged[LATE], averaged[EARLY]))


def overlap_table(found: Sequence[tuple[OverlapCase, OverlapSeconds]], command: str) -> Table:
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
        f"{LAYERS} matrices of {WIDTH} × {WIDTH} in fp32, one per bucket. Times are from before "
        "`backward()` until `ready_gradients()` has returned, on the slowest rank; medians of rounds that "
        "take turns.",
    )
    return Table(REDUCTIONS, tuple(rows), command, notes)


def main(arguments: list[str] | None = None) -> int:
    parser = results.result_parser(__doc__)
    parser.add_argument(
        "--again", action="store_true", help="predict the stored measurements again, without running anything"
    )
    parser.add_argument(
        "--orthogonalize",
        default=STOCK,
        help="a Newton–Schulz recipe; take float32 where the processor multiplies bf16 without units for it",
    )
    parser.add_argument("--measure", nargs=2, metavar=("MBIT", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.measure:
        mbit, file = asked.measure
        Path(file).write_text(json.dumps(measure(int(mbit), asked.orthogonalize)))
        return 0
    out = made(asked.out)
    if asked.again:
        predict_again(results.RESULTS / "step_times.json", out)
        return 0
    command = results.command_line("step_times", arguments)
    rounds = ", ".join(f"{count} on {link_text(mbit)}" for mbit, count in ROUNDS.items())
    facts = results.machine_facts(command)
    about = {**facts, "ranks": "2, 4 or 8, one thread each, Gloo", "rounds": rounds}
    about["orthogonalize"] = asked.orthogonalize
    recipe = ["--orthogonalize", asked.orthogonalize]
    machines: dict[str, Machine] = {}
    steps: list[Measured] = []
    overlaps: list[tuple[OverlapCase, OverlapSeconds]] = []
    for mbit in ROUNDS:
        link = link_text(mbit)
        results.say(f"{link}: calibrating")  # before and after, since a shared machine's speed changes
        before = calibrate()
        results.say(f"{link}: measuring")
        if mbit is None:
            found = measure(mbit, asked.orthogonalize)
        elif text := run_shaped(f"{mbit}mbit", __file__, [*recipe, "--measure", str(mbit)]):
            found = json.loads(text)
        else:  # this machine cannot limit its loopback
            continue
        machines[link] = average_machines(before, calibrate())
        steps += zip(cases(mbit, asked.orthogonalize), found["steps"], strict=True)
        its = (OverlapSeconds(**one) for one in found["overlaps"])
        overlaps += zip(overlap_cases(mbit), its, strict=True)
    write_all(out, about, machines, steps, overlap_table(overlaps, command))
    return 0


def predict_again(kept: Path, out: Path) -> None:
    """Write everything again from stored measurements and calibrations."""
    held, tables = json.loads(kept.read_text(encoding="utf-8")), results.read_tables(kept)
    measured: Sequence[dict[str, Any]] = tables[TITLE].rows
    steps = [
        (case, row["measured ms"] / 1000)
        for row in measured
        for mbit in ROUNDS
        for case in cases(mbit, held["facts"].get("orthogonalize", STOCK))
        if named(case).items() <= row.items()
    ]
    machines = {link: machine_from(machine) for link, machine in held["machines"].items()}
    write_all(out, held["facts"], machines, steps, tables[REDUCTIONS])


def write_all(
    out: Path,
    about: dict[str, Any],
    machines: Mapping[str, Machine],
    steps: list[Measured],
    reductions: Table,
) -> None:
    """Predict all steps; write the tables, the plot, and each link's calibrated machine."""
    said = [predict_step(case, machines[case.link]).seconds for case, _ in steps]
    command = about["command"]
    tables = [
        accuracy_table(steps, said, command),
        reductions,
        windows_table(steps, said, command),
        steps_table(steps, said, command),
    ]
    scatter(out / "step_times.svg", steps, said)
    shown = {"step_times.svg": "Predicted over measured milliseconds of a step, one point per configuration"}
    held = {link: json.loads(machine.text()) for link, machine in machines.items()}
    results.write_results(out, "step_times", "Seconds of a step", "", about, tables, shown, machines=held)
    print(results.markdown(tables[:2]))


def overlap_cases(mbit: int | None) -> list[OverlapCase]:
    ranks = (2, 4) if mbit is None else (2,)
    return [
        OverlapCase(strategy, count, TOKENS, link_text(mbit))
        for strategy in ("zero1", "layerwise")
        for count in ranks
        if mbit in OVERLAP_LINKS
    ]


def measure(mbit: int | None, orthogonalize: str) -> dict[str, Any]:
    """Seconds of a link's cases, measured over this process's loopback, limited or not."""
    overlaps = measure_overlap(overlap_cases(mbit), OVERLAP_ROUNDS)
    return {
        "steps": measure_steps(cases(mbit, orthogonalize), ROUNDS[mbit]),
        "overlaps": [asdict(one) for one in overlaps],
    }


def scatter(path: Path, steps: list[Measured], said: list[float]) -> None:
    """Draw predicted over measured, both axes logarithmic, one colour per link; dotted lines are 20 % off."""
    with results.plotted(path, figsize=(7, 6)) as axes:
        for link in dict.fromkeys(case.link for case, _ in steps):
            points = [
                (1e3 * seen, 1e3 * its)
                for (case, seen), its in zip(steps, said, strict=True)
                if case.link == link
            ]
            axes.loglog(*zip(*points, strict=True), "o", ms=5, alpha=0.7, label=link)
        seconds = [seen for _, seen in steps]
        ends = [0.8e3 * min(seconds), 1.25e3 * max(seconds)]
        for factor, style in ((1.0, "-"), (0.8, ":"), (1.2, ":")):
            axes.plot(ends, [factor * end for end in ends], style, color="0.4", lw=1)
        axes.set_xlabel("measured ms of a step")
        axes.set_ylabel("predicted ms of a step")
        axes.legend(title="solid line: exact; dotted lines: 20 % off")


if __name__ == "__main__":
    raise SystemExit(main())
