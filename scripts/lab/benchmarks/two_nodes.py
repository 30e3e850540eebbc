"""Seconds of a step across the link of two nodes, predicted by the planner's clock and measured.

    python -m scripts.lab.benchmarks.two_nodes --mbit 1000 200 50

The nodes are two network namespaces of this machine, with one rank each. tc limits both ends of their link
(``tbf``); with ``--delay`` it also delays every packet (``netem``), which not every kernel can.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # its checks would send bytes and take time
os.environ["OMP_NUM_THREADS"] = "1"

import torch.distributed as dist

from muon_tutorial.timing.calibrate import calibrate
from muon_tutorial.timing.machine import Link, Machine, read_machine
from scripts.lab.faults.nodes import Node, NoNamespacesError, two_nodes
from scripts.result_files import markdown

from .step_times import (
    BUILDERS,
    MBIT,
    Measured,
    StepCase,
    accuracy_table,
    predict_step,
    steps_table,
    time_steps,
)
from .turns import slowest

PAYLOAD = 1448 / 1514
"""The share of an Ethernet packet that is a TCP stream's own bytes."""


def cases(mbit: int, layers: int) -> list[StepCase]:
    """Every strategy on dp = 2: rounds of one matrix, three of them in flight, and all matrices at once."""
    ways = ((100_000, 1), (100_000, 3), (25_000_000, 1))
    return [StepCase(name, (("dp", 2),), *way, 128, layers, mbit) for name in BUILDERS for way in ways]


def limit(node: Node, mbit: int, delay: float) -> None:
    """Limit what a node sends to ``mbit``, and delay each packet by ``delay`` milliseconds.

    Raises:
        NoNamespacesError: this kernel cannot do it; the text is tc's.
    """
    ways = [f"root handle 1: tbf rate {mbit}mbit burst 16kb limit 64mb"]
    ways += [f"parent 1: netem delay {delay}ms limit 100000"] if delay else []
    for way in ways:
        try:
            node.sh(f"tc qdisc add dev {node.link} {way}")
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(f"tc qdisc add … {way}: {error.stderr.strip()}") from error


def measure(mbit: int, delay: float, layers: int, rounds: int) -> list[Measured]:
    """Each case and its seconds over the link: the median over rounds of the slower rank."""
    with two_nodes() as nodes, tempfile.TemporaryDirectory() as folder:
        files, ranks = [Path(folder) / node.link for node in nodes], []
        meet = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        for rank, (node, file) in enumerate(zip(nodes, files, strict=True)):
            limit(node, mbit, delay)
            program = [sys.executable, "-m", "scripts.lab.benchmarks.two_nodes", "--rank-writes", str(file)]
            options = ["--mbit", str(mbit), "--layers", str(layers), "--rounds", str(rounds)]
            told = {**os.environ, **meet, "RANK": str(rank), "GLOO_SOCKET_IFNAME": node.link}
            ranks.append(subprocess.Popen(node.inside(*program, *options), env=told))
        if any(codes := [rank.wait(600) for rank in ranks]):
            raise SystemExit(f"two_nodes: the ranks ended with {codes}")
        by_rank = [json.loads(file.read_text()) for file in files]
    return [
        (case, statistics.median(slowest([seconds[place] for seconds in by_rank])))
        for place, case in enumerate(cases(mbit, layers))
    ]


def measure_rank(file: Path, found: Sequence[StepCase], rounds: int) -> None:
    """What one node runs: join the other, take all steps, write this rank's seconds. Both ranks must call."""
    dist.init_process_group("gloo")
    file.write_text(json.dumps(list(time_steps(dist.get_rank(), found, rounds).values())))
    dist.destroy_process_group()


def across(machine: Machine, mbit: int, delay: float) -> Machine:
    """The machine as two nodes of one rank each, with a link of this rate and one-way delay."""
    link = Link(mbit * MBIT * PAYLOAD, machine.inside.latency + delay / 1000)
    return replace(machine, between=link, ranks_per_node=1, cores=1)


def main(arguments: list[str] | None = None) -> int:
    """Measure, predict, print; exits with 77 if this kernel has no namespaces or cannot limit a link."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 200, 50])
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds, one way")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", type=Path, help="a calibrated machine's file; default: calibrate now")
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank_writes:
        measure_rank(asked.rank_writes, cases(asked.mbit[0], asked.layers), asked.rounds)
        return 0
    machine = read_machine(asked.machine) if asked.machine else calibrate()
    found, said = [], []
    for mbit in asked.mbit:
        try:
            found += measure(mbit, asked.delay, asked.layers, asked.rounds)
        except NoNamespacesError as error:
            print(f"two_nodes: this kernel cannot do it: {error}", file=sys.stderr)
            return 77
        link = across(machine, mbit, asked.delay)
        said += [predict_step(replace(case, mbit=None), link).seconds for case in cases(mbit, asked.layers)]
    command = f"python -m scripts.lab.benchmarks.two_nodes {shlex.join(arguments or sys.argv[1:])}"
    steps = replace(steps_table(found, said, command), notes=())
    print(markdown([steps, accuracy_table(found, said, command)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
