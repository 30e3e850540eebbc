"""Times every Newton–Schulz recipe against torch.optim.Muon's function, in one run.

    python scripts/newton_schulz_times.py

times every recipe on one layer of GPT-2 small and on 64 matrices of 128 × 128, on one thread. The contenders
take turns. It writes results/newton_schulz.md, .json and .svg, and the lines in docs/evidence.md. If the CPU
has bf16 instructions, a second process repeats this without them, as on older CPUs. The script takes two
minutes, and nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.evidence.tables import Table
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK
from muon_tutorial.orthogonalizers.orthogonalize_option import AUTO
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks.newton_schulz_times import TORCH, measure_all, summary, times_table

STEM = "newton_schulz_times"
WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
NAMES = (TORCH, STOCK, *RECIPES, AUTO)
WITHOUT_NAMES = (TORCH, STOCK, "float32", "gram", "minimax", "three_steps", AUTO)  # bf16 would take seconds
ROUNDS, ROUNDS_WITHOUT = 7, 3
OPENING = (
    "`stock` is the default, with `torch.optim.Muon`'s bits; the other names are those of "
    "`orthogonalizers/named.py`, which also lists their errors. For each shape, `auto` takes the one that a "
    "calibration in the same run found the fastest. GPT-2 small has twelve such layers. No GPU was at hand. "
    "Without bf16 units: the same CPU, oneDNN kept from its bf16 instructions. An older CPU also has slower "
    "fp32 products, so its ratios are smaller."
)


def measure_and_write(asked: argparse.Namespace, command: str) -> None:
    out, flags = made(asked.out), results.bf16_flags()
    here = f"with {', '.join(flags)}" if flags else "a CPU without bf16 units"
    results.say("measuring")
    tables = [times_table(one, command, here) for one in measure_all(NAMES, asked.rounds)]
    if flags:
        results.say("measuring without bf16 units")
        with patch.dict(os.environ, WITHOUT_BF16), ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(measure_all, WITHOUT_NAMES, ROUNDS_WITHOUT).result()
        tables += [times_table(one, command, "oneDNN without bf16 units") for one in found]
    draw(out / "newton_schulz.svg", tables)
    facts = {**results.machine_facts(command), "threads": 1, "bf16 instructions": here}
    shown = {"newton_schulz.svg": "How many times as fast as torch.optim.Muon's function each one is"}
    names = "newton_schulz.md", "newton_schulz.json"
    results.write_results(out, STEM, "Newton–Schulz by name", OPENING, facts, tables, shown, names)
    if out == results.RESULTS:
        said = summary([(table.title, table.rows) for table in tables])
        results.quote("newton_schulz.json", f"\n{said}\n\n")
    print(results.markdown(tables))


def draw(path: Path, tables: list[Table]) -> None:
    """Draw speedups over torch's function as bars; a contender that was not timed has no bar."""
    names, series = [str(row["orthogonalize"]) for row in tables[0].rows], {}
    for table in tables:
        ratios = {row["orthogonalize"]: float(row["times torch"] or 0.0) for row in table.rows}
        series[table.title] = [ratios.get(name, 0.0) for name in names]
    results.bars(path, names, series, "times as fast as torch.optim.Muon's function")


if __name__ == "__main__":
    parser = results.result_parser(__doc__, rounds=(ROUNDS, "timed rounds"))
    raise SystemExit(results.answer(STEM, parser, measure_and_write))
