"""Two nodes on one machine: network namespaces joined by a virtual link, and torchrun's agents across it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.lab.faults.processes import wait_until

from .runs import MODEL, OURS, PATIENCE, SCRIPT, final_bits, losses, wait_for_a_step

STEPS = 200
JOB = (*MODEL, "--steps", str(STEPS), "--save-every", "20")
OUTAGE, TIMEOUT = 25.0, 20
"""Seconds without a link, and the shorter time that ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class Node:
    """A network namespace: the process that keeps it alive, its end of the link, and its address."""

    keeper: int
    link: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """Return a command line that runs a command in the namespace."""
        return ["nsenter", "-t", str(self.keeper), "-U", "-n", "--preserve-credentials", *command]

    def sh(self, line: str) -> None:
        subprocess.run(self.inside(*line.split()), check=True, capture_output=True, text=True)

    def agent(self, folder: Path, endpoint: str, least: int) -> subprocess.Popen:
        """Start an agent with one rank; the job needs at least ``least`` of two. Output goes to a file."""
        starter = [sys.executable, "-m", *OURS.split(), f"--nnodes={least}:2", "--nproc-per-node=1"]
        is_host = str(self.address == endpoint).lower()  # torchrun would need host names
        meeting = [f"--rdzv-endpoint={endpoint}:29400", "--rdzv-id=one", f"--rdzv-conf=is_host={is_host}"]
        rdzv = ["--rdzv-backend=c10d", *meeting, "--max-restarts=20", f"--local-addr={self.address}"]
        command = [*starter, *rdzv, SCRIPT, *JOB, "--timeout", str(TIMEOUT), "--out", "run"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.link}
        with open(folder / f"{self.link}.log", "a", encoding="utf-8") as said:
            words = self.inside(*command)
            return subprocess.Popen(words, cwd=folder, env=environment, stdout=said, stderr=said)


def keeper(ended: ExitStack, *command: str) -> int:
    """Start a process in a new namespace that lives until ``ended`` is closed; returns its id."""
    process = subprocess.Popen([*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ended.callback(process.wait)
    ended.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()
    if not process.stdout.readline():
        pytest.skip(f"this kernel allows no namespaces: {' '.join(command)}")
    return process.pid


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with ExitStack() as ended:
        left = Node(keeper(ended, "unshare", "-rn"), "left", "10.77.0.1")
        right = Node(keeper(ended, *left.inside("unshare", "-n")), "right", "10.77.0.2")
        try:
            left.sh(f"ip link add name left type veth peer name right netns {right.keeper}")
            for node in (left, right):
                node.sh(f"ip addr add {node.address}/24 dev {node.link}")
                node.sh(f"ip link set {node.link} up")
                node.sh("ip link set lo up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel allows no link between namespaces: {error.stderr}")
        yield left, right


@pytest.mark.timeout(900)
@pytest.mark.exhaustive  # ``test_two_agents`` kills a rank on one node, and gets the same bits
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
@pytest.mark.parametrize(("kind", "least"), [("node", 2), ("link", 2), ("node", 1)])
def test_a_job_that_loses_a_node_or_the_link_ends_as_an_undisturbed_one(
    kind: str, least: int, nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    """On the remaining node alone, the losses differ only by the order of sums."""
    whole, run, (left, right) = tmp_path / "alone", tmp_path / "run", nodes
    command = [sys.executable, "-m", "muon_tutorial", "train", *JOB, "--dp", "2", "--out", "alone"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    agents = [node.agent(tmp_path, left.address, least) for node in nodes]
    try:
        wait_for_a_step(run, agents, 24)
        before = (run / "metrics.jsonl").stat().st_ino
        if kind == "link":
            right.sh("ip link set right down")
            time.sleep(OUTAGE)
            right.sh("ip link set right up")
        else:
            agents[1].kill()
            agents[1].wait()
            if least == 2:
                agents[1] = right.agent(tmp_path, left.address, least)
        # Resumed ranks write a new file.
        assert wait_until(lambda: (run / "metrics.jsonl").stat().st_ino != before, PATIENCE)
        wait_for_a_step(run, agents, STEPS)
        assert agents[0].wait(PATIENCE) == 0
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    if least == 1:
        assert losses(run)[:40] == pytest.approx(losses(whole)[:40], abs=1e-3)
    else:
        assert losses(run) == losses(whole)
        assert final_bits(run, STEPS) == final_bits(whole, STEPS)
