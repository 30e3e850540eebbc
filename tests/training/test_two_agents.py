"""Two of torchrun's agents on loopback: a job goes on in its run folder when ranks restart on both nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from muon_tutorial import cli
from scripts.lab.faults.processes import wait_until

from ..exhaustive import left_out
from ..launching.launch_traces import free_port
from .runs import MODEL, OURS, SCRIPT, final_bits, losses, only_run, wait_for_a_step

PATIENCE = 150.0

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="addresses of the loopback network"),
]


@dataclass(slots=True)
class Agents:
    """Agents in one folder, each with ``ranks`` ranks. The first agent hosts the store where they meet."""

    folder: Path
    port: int
    ended: ExitStack
    ranks: int = 1

    def start(self, number: int, nodes: str, *options: str) -> subprocess.Popen:
        """Start an agent. Each new agent has the lowest address so far, and so gets rank 0."""
        command = [sys.executable, "-m", *OURS.split(), f"--nnodes={nodes}", f"--nproc-per-node={self.ranks}"]
        is_host = str(number == 0).lower()
        meeting = [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-backend=c10d", "--rdzv-id=one"]
        patience = [f"--rdzv-conf=is_host={is_host},last_call_timeout=1", "--max-restarts=1"]
        own = [f"--local-addr=127.0.0.{9 - number}", SCRIPT, *MODEL, *options]
        words = [*command, *meeting, *patience, *own]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(self.folder / f"{number}.log", "w") as said:
            agent = subprocess.Popen(words, cwd=self.folder, env=environment, stdout=said, stderr=said)
        self.ended.callback(agent.wait)
        self.ended.callback(agent.kill)
        return agent

    def said(self) -> str:
        return "".join(log.read_text() for log in sorted(self.folder.glob("*.log")))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as ended:
        yield Agents(tmp_path, free_port(), ended)


@pytest.mark.parametrize("tp", ["1", left_out("2")])
def test_a_job_that_loses_a_rank_ends_with_the_undisturbed_bits(
    tp: str, agents: Agents, tmp_path: Path
) -> None:
    """One agent restarts its dead rank; the other only follows, and does not count this as a restart.

    Restarted ranks find their run by their agents' names, and one of them prints the result, once.
    """
    agents.ranks = int(tp)
    job = ["--steps", "60", "--save-every", "6", "--json", "--tp", tp]
    both = [agents.start(number, "2", *job) for number in range(2)]
    run = only_run(tmp_path / "runs", both)
    wait_for_a_step(run, both, 7)
    before = (run / "metrics.jsonl").stat().st_ino
    children = psutil.Process(both[0].pid).children()
    next(child for child in children if SCRIPT in child.cmdline()).kill()
    assert [agent.wait(PATIENCE) for agent in both] == [0, 0], agents.said()
    (result,) = (json.loads(line) for line in agents.said().splitlines() if line.startswith("{"))
    assert result["check"]["passed"]
    assert list((tmp_path / "runs").iterdir()) == [run]
    assert (run / "metrics.jsonl").stat().st_ino != before  # resumed ranks write a new file
    whole = tmp_path / "alone"
    assert cli.main(["train", *MODEL, "--dp", "2", *job, "--out", str(whole)]) == 0
    assert (run / "result.json").exists()
    assert losses(run) == losses(whole)
    assert final_bits(run, 60) == final_bits(whole, 60)


@pytest.mark.exhaustive  # above, all ranks restart; in ``test_preempted``, ranks save when their agent ends
def test_a_job_that_began_on_one_node_goes_on_when_another_joins(agents: Agents, tmp_path: Path) -> None:
    options = ("--steps", "1000000", "--out", "run")
    first = agents.start(0, "1:2", *options)
    wait_for_a_step(tmp_path / "run", [first], 1)
    seen = losses(tmp_path / "run")
    both = [first, agents.start(1, "1:2", *options)]
    records = tmp_path / "run" / "metrics.jsonl"
    before = records.stat().st_ino
    wait_until(lambda: records.stat().st_ino != before, PATIENCE)  # resumed ranks write a new file
    wait_for_a_step(tmp_path / "run", both, len(losses(tmp_path / "run")) + 2)
    for agent in both:
        agent.send_signal(signal.SIGTERM)
    assert [agent.wait(PATIENCE) for agent in both] == [143, 143], agents.said()
    assert losses(tmp_path / "run")[: len(seen)] == seen
    assert "saved after step" in (tmp_path / "1.log").read_text()  # rank 0 was on the new node
