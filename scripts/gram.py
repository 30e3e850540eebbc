"""Measures the strategy gram: distance from one process, bytes, seconds, and the regime where it wins.

    python scripts/gram.py

writes results/gram.md and gram.json. Seconds are measured on four real ranks of one thread each, strategies
taking turns, so nothing else should run meanwhile. It takes two minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # its checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

from scripts import result_files as results
from scripts.files import made
from scripts.lab.benchmarks import gram

ROUNDS = 3
MACHINES = ("laptop", "h100-infiniband")
OPENING = (
    "The strategy `gram` sums the Gram matrix of a matrix that tensor parallelism cuts along its long side, "
    "and gathers nothing. Others that iterate on shards, such as Megatron-LM's distributed mode and "
    "Transformer Engine's `newton_schulz_tp`, pay an all_reduce for every iteration; this pays one for all "
    "matrices of a bucket."
)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = results.result_parser(__doc__, rounds=(ROUNDS, "timed rounds"))
    return results.answer("gram", parser, measure_and_write, arguments)


def measure_and_write(asked: argparse.Namespace, command: str) -> None:
    """Measure everything, and write it."""
    out = made(asked.out)
    results.say("measuring distances")
    tables = [gram.distance_table(list(gram.distances()), command), gram.bytes_table(command)]
    results.say("timing steps")
    tables.append(gram.times_table(gram.measure_times(asked.rounds), command))
    tables += [gram.regime_table(machine, command) for machine in MACHINES]
    results.write_results(
        out, "gram", "Newton–Schulz without a gather", OPENING, results.machine_facts(command), tables
    )
    print(results.markdown(tables))


if __name__ == "__main__":
    raise SystemExit(main())
