"""Breaks real runs on purpose, hundreds of times, and reports how each ended.

    python scripts/faults.py --seed 0 --count 600

writes results/faults.md and results/faults.json: a table of the faults and how the runs ended. The same seed
and count give the same cases. `--list` only lists them. `--only WORDS` runs the kinds with these words in
their name, and `--case K` runs one case; these two write files only if `--out` is given. The script reads
/proc, so it needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from muon_tutorial.errors import UsageError
from scripts.files import ROOT, count, made, write_whole
from scripts.lab.faults.campaign import Campaign, warm_up
from scripts.lab.faults.case import GOOD, VERDICTS, Case, Outcome
from scripts.lab.faults.draw import draw


def main(arguments: list[str] | None = None) -> int:
    """Draw the cases, run them, and write the report; returns 1 if a fault ended badly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asked = parse(parser, arguments)
    drawn = (case for seed in asked.seed for case in draw(seed, asked.count, asked.only))
    cases = [case for case in drawn if asked.case in (None, case.number)]
    if not cases:
        parser.error(f"no case matches the options; there are {asked.count} cases a seed")
    if asked.list:
        for case in cases:
            print(f"{case.seed}.{case.number:<4} {case}")
        return 0
    try:
        if asked.out is not None:
            made(asked.out)
    except UsageError as error:
        parser.error(str(error))
    begun = time.monotonic()
    outcomes = run(cases, asked)
    seconds = time.monotonic() - begun
    for name, many in totals(outcomes).items():
        print(f"{name:>18} {many or '–'}")
    print(f"the rank at fault was named in {100 * share_named(outcomes):.1f} % of refusals; {seconds:.0f} s")
    if asked.out is not None:
        write(asked, outcomes, seconds)
    return int(not all(outcome.is_good for outcome in outcomes))


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one campaign for each")
    parser.add_argument("--count", type=count, default=600, help="number of cases for each seed (600)")
    parser.add_argument("--only", default="", metavar="WORDS", help="kinds with these words in their name")
    parser.add_argument("--case", type=int, metavar="K", help="run only the K-th case of the seed")
    parser.add_argument("--list", action="store_true", help="name the cases, and run none")
    parser.add_argument("--out", type=Path, help="folder for the table (results/ for whole campaigns)")
    asked = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("this campaign reads /proc: it needs Linux")
    if asked.out is None and not asked.only and asked.case is None:
        asked.out = ROOT / "results"
    return asked


def run(cases: list[Case], asked: argparse.Namespace) -> list[Outcome]:
    """Run the cases of each seed; print each case that ends badly, with the command that repeats it."""

    def show(outcome: Outcome) -> None:
        if not outcome.is_good or asked.case is not None:
            again = repeat_line(outcome.case, asked.count)
            again += f" --only {shlex.quote(asked.only)}" if asked.only else ""
            print(f"{outcome.verdict}: {outcome.case}\n    {outcome.detail}\n    {again}", flush=True)

    campaign = Campaign()
    try:
        warm_up()
        seeds = dict.fromkeys(case.seed for case in cases)
        return [o for s in seeds for o in campaign.run([case for case in cases if case.seed == s], show)]
    finally:
        campaign.close()


def write(asked: argparse.Namespace, outcomes: list[Outcome], seconds: float) -> None:
    seeds = " ".join(map(str, asked.seed))
    facts = {
        "command": f"python scripts/faults.py --seed {seeds} --count {asked.count}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seeds": ", ".join(map(str, asked.seed)),
        "cases": len(outcomes),
        "seconds": round(seconds),
    }
    folder = made(asked.out)
    write_whole(folder / "faults.md", as_markdown(outcomes, facts, asked.count))
    write_whole(folder / "faults.json", json.dumps(as_data(outcomes, facts), indent=1) + "\n")
    print(f"wrote {folder / 'faults.md'} and faults.json")


def counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Cases by kind and verdict, with kinds in order of first appearance."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        row = found.setdefault(outcome.case.kind, dict.fromkeys(VERDICTS, 0))
        row[outcome.verdict] += 1
    return found


def share_named(outcomes: Sequence[Outcome]) -> float:
    """Of single-rank faults that a run did not survive, the fraction whose error names the rank at fault."""
    one = [o for o in outcomes if o.case.rank is not None and o.verdict != "survived"]
    return sum(o.verdict == "named" for o in one) / len(one) if one else 1.0


def as_data(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of ``faults.json``: the table, and every outcome that was not good."""
    return {
        "facts": dict(facts),
        "totals": totals(outcomes),
        "named": round(share_named(outcomes), 4),
        "kinds": counts(outcomes),
        "bad": [
            asdict(o.case) | {"verdict": o.verdict, "detail": o.detail, "seconds": round(o.seconds, 3)}
            for o in outcomes
            if not o.is_good
        ],
    }


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {name: sum(o.verdict == name for o in outcomes) for name in VERDICTS}


def as_markdown(outcomes: Sequence[Outcome], facts: Mapping[str, Any], size: int) -> str:
    shown = [name for name, count in totals(outcomes).items() if count or name in GOOD]
    head = [
        "# Faults",
        "",
        "Written by `scripts/faults.py`; do not edit. Every fault was put into a real run, on purpose.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        f"- the rank at fault was named in {100 * share_named(outcomes):.1f} % of the refusals of one rank's "
        "fault",
        "",
    ]
    rows: list[list[object]] = [["fault", "cases", *shown], ["---", *["---:"] * (1 + len(shown))]]
    for name, row in (("**all**", totals(outcomes)), *counts(outcomes).items()):
        rows.append([name, sum(row.values()), *(row[verdict] or "" for verdict in shown)])
    table = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    legend = (
        "*named*: one named error on every rank that could still speak, and it names the rank at fault. "
        "*survived*: equal to `torch.optim.Muon` in one process, to the bit. Everything else is a hole."
    )
    return "\n".join([*head, *table, "", legend, "", *_bad(outcomes, size)]) + "\n"


def _bad(outcomes: Sequence[Outcome], size: int) -> list[str]:
    """The first bad outcome of each kind and verdict, with the command that runs it again."""
    first: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        if not outcome.is_good:
            first.setdefault((outcome.case.kind, outcome.verdict), outcome)
    if not first:
        return []
    lines = ["## Holes", "", "The first of each kind.", ""]
    for outcome in first.values():
        case = outcome.case
        detail = outcome.detail.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
        lines += [f"- **{outcome.verdict}**: {case}", f"  - {detail}"]
        lines += [f"  - `{repeat_line(case, size)}`"]
    return lines


def repeat_line(case: Case, size: int) -> str:
    return f"python scripts/faults.py --seed {case.seed} --count {size} --case {case.number}"


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `| head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
