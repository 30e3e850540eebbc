"""Measures what distributed Muon costs on this machine: all tables of bytes, seconds and memory, in one run.

    python scripts/measure.py

writes results/README.md (Markdown), results/measure.json and three plots, with the machine, versions, date
and command. The script takes a few minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # torch's checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

from muon_tutorial.evidence.tables import Table
from muon_tutorial.plan.grid import Grid
from muon_tutorial.training.gpt import GPTShape
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks import measured, predicted
from scripts.lab.benchmarks.contenders import CONTENDERS, Workload, hidden_matrices

WORK = Workload(GPTShape(layers=4, width=256, heads=4, context=128), batch=8)


def main(arguments: list[str] | None = None) -> int:
    parser = results.result_parser(__doc__, rounds=(9, "timed steps of each contender"))
    return results.answer("measure", parser, measure_and_write, arguments)


def measure_and_write(asked: argparse.Namespace, command: str) -> None:
    out, tables = made(asked.out), all_tables(asked.rounds, command)
    facts = {
        **results.machine_facts(command),
        "ranks": f"{measured.RANKS}, one thread each, Gloo over loopback",
        "rounds": asked.rounds,
        "work": f"{WORK.shape}, global batch of {WORK.batch} sequences, fp32",
    }
    opening, names = "Bytes repeat exactly; milliseconds do not.", ("README.md", "measure.json")
    drawn = plots(out, {table.title: table for table in tables})
    results.write_results(out, "measure", "Measured", opening, facts, tables, drawn, names)
    print(f"wrote {len(tables)} tables to {out}")


def all_tables(rounds: int, command: str) -> list[Table]:
    results.say(f"real ranks: {len(CONTENDERS)} contenders")
    readings = measured.read_all(WORK, rounds)
    results.say("larger batches")
    larger = measured.read_batches(WORK, max(3, rounds // 2))
    tables = [
        measured.ratios_table(readings, command),
        measured.seconds_table(readings, command),
        measured.batches_table(larger, WORK.shape.context, command),
        measured.bytes_table(readings, command),
        measured.state_table(readings, command),
        predicted.gloo_table(command),
        predicted.strategies_table(command),
        predicted.regimes_table(command),
        predicted.thousands_table(command),
    ]
    matrices = hidden_matrices(WORK.shape.width, WORK.shape.layers, cut=True)
    for grid in (Grid.of(dp=4), Grid.of(dp=2, tp=2)):
        for size in (2_000_000, 25_000_000):
            results.say(f"memory on {grid}, round_bytes of {size:,}")
            tables.append(measured.memory_table(command, matrices, grid, size))
    return tables


PLOTS = (
    (
        "bytes",
        "Bytes of a step: every contender on the same work",
        {"ring": "as a ring", "Gloo data": "as Gloo sends them"},
        1e-6,
        "MB sent in a step by the rank that sends most",
    ),
    (
        "seconds",
        "Seconds of a step",
        {
            "forward and backward ms": "forward and backward",
            "optimizer ms": "optimizer",
            "collectives alone ms": "all collectives alone",
        },
        1.0,
        "milliseconds of a step, median of the slowest rank",
    ),
    (
        "state",
        "Memory of the contenders",
        {"state of the matrices": "optimizer state"},
        1e-6,
        "MB of optimizer state for hidden matrices, at the rank that holds most",
    ),
)


def plots(folder: Path, tables: Mapping[str, Table]) -> dict[str, str]:
    """Draw bytes, seconds and state of the contenders as bars; returns captions by file name."""
    drawn = {}
    for stem, title, columns, unit, label in PLOTS:
        rows: Sequence[dict[str, Any]] = tables[title].rows
        series = {said: [unit * row[column] for row in rows] for column, said in columns.items()}
        results.bars(folder / f"{stem}.svg", [row["contender"] for row in rows], series, label)
        drawn[f"{stem}.svg"] = f"{label}, as bars; the numbers stand under *{title}*"
    return drawn


if __name__ == "__main__":
    raise SystemExit(main())
