"""Times every Newton–Schulz recipe against torch.optim.Muon's function, in one run.

    python scripts/newton_schulz_times.py

times every recipe on one layer of GPT-2 small and on 64 matrices of 128 × 128, on one thread, contenders
taking turns, and writes results/newton_schulz.md, .json and .svg, and the lines in docs/evidence.md. If the
CPU has bf16 instructions, a second process does the same with a oneDNN that may not use them, as on CPUs
without them. It takes two minutes, and nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from muon_tutorial.evidence.tables import Table
from muon_tutorial.orthogonalizers.choices import AUTO
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks.newton_schulz_times import TORCH, WORKS, WorkTimes, measure, summary, times_table

STEM = "newton_schulz_times"
WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
NAMES = (TORCH, STOCK, *RECIPES, AUTO)
WITHOUT_NAMES = (TORCH, STOCK, "float32", "gram", "minimax", "three_steps", AUTO)  # bf16 takes seconds there
ROUNDS, ROUNDS_WITHOUT = 7, 3
OPENING = (
    "`stock` is the default, with `torch.optim.Muon`'s bits; the other names are those of "
    "`orthogonalizers/named.py`, with their errors there, and `auto` takes for each shape the one that a "
    "calibration in the same run found the fastest. GPT-2 small has twelve such layers. No GPU was at hand. "
    "Without bf16 units: the same CPU, oneDNN kept from its bf16 instructions. Its fp32 products stay as "
    "fast as they are, so on an older CPU the ratios are smaller."
)


def main(arguments: list[str] | None = None) -> int:
    """Measure, with and without bf16 units, and write."""
    parser = results.result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds")
    parser.add_argument("--only-without-bf16", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    results.check_counts(parser, asked, "rounds")
    if asked.only_without_bf16:
        json.dump([asdict(one) for one in measured(WITHOUT_NAMES, ROUNDS_WITHOUT)], sys.stdout)
        return 0
    command = results.command_line(STEM, arguments)
    out, flags = made(asked.out), results.bf16_flags()
    here = f"with {', '.join(flags)}" if flags else "a CPU without bf16 units"
    tables = [times_table(one, command, here) for one in measured(NAMES, asked.rounds)]
    if flags:
        results.say("measuring without bf16 units")
        tables += [times_table(one, command, "oneDNN without bf16 units") for one in measured_without_bf16()]
    draw(out / "newton_schulz.svg", tables)
    facts = {**results.machine_facts(command), "threads": 1, "bf16 instructions": here}
    shown = {"newton_schulz.svg": "How many times as fast as torch.optim.Muon's function each one is"}
    names = "newton_schulz.md", "newton_schulz.json"
    results.write_results(out, STEM, "Newton–Schulz by name", OPENING, facts, tables, shown, names)
    if out == results.RESULTS:
        said = summary([(table.title, table.rows) for table in tables])
        results.quote("newton_schulz.json", f"\n{said}\n\n")
    print(results.markdown(tables))
    return 0


def measured(names: tuple[str, ...], rounds: int) -> list[WorkTimes]:
    """Measure both workloads on one thread."""
    torch.set_num_threads(1)
    found = []
    for work in WORKS:
        results.say(f"measuring {work}")
        found.append(measure(work, names, rounds))
    return found


def measured_without_bf16() -> list[WorkTimes]:
    """Measure in a process whose oneDNN may not use bf16 instructions."""
    program = [sys.executable, str(Path(__file__)), "--only-without-bf16"]
    answer = subprocess.run(
        program, env={**os.environ, **WITHOUT_BF16}, stdout=subprocess.PIPE, check=True, text=True
    )
    return [WorkTimes(**one) for one in json.loads(answer.stdout)]


def draw(path: Path, tables: list[Table]) -> None:
    """Draw speedups over torch's function as bars; a contender that was not timed has no bar."""
    names, series = [str(row["orthogonalize"]) for row in tables[0].rows], {}
    for table in tables:
        ratios = {row["orthogonalize"]: float(row["times torch"] or 0.0) for row in table.rows}
        series[table.title] = [ratios.get(name, 0.0) for name in names]
    results.bars(path, names, series, "times as fast as torch.optim.Muon's function")


if __name__ == "__main__":
    raise SystemExit(main())
