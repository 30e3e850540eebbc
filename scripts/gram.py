"""Measure the strategy gram: distance from one process, bytes, seconds, and the regime where it wins.

    python scripts/gram.py

writes results/gram.md and gram.json. Seconds are those of four real ranks of one thread, strategies taking
turns: nothing else should run. It takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from muon_tutorial.benchmarks import gram  # noqa: E402
from muon_tutorial.evidence.tables import Table  # noqa: E402
from scripts.files import made, write_whole  # noqa: E402
from scripts.measure import machine_facts, say  # noqa: E402

ROUNDS = 3
MACHINES = ("laptop", "h100-infiniband")


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder to write to")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds")
    asked = parser.parse_args(arguments)
    command = shlex.join(["python", "scripts/gram.py", *(sys.argv[1:] if arguments is None else arguments)])
    out = made(asked.out)
    say("measuring distances")
    tables = [gram.distance_table(list(gram.distances()), command), gram.bytes_table(command)]
    say("timing steps")
    tables.append(gram.times_table(gram.measure_times(asked.rounds), command))
    tables += [gram.regime_table(machine, command) for machine in MACHINES]
    write(out, tables, machine_facts(command))
    print("\n".join(table.markdown() for table in tables))
    return 0


def write(folder: Path, tables: list[Table], facts: dict[str, object]) -> None:
    """Markdown for people, JSON for programs."""
    head = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    body = "\n".join(table.markdown() for table in tables)
    opening = (
        "Written by `scripts/gram.py`; do not edit. The strategy `gram` sums the Gram matrix of a matrix "
        "that tensor parallelism cuts along its long side, and gathers nothing. Others that iterate on "
        "shards, such as Megatron-LM's distributed mode and Transformer Engine's `newton_schulz_tp`, pay an "
        "all_reduce for every iteration; this pays one for all matrices of a bucket."
    )
    write_whole(folder / "gram.md", f"# Newton–Schulz without a gather\n\n{opening}\n\n{head}\n\n{body}")
    data = {"facts": facts, "tables": [table.data() for table in tables]}
    write_whole(folder / "gram.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
