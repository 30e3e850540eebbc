"""Times whole steps of this Muon, torch.optim.Muon and other packages' Muons, then of this Muon over ranks.

    python scripts/step_benchmark.py
    python scripts/step_benchmark.py --device cuda

times steps over the hidden matrices of some layers of GPT-2 small. The contenders are this Muon with every
recipe, torch.optim.Muon, and the Muons of the packages in the extra `peers`. The contenders take turns on one
thread. Then it times this Muon on 1, 2, 4 and 8 real ranks. It writes results/step_benchmark.md, .json and
.svg, and the lines that docs/evidence.md quotes. The script takes some minutes, and nothing else should run.
On CUDA there is one rank per GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # torch's checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler logs its own begin and end

import torch

from muon_tutorial.errors import UsageError
from muon_tutorial.evidence.tables import Table
from muon_tutorial.orthogonalizers.named import DROP_INS, STOCK
from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks import step_benchmark, steps_over_ranks
from scripts.lab.benchmarks.step_benchmark import AUTO, GPT2_LAYERS, LAYER, OURS, StepSet
from scripts.lab.benchmarks.steps_over_ranks import OVERLAPPED, OWNER, RANKS

STEM = "step_benchmark"
OPENING = (
    "Ratios are taken within one run; milliseconds are valid only for its machine. Contenders do not all do "
    "the same work: the second table says what each does. On a machine with a GPU, "
    f"`python scripts/{STEM}.py --device cuda` writes the same tables."
)

Rows = Sequence[dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    layers, rounds = (3, "layers of GPT-2 small, which has 12"), (3, "timed steps of each contender")
    parser = results.result_parser(__doc__, layers=layers, rounds=rounds)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return results.answer(STEM, parser, measure_and_write, arguments)


def measure_and_write(asked: argparse.Namespace, command: str) -> None:
    """Measure, and write tables and plot; also docs/evidence.md's lines, if the folder is results/.

    Raises:
        UsageError: a GPU is asked for, and PyTorch finds none.
    """
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU that PyTorch can use")
    out, work = made(asked.out), StepSet(LAYER * asked.layers)
    tables = all_tables(asked, work, command)
    plot(out / f"{STEM}.svg", tables)
    shown = {f"{STEM}.svg": "Bars: milliseconds and peak memory of each contender; lines: speed over ranks"}
    facts = {
        **results.machine_facts(command),
        "bf16 instructions": ", ".join(results.bf16_flags()) or "none",
        "GPU": torch.cuda.get_device_name() if asked.device == "cuda" else "no GPU was at hand",
        "threads": "1 a process",
        "work": f"the hidden matrices of {asked.layers} of GPT-2 small's {GPT2_LAYERS} equal layers, fp32: "
        "4 of 768 × 768, one of 3072 × 768 and one of 768 × 3072 each",
    }
    results.write_results(out, STEM, "Whole steps, side by side", OPENING, facts, tables, shown)
    if out == results.RESULTS:
        results.quote(f"{STEM}.json", page_lines(tables))
    print(results.markdown(tables))


def all_tables(asked: argparse.Namespace, work: StepSet, command: str) -> list[Table]:
    """Measure all tables. Ranks come first: they must not start from a process that uses a GPU."""
    counts = [n for n in RANKS if asked.device == "cpu" or n <= torch.cuda.device_count()]
    cases = steps_over_ranks.cases(counts)
    results.say(f"steps on {', '.join(map(str, counts))} ranks")
    found = steps_over_ranks.measure_over_ranks(work, cases, asked.rounds, asked.device)
    torch.set_num_threads(1)
    chosen, missing = step_benchmark.contenders()
    for line in missing:
        results.say(f"left out: {line}")
    run = step_benchmark.measure_steps(work, chosen, asked.rounds, torch.device(asked.device), results.say)
    return [
        step_benchmark.times_table(run, command, missing),
        step_benchmark.work_table(run, command),
        steps_over_ranks.ranks_table(found, STOCK, command),
    ]


def plot(path: Path, tables: list[Table]) -> None:
    """Draw time and memory of the contenders as bars, and speed over ranks as lines."""
    times: Rows = tables[0].rows
    ranks: Rows = tables[2].rows
    tall, widths = 0.32 * len(times) + 1.2, (3, 2, 2.5)
    with results.plotted(path, 1, 3, figsize=(12, tall), width_ratios=widths) as (left, middle, right):
        names = [row["contender"] for row in times]
        colours = ["C0" if name.startswith(OURS) else "0.6" for name in names]
        off = [(row["ms"] - row["quarter below"], row["quarter above"] - row["ms"]) for row in times]
        left.barh(
            names, [row["ms"] for row in times], xerr=[*zip(*off, strict=True)], color=colours, ecolor="0.2"
        )
        left.set_xlabel("ms of a step, and its quartiles")
        middle.barh(names, [row["peak MB"] for row in times], color=colours)
        middle.set_yticks([])
        middle.set_xlabel("peak MB, momentum not counted")
        for axes in (left, middle):
            axes.invert_yaxis()
        draw_ranks(right, ranks)


def draw_ranks(axes: Any, rows: Rows) -> None:
    """Draw each strategy's speedup over one rank as a line, or as a cross if there is only one point."""
    for name in dict.fromkeys(row["strategy"] for row in rows):
        points = [(row["ranks"], row["times one rank"]) for row in rows if row["strategy"] == name]
        axes.plot(*zip(*points, strict=True), "x" if len(points) == 1 else "o-", label=name)
    axes.axhline(os.cpu_count() or 1, color="0.6", ls=":", lw=1)
    axes.set_xscale("log", base=2)
    counts = sorted({row["ranks"] for row in rows})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("ranks (dotted: the cores of this machine)")
    axes.set_ylabel("times as fast as one rank")
    axes.set_ylim(bottom=0)
    axes.legend()


def page_lines(tables: Sequence[Table]) -> str:
    """Lines of docs/evidence.md: torch, our default, our fastest recipe, packages, ``owner`` over ranks."""
    times: Rows = tables[0].rows
    ranks: Rows = tables[2].rows
    drop_ins = [row for row in times if row["contender"] in [f"{OURS}, {name}" for name in (*DROP_INS, AUTO)]]
    best = max(drop_ins, key=lambda row: row["times torch"], default=None)
    shown = [
        row
        for row in times
        if not row["contender"].startswith(OURS)
        or row["contender"] in (f"{OURS}, {STOCK}", f"{OURS}, {AUTO}")
        or row is best
    ]
    lines = ["", "| one process | ms of a step | times torch | peak MB |", "|---|---|---|---|"]
    lines += [
        f"| {row['contender']} | {row['ms']:,.0f} | {row['times torch']:.2f} | {row['peak MB']:,.1f} |"
        for row in shown
    ]
    shares = {(row["strategy"], row["ranks"]): row["times one rank"] for row in ranks}
    lines += [
        "",
        "| `owner` over ranks | ms of a step | times one rank | with `window=2` |",
        "|---|---|---|---|",
    ]
    for row in ranks:
        if row["strategy"] == OWNER:
            overlapped = shares.get((OVERLAPPED, row["ranks"]))
            last = "–" if overlapped is None else f"{overlapped:.2f}"
            lines.append(f"| {row['ranks']} | {row['ms']:,.0f} | {row['times one rank']:.2f} | {last} |")
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    raise SystemExit(main())
