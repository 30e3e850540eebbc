"""Breaks real runs on purpose, hundreds of times, and reports how each ended.

    python scripts/faults.py --seed 0 --count 600

writes results/faults.md and results/faults.json: a table of the faults and how the runs ended. The same seed
and count give the same cases. `--only WORDS` runs the kinds with these words in their name, and `--case K`
runs one case; these two write files only if `--out` is given. The script reads /proc, so it needs Linux.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from muon_tutorial.evidence.tables import Table, TableRow
from scripts import result_files as results
from scripts.files import answered, count, made, parser_of
from scripts.lab.faults.campaign import Campaign, warm_up
from scripts.lab.faults.case import GOOD, VERDICTS, Case, Outcome
from scripts.lab.faults.draw_cases import draw

OPENING = "Every fault was put into a real run, on purpose."
LEGEND = (
    "*named*: one named error on every rank that could still speak, and it names the rank at fault. "
    "*survived*: equal to `torch.optim.Muon` in one process, to the bit. Everything else is a hole."
)


def main(arguments: list[str] | None = None) -> int:
    """Draw the cases, run them, and write the report; returns 1 if a fault ended badly."""
    parser = parser_of(__doc__)
    asked = parse(parser, arguments)
    drawn = (case for seed in asked.seed for case in draw(seed, asked.count, asked.only))
    cases = [case for case in drawn if asked.case in (None, case.number)]
    if not cases:
        parser.error(f"no case matches the options; there are {asked.count} cases a seed")
    outcomes: list[Outcome] = []

    def work() -> None:
        if asked.out is not None:
            made(asked.out)
        begun = time.monotonic()
        outcomes.extend(run(cases, asked))
        seconds = time.monotonic() - begun
        for name, many in totals(outcomes).items():
            print(f"{name:>18} {many or '–'}")
        share = 100 * share_named(outcomes)
        print(f"{share:.1f} % of runs that one faulty rank broke name that rank; {seconds:.0f} s")
        if asked.out is not None:
            write(asked, outcomes, seconds)

    return answered("faults.py", work) or int(not all(outcome.is_good for outcome in outcomes))


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one campaign for each")
    parser.add_argument("--count", type=count, default=600, help="number of cases for each seed (600)")
    parser.add_argument("--only", default="", metavar="WORDS", help="kinds with these words in their name")
    parser.add_argument("--case", type=int, metavar="K", help="run only the K-th case of the seed")
    parser.add_argument("--out", type=Path, help="folder for the table (results/ for whole campaigns)")
    asked = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("this campaign reads /proc: it needs Linux")
    if asked.out is None and not asked.only and asked.case is None:
        asked.out = results.RESULTS
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


def write(asked: argparse.Namespace, outcomes: Sequence[Outcome], seconds: float) -> None:
    command = f"python scripts/faults.py --seed {' '.join(map(str, asked.seed))} --count {asked.count}"
    facts = {
        **results.machine_facts(command),
        "seeds": ", ".join(map(str, asked.seed)),
        "cases": len(outcomes),
        "seconds": round(seconds),
        "rank at fault named": f"in {100 * share_named(outcomes):.1f} % of runs that one faulty rank broke",
    }
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    tables = [counts_table(counts(outcomes), command)]
    tables += [holes_table(bad, command, asked.count)] if bad else []
    results.write_results(asked.out, "faults", "Faults", OPENING, facts, tables)
    print(f"wrote {asked.out / 'faults.md'} and faults.json")


def counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """The number of cases by kind and verdict. The first row sums all kinds; then kinds follow in order of
    first appearance."""
    found = {"**all**": totals(outcomes)}
    for outcome in outcomes:
        row = found.setdefault(outcome.case.kind, dict.fromkeys(VERDICTS, 0))
        row[outcome.verdict] += 1
    return found


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {name: sum(o.verdict == name for o in outcomes) for name in VERDICTS}


def share_named(outcomes: Sequence[Outcome]) -> float:
    """The fraction of cases whose error names the rank at fault, among cases with one faulty rank that did
    not survive."""
    one = [o for o in outcomes if o.case.rank is not None and o.verdict != "survived"]
    return sum(o.verdict == "named" for o in one) / len(one) if one else 1.0


def counts_table(found: Mapping[str, Mapping[str, int]], command: str) -> Table:
    """How many cases of each fault got which verdict, without the verdicts that no case got."""
    shown = [name for name in VERDICTS if name in GOOD or any(row[name] for row in found.values())]
    rows: tuple[TableRow, ...] = tuple(
        {"fault": kind, "cases": sum(row.values()), **{name: row[name] or None for name in shown}}
        for kind, row in found.items()
    )
    return Table("How the runs ended", rows, command, (LEGEND,))


def holes_table(bad: Sequence[Outcome], command: str, size: int) -> Table:
    """The first case of each kind that ended badly, with the command that runs it again."""
    first: dict[tuple[str, str], Outcome] = {}
    for outcome in bad:
        first.setdefault((outcome.case.kind, outcome.verdict), outcome)
    rows: tuple[TableRow, ...] = tuple(
        {
            "verdict": outcome.verdict,
            "case": str(outcome.case),
            "detail": outcome.detail.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*"),
            "once more": f"`{repeat_line(outcome.case, size)}`",
        }
        for outcome in first.values()
    )
    return Table("Holes", rows, command, ("The first of each kind.",))


def repeat_line(case: Case, size: int) -> str:
    return f"python scripts/faults.py --seed {case.seed} --count {size} --case {case.number}"


if __name__ == "__main__":
    raise SystemExit(main())
