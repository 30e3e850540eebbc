"""Measures whether owners work at the same time, with sleep in place of Newton–Schulz.

    python scripts/rounds.py

writes results/rounds.md and rounds.json: the seconds of a step on 4, 8 and 16 real ranks, divided by the
lower bound for whole matrices, and the most bytes that a rank held, measured and predicted; then steps with
real work, compared with ranks that share it and exchange nothing. It takes five minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # its checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

from scripts.files import made
from scripts.lab.benchmarks import rounds
from scripts.result_files import command_line, machine_facts, markdown, result_parser, say, write_results

OPENING = (
    "A strategy shares the work of Newton–Schulz only if owners work at the same time. Here they sleep in "
    "its place, so that any machine shows it."
)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = result_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="numbers of ranks")
    parser.add_argument("--only-sleep", action="store_true", help="no real work")
    asked = parser.parse_args(arguments)
    if min(asked.ranks) < 2:
        parser.error(f"--ranks are at least 2; got {min(asked.ranks)}")
    command, steps = command_line("rounds", arguments), []
    out = made(asked.out)
    for case in rounds.cases(asked.ranks):
        say(f"{case.name} on {case.ranks} ranks")
        steps += rounds.run_case(case)
    tables = [rounds.sleep_table(steps, command)]
    tables += [] if asked.only_sleep else [rounds.real_table(command)]
    write_results(out, "rounds", "Rounds", OPENING, machine_facts(command), tables)
    print(markdown(tables))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
