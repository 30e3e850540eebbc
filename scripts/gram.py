"""Measures the strategy gram: bytes, seconds, where it wins, and how far its update is from one process's.

    python scripts/gram.py

writes results/gram.md and gram.json. Seconds are measured on four real ranks of one thread each, and the
strategies take turns. The script takes two minutes, and nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # torch's checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

from muon_tutorial import Grid, LiveWorld, LocalWorld, Matrix, Shard, build_mesh, launch
from muon_tutorial.evidence.predict import SETTINGS, predict, step_over_ones
from muon_tutorial.evidence.tables import Table, TableRow, median_and_spread
from muon_tutorial.newton_schulz import zeropower_via_newtonschulz
from muon_tutorial.orthogonalizers.iterate import orthogonalize
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from muon_tutorial.plan.strategies import STRATEGIES, Plan, gram
from muon_tutorial.step.parameter_state import ParameterState
from muon_tutorial.step.step import PlanStep
from muon_tutorial.timing.machine import find_machine
from muon_tutorial.timing.step_cost import estimate
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks.turns import slowest, take_turns, walk
from scripts.lab.quality import Quality, Sample, draw_samples

OPENING = (
    "The strategy `gram` sums the Gram matrix of a matrix that tensor parallelism cuts along its long side, "
    "and gathers nothing. Others that iterate on shards, such as Megatron-LM's distributed mode and "
    "Transformer Engine's `newton_schulz_tp`, pay an all_reduce for every iteration; `gram` pays one for "
    "all matrices of a bucket."
)
SIDES = ((96, 384), (384, 96), (512, 512))
"""Shapes: a wide matrix, which tp cuts along columns; a tall one, cut along rows; a square one."""
TP = (2, 4, 8)
ONE_PROCESS = {STOCK: "gram", "gram": "gram", "minimax": "minimax"}
"""For each recipe of a parameter group: the recipe that runs the same iteration in one process."""
WORKS: Mapping[str, tuple[tuple[int, int], int]] = {
    "4 of 512 × 4096": ((512, 4096), 4),
    "1 of 512 × 4096": ((512, 4096), 1),
    "4 of 1024 × 1024": ((1024, 1024), 4),
    "1 of 1024 × 1024": ((1024, 1024), 1),
}
RANKS = 4
PATIENCE = 900.0
"""Seconds after which a run is given up: many, because ranks may share busy cores."""
ASPECTS = (1, 4, 16)
SHORT = 1024


@dataclass(frozen=True, slots=True)
class Distance:
    """How far an update in shards is from the update of one process.

    X is the update in shards, and Y the update of one process. ``gram`` is ‖X − Y‖/‖Y‖ if Y is made by the
    same recipe. ``stock`` is ‖X − Y‖/‖Y‖ if Y is made by the recipe "stock". ``mine`` is the quality of X;
    ``stocks`` is the quality of the Y made by "stock".
    """

    sides: tuple[int, int]
    spectrum: str
    orthogonalize: str
    tp: int
    gram: float
    stock: float
    mine: Quality
    stocks: Quality


def distances(sides: Sequence[tuple[int, int]] = SIDES, tps: Sequence[int] = TP) -> Iterator[Distance]:
    for shape in sides:
        for spectrum, sample in draw_samples(*shape).items():
            for name, tp in product(ONE_PROCESS, tps):
                yield _distance(shape, spectrum, sample, name, tp)


def _distance(sides: tuple[int, int], spectrum: str, sample: Sample, name: str, tp: int) -> Distance:
    G = sample.matrix
    mine, stock = update_in_shards(G, tp, name), zeropower_via_newtonschulz(G).float()
    alone = orthogonalize(G, RECIPES[ONE_PROCESS[name]]).float()
    by_gram, by_stock = (float((mine - other).norm() / other.norm()) for other in (alone, stock))
    qualities = sample.quality_of(mine), sample.quality_of(stock)
    return Distance(sides, spectrum, name, tp, by_gram, by_stock, *qualities)


def update_in_shards(G: Tensor, tp: int, name: str) -> Tensor:
    """The update of a ``gram`` step on ``tp`` ranks, with ``G`` as the input of Newton–Schulz."""
    sides = (G.size(0), G.size(1))
    dim = 0 if sides[0] > sides[1] else 1
    grid = Grid.of(dp=1, tp=tp)
    plan = gram(matrices(sides, 1, tp), grid)
    pieces = G.split(Shard(dim).lengths(G.size(dim), tp), dim)  # cut as in a DTensor
    still = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    group, steps = {**SETTINGS, **still, "orthogonalize": name}, []
    for rank, piece in enumerate(pieces):  # a parameter of zeros, which becomes −update
        param = nn.Parameter(torch.zeros_like(piece))
        param.grad = piece.clone()
        steps.append(PlanStep(plan, grid.at(rank), [ParameterState(param, group, {})]))
        steps[-1].fill_state()
    with torch.no_grad():
        LocalWorld(grid).run([step.walk() for step in steps])
    scale = max(1.0, sides[0] / sides[1]) ** 0.5
    return torch.cat([step.parameters[0].data for step in steps], dim) / -scale


def distance_table(found: Sequence[Distance], command: str) -> Table:
    rows: list[TableRow] = []
    for name, spectrum, tp in dict.fromkeys((one.orthogonalize, one.spectrum, one.tp) for one in found):
        same = [one for one in found if (one.orthogonalize, one.spectrum, one.tp) == (name, spectrum, tp)]
        measured = {
            "from one process's Gram form": [one.gram for one in same],
            "from stock": [one.stock for one in same],
            "error": [one.mine.error for one in same],
            "stock's error": [one.stocks.error for one in same],
            "‖X‖₂": [one.mine.largest for one in same],
            "stock's ‖X‖₂": [one.stocks.largest for one in same],
        }
        largest = {column: float(f"{max(values):.3g}") for column, values in measured.items()}
        rows.append({"orthogonalize": name, "spectrum": spectrum, "tp": tp, **largest})
    notes = (
        "Each number is the largest over 96 × 384, 384 × 96 and 512 × 512, from the strategy's own step in a "
        "`LocalWorld`. Distances are ‖X − Y‖/‖Y‖; `scripts/lab/quality.py` measures error and ‖X‖₂ in "
        "float64. The bounds stand in `orthogonalizers/gram.py`.",
    )
    return Table("Distance from one process", tuple(rows), command, notes)


# Bytes


def matrices(sides: tuple[int, int], count: int, tp: int) -> list[Matrix]:
    """Equal matrices, cut along their long side."""
    cut = (("tp", Shard(0 if sides[0] > sides[1] else 1)),) if tp > 1 else ()
    return [Matrix(index, f"m{index}", sides, cut) for index in range(count)]


def plan_of(strategy: str, work: str, tp: int) -> Plan:
    return STRATEGIES[strategy](matrices(*WORKS[work], tp), Grid.of(dp=1, tp=tp))


def gram_formula(sides: tuple[int, int], count: int, tp: int) -> int:
    """Bytes that each rank sends on a ring: ``2(T−1)/T`` times the upper triangles in fp32."""
    n = min(sides)
    return 2 * (tp - 1) * count * 4 * (n * (n + 1) // 2) // tp


def gather_formula(sides: tuple[int, int], count: int, tp: int) -> int:
    """Bytes that each rank sends if every matrix is gathered in bf16: ``2·(T−1)`` per held element."""
    return 2 * (tp - 1) * count * (sides[0] * sides[1] // tp)


def owner_formula(sides: tuple[int, int], count: int, tp: int) -> int:
    """Mean bytes that a rank sends to owners and back, in bf16: ``4(T−1)/T²`` per element of each matrix."""
    return 4 * (tp - 1) * count * sides[0] * sides[1] // tp**2


FORMULAS = {"gram": gram_formula, "zero1": gather_formula, "owner": owner_formula}


def bytes_table(command: str) -> Table:
    rows: list[TableRow] = []
    for work, tp, strategy in product(("4 of 512 × 4096", "4 of 1024 × 1024"), TP, FORMULAS):
        plan = plan_of(strategy, work, tp)
        entries = [entry for rank in plan.grid.ranks for entry in predict(plan, plan.grid.at(rank)).entries]
        sent = sum(entry.ring for entry in entries if entry.phase != "gradient flags")
        row: TableRow = {
            "matrices": work,
            "tp": tp,
            "strategy": strategy,
            "by ledger": sent // tp,
            "by formula": FORMULAS[strategy](*WORKS[work], tp),
        }
        rows.append(row)
    notes = ("Mean over ranks, on a ring, without the agreement on which gradients exist.",)
    return Table("Bytes that a rank sends", tuple(rows), command, notes)


# Time


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step's seconds on the slowest real rank, one number per round, by strategy and recipe."""

    work: str
    seconds: Mapping[tuple[str, str], Sequence[float]]


CONTENDERS = tuple(product(("zero1", "owner", "gram"), (STOCK, "gram")))


def measure_times(rounds: int) -> list[StepTimes]:
    """Time every contender on every workload, on four one-thread ranks; contenders take turns in a round."""
    found = []
    for work in WORKS:
        ranks = launch(_times_on_a_rank, RANKS, args=(work, rounds), timeout=PATIENCE, limit=PATIENCE)
        found.append(StepTimes(work, {one: slowest([its[one] for its in ranks]) for one in CONTENDERS}))
    return found


def _times_on_a_rank(rank: int, work: str, rounds: int) -> dict[tuple[str, str], list[float]]:
    world = LiveWorld(build_mesh({"dp": 1, "tp": RANKS}))
    steps = {
        (strategy, recipe): step_over_ones(
            plan_of(strategy, work, RANKS), world.at, torch.device("cpu"), orthogonalize=recipe
        )
        for strategy, recipe in CONTENDERS
    }
    for step in steps.values():
        for each in step.parameters:  # a gradient of ones would have rank 1
            assert each.param.grad is not None
            each.param.grad.normal_(generator=torch.Generator().manual_seed(rank))
    return take_turns({one: partial(walk, world, step) for one, step in steps.items()}, rounds)


def times_table(found: Sequence[StepTimes], command: str) -> Table:
    rows: list[TableRow] = []
    for one in found:
        for (strategy, recipe), seconds in one.seconds.items():
            middle, *_ = median_and_spread(seconds)
            mine, *_ = median_and_spread(one.seconds["gram", recipe])
            row: TableRow = {
                "matrices": one.work,
                "strategy": strategy,
                "orthogonalize": recipe,
                "ms": round(1e3 * middle, 1),
                "least": round(1e3 * min(seconds), 1),
                "over gram's": round(middle / mine, 2),
                "least over gram's": round(min(seconds) / min(one.seconds["gram", recipe]), 2),
            }
            rows.append(row)
    rounds = len(next(iter(found[0].seconds.values())))
    notes = (
        f"Seconds of the slowest of four real ranks of one thread: medians of {rounds} rounds in which "
        "contenders take turns. If four ranks share fewer cores, total work decides, and `gram` repeats "
        "its n × n iteration on every rank. On a busy machine, trust the ratio of least seconds.",
    )
    return Table(f"Seconds of a step, tp = {RANKS}", tuple(rows), command, notes)


# The regime


def regime_table(machine: str, command: str) -> Table:
    rows: list[TableRow] = []
    for aspect, tp in product(ASPECTS, TP):
        grid, given = Grid.of(dp=1, tp=tp), matrices((SHORT, aspect * SHORT), 8, tp)
        ours = find_machine(machine)
        said = {name: estimate(name, STRATEGIES[name], given, grid, ours) for name in FORMULAS}
        row: TableRow = {
            "l/n": aspect,
            "tp": tp,
            **{f"MB, {name}": round(one.sent / 1e6, 2) for name, one in said.items()},
            **{f"GFLOP, {name}": round(one.newton_schulz / 1e9, 1) for name, one in said.items()},
            **{f"ms, {name}": round(1e3 * one.seconds, 2) for name, one in said.items()},
            **{f"peak MB, {name}": round(one.peak / 1e6, 1) for name, one in said.items()},
            "least time": min(said, key=lambda name: said[name].seconds),
        }
        rows.append(row)
    notes = (
        "For one rank: bytes, operations (symmetric products counted whole), seconds, and peak memory beyond "
        "parameters, gradients and momentum; `zero1` and `owner` with stock's bf16 iterations, `gram` in "
        "fp32. On the laptop eight ranks share four cores.",
    )
    title = f"Where it wins: eight matrices of {SHORT} rows, by the plan ({machine})"
    return Table(title, tuple(rows), command, notes)


def measure_and_write(asked: argparse.Namespace, command: str) -> None:
    out = made(asked.out)
    results.say("measuring distances")
    tables = [distance_table(list(distances()), command), bytes_table(command)]
    results.say("timing steps")
    tables.append(times_table(measure_times(asked.rounds), command))
    tables += [regime_table(machine, command) for machine in ("laptop", "h100-infiniband")]
    facts = results.machine_facts(command)
    results.write_results(out, "gram", "Newton–Schulz without a gather", OPENING, facts, tables)
    print(results.markdown(tables))


if __name__ == "__main__":
    parser = results.result_parser(__doc__, rounds=(3, "timed rounds"))
    raise SystemExit(results.answer("gram", parser, measure_and_write))
