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
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from muon_tutorial.evidence.tables import Table  # noqa: E402
from muon_tutorial.orthogonalizers.choices import AUTO  # noqa: E402
from muon_tutorial.orthogonalizers.named import RECIPES, STOCK  # noqa: E402
from scripts.files import made, write_whole  # noqa: E402
from scripts.lab.benchmarks.newton_schulz_times import (  # noqa: E402
    TORCH,
    WORKS,
    WorkTimes,
    measure,
    summary,
    times_table,
)
from scripts.result_files import (  # noqa: E402
    bars,
    check_counts,
    command_line,
    machine_facts,
    result_parser,
    say,
    write_results,
)

BF16_FLAGS = ("avx512_bf16", "amx_bf16")
WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
NAMES = (TORCH, STOCK, *RECIPES, AUTO)
WITHOUT_NAMES = (TORCH, STOCK, "float32", "gram", "minimax", "three_steps", AUTO)  # bf16 takes seconds there
ROUNDS, ROUNDS_WITHOUT = 7, 3
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "evidence.md"
PAGE_PART = re.compile(r"(?<=<!-- from results/newton_schulz.json -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Measure, with and without bf16 units, and write."""
    parser = result_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds")
    parser.add_argument("--only-without-bf16", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    check_counts(parser, asked, "rounds")
    if asked.only_without_bf16:
        json.dump([asdict(one) for one in measured(WITHOUT_NAMES, ROUNDS_WITHOUT)], sys.stdout)
        return 0
    command = command_line("newton_schulz_times.py", arguments)
    out = made(asked.out)
    flags = [flag for flag in BF16_FLAGS if flag in cpu_flags()]
    here = f"with {', '.join(flags)}" if flags else "a CPU without bf16 units"
    tables = [times_table(one, command, here) for one in measured(NAMES, asked.rounds)]
    if flags:
        say("measuring without bf16 units")
        tables += [times_table(one, command, "oneDNN without bf16 units") for one in measured_without_bf16()]
    write(out, tables, {**machine_facts(command), "threads": 1, "bf16 instructions": here})
    if out == RESULTS:
        quote(tables)
    print("\n".join(table.markdown() for table in tables))
    return 0


def measured(names: tuple[str, ...], rounds: int) -> list[WorkTimes]:
    """Measure both works on one thread."""
    import torch

    torch.set_num_threads(1)
    found = []
    for work in WORKS:
        say(f"measuring {work}")
        found.append(measure(work, names, rounds))
    return found


def measured_without_bf16() -> list[WorkTimes]:
    """Measure in a process whose oneDNN may not use bf16 instructions."""
    program = [sys.executable, str(Path(__file__)), "--only-without-bf16"]
    answer = subprocess.run(
        program, env={**os.environ, **WITHOUT_BF16}, stdout=subprocess.PIPE, check=True, text=True
    )
    return [WorkTimes(**one) for one in json.loads(answer.stdout)]


def cpu_flags() -> set[str]:
    """The instruction sets that the system lists for the first CPU; empty if it lists none."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def quote(tables: list[Table]) -> None:
    """Write the ratios into docs/evidence.md, between its markers."""
    said = summary([(table.title, table.rows) for table in tables])
    write_whole(PAGE, PAGE_PART.sub(lambda _: said, PAGE.read_text(encoding="utf-8")))


def write(folder: Path, tables: list[Table], facts: dict[str, object]) -> None:
    """Write Markdown for people, JSON for programs, and the picture."""
    opening = (
        "Written by `scripts/newton_schulz_times.py`; do not edit. `stock` is the default, with "
        "`torch.optim.Muon`'s bits; the other names are those of `orthogonalizers/named.py`, with their "
        "errors there, and `auto` takes for each shape the one that a calibration in the same run found the "
        "fastest. GPT-2 small has twelve such layers. No GPU was at hand. Without bf16 units: the same CPU, "
        "oneDNN kept from its bf16 instructions. Its fp32 products stay as fast as they are, so on an older "
        "CPU the ratios are smaller."
    )
    picture, text, data = (f"newton_schulz.{kind}" for kind in ("svg", "md", "json"))
    draw(folder / picture, tables)
    shown = {picture: "How many times as fast as torch.optim.Muon's function each one is"}
    write_results(folder, "Newton–Schulz by name", opening, facts, tables, text, data, shown)


def draw(path: Path, tables: list[Table]) -> None:
    """Draw speedups over torch's function as bars; a contender that was not timed has no bar."""
    names = [str(row["orthogonalize"]) for row in tables[0].rows]
    series = {}
    for table in tables:
        ratios = {row["orthogonalize"]: float(row["times torch"] or 0.0) for row in table.rows}
        series[table.title] = [ratios.get(name, 0.0) for name in names]
    bars(path, names, series, "times as fast as torch.optim.Muon's function")


if __name__ == "__main__":
    raise SystemExit(main())
