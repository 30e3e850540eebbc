"""Measures what distributed Muon costs on this machine: all tables of bytes, seconds and memory, in one run.

    python scripts/measure.py

writes results/README.md (Markdown), results/measure.json and three plots, with the machine, versions, date
and command. It takes a few minutes. Interface counters need Linux and the right to make a network namespace
(`unshare -n`); without it, that table is left out and the reason is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # its checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

from muon_tutorial.errors import UsageError
from muon_tutorial.evidence.gloo_bytes import GlooTraffic
from muon_tutorial.evidence.tables import Table
from muon_tutorial.plan.grid import Grid
from muon_tutorial.training.gpt import GPTShape
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks import measured, predicted
from scripts.lab.benchmarks.contender_costs import InterfaceCount
from scripts.lab.benchmarks.contenders import CONTENDERS, Workload
from scripts.lab.benchmarks.measured import InterfaceFit
from scripts.lab.benchmarks.step_times import hidden_matrices


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, measure, and write."""
    asked = parse(arguments)
    work = Workload(GPTShape(asked.layers, asked.width, asked.heads, asked.context), asked.batch)
    if asked.counters_only:
        json.dump(asdict(measured.read_counters(work, asked.contender)), sys.stdout)
        return 0
    command = results.command_line("measure", arguments)
    tables = all_tables(asked, work, command)
    facts = {
        **results.machine_facts(command),
        "ranks": f"{measured.RANKS}, one thread each, Gloo over loopback",
        "rounds": asked.rounds,
        "work": f"{work.shape}, global batch of {work.batch} sequences, fp32",
    }
    opening, names = "Bytes repeat exactly; milliseconds do not.", ("README.md", "measure.json")
    drawn = plots(asked.out, {table.title: table for table in tables})
    results.write_results(asked.out, "measure", "Measured", opening, facts, tables, drawn, names)
    print(f"wrote {len(tables)} tables to {asked.out}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; an error in them ends the process before anything is measured."""
    parser = results.result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each contender")
    for name, size in {"layers": 4, "width": 256, "heads": 4, "context": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--counters-only", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    asked.contender = asked.contender or list(CONTENDERS)
    results.check_counts(parser, asked, "rounds", "layers", "width", "context", "batch", "heads")
    ranks, heads, width = measured.RANKS, asked.heads, asked.width
    if asked.batch % ranks:
        parser.error(f"--batch is shared by {ranks} ranks; {ranks} does not divide {asked.batch}")
    if heads % ranks or width % heads:
        parser.error(f"--heads is shared by {ranks} ranks and divides --width; got {heads} and {width}")
    try:
        made(asked.out)
    except UsageError as error:
        parser.error(str(error))
    return asked


def all_tables(asked: argparse.Namespace, work: Workload, command: str) -> list[Table]:
    """Every table, in reading order."""
    results.say(f"real ranks: {len(CONTENDERS)} contenders")
    readings = measured.read_all(work, asked.rounds)
    results.say("larger batches")
    larger = measured.read_batches(work, max(3, asked.rounds // 2))
    results.say("interface counters")
    counters, why = counters_in_namespace(asked)
    left_out = Table("Interface counters", ({"left out because": why},), command)
    tables = [
        measured.ratios_table(readings, command),
        measured.seconds_table(readings, command),
        measured.batches_table(larger, work.shape.context, command),
        measured.bytes_table(readings, command),
        measured.state_table(readings, command),
        measured.counters_table(counters, command) if counters else left_out,
        predicted.gloo_table(command),
        predicted.strategies_table(command),
        predicted.regimes_table(command),
        predicted.thousands_table(command),
    ]
    matrices = hidden_matrices(work.shape.width, work.shape.layers, cut=True)
    for grid in (Grid.of(dp=4), Grid.of(dp=2, tp=2)):
        for size in (2_000_000, 25_000_000):
            results.say(f"memory on {grid}, buckets of {size:,} bytes")
            tables.append(measured.memory_table(command, matrices, grid, size))
    return tables


def counters_in_namespace(asked: argparse.Namespace) -> tuple[InterfaceFit | None, str]:
    """Interface counters of the same work in a separate network namespace; or None, and the reason."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return None, "this machine has no `unshare` and `ip`"
    options = ("layers", "width", "heads", "context", "batch")
    flags = [flag for name in options for flag in (f"--{name}", str(getattr(asked, name)))]
    named = [flag for name in asked.contender for flag in ("--contender", name)]
    program = shlex.join([sys.executable, str(Path(__file__).resolve()), *flags, *named, "--counters-only"])
    alone = ["unshare", "-n", "sh", "-c", f"ip link set lo up && exec {program}"]
    run = subprocess.run(alone, capture_output=True, text=True, check=False)
    if run.returncode:
        return None, (run.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    counts = {
        part: tuple(InterfaceCount(**{**row, "wire": GlooTraffic(**row["wire"])}) for row in rows)
        for part, rows in json.loads(run.stdout.splitlines()[-1]).items()
    }
    return InterfaceFit(**counts), ""


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
    """Draw bytes, seconds and state of the contenders as bars; returns the files' names and captions."""
    drawn = {}
    for stem, title, columns, unit, label in PLOTS:
        rows: Sequence[dict[str, Any]] = tables[title].rows
        series = {said: [unit * row[column] for row in rows] for column, said in columns.items()}
        results.bars(folder / f"{stem}.svg", [row["contender"] for row in rows], series, label)
        drawn[f"{stem}.svg"] = f"{label}, as bars; the numbers stand under *{title}*"
    return drawn


if __name__ == "__main__":
    raise SystemExit(main())
