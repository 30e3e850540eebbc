"""Two nodes on one machine: network namespaces joined by a virtual link, and torchrun's agents across it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from .test_restarts import JOB, PATIENCE, SCRIPT, final_bits, losses

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.live,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces"),
]


@dataclass(frozen=True, slots=True)
class Node:
    """A network namespace: the process that keeps it, its end of the link, and its address."""

    keeper: int
    link: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """A command line that runs a command there."""
        return ["nsenter", "-t", str(self.keeper), "-U", "-n", "--preserve-credentials", *command]

    def sh(self, line: str) -> None:
        subprocess.run(self.inside(*line.split()), check=True, capture_output=True, text=True)

    def agent(self, folder: Path, endpoint: str, *options: str, module: str) -> subprocess.Popen[str]:
        """One agent of two, with one rank."""
        starter = [sys.executable, *module.split(), "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
        rdzv = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:29400", "--rdzv-id=one"]
        rdzv.append(f"--rdzv-conf=is_host={str(self.address == endpoint).lower()}")  # no name resolves here
        command = [*starter, *rdzv, f"--local-addr={self.address}", SCRIPT, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.link}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(self.inside(*command), cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes joined by a link; skipped where the kernel allows no namespace without root."""
    with contextlib.ExitStack() as ended:

        def keeper(*command: str) -> int:
            process = subprocess.Popen([*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ended.callback(process.wait)
            ended.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"\n")
                process.stdin.flush()
            if not process.stdout.readline():
                pytest.skip(f"this kernel lets nobody make a namespace: {' '.join(command)}")
            return process.pid

        left = Node(keeper("unshare", "-rn"), "left", "10.77.0.1")
        right = Node(keeper(*left.inside("unshare", "-n")), "right", "10.77.0.2")
        try:
            left.sh(f"ip link add name left type veth peer name right netns {right.keeper}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel makes no virtual link: {error.stderr}")
        for node in (left, right):
            for line in (
                f"ip addr add {node.address}/24 dev {node.link}",
                f"ip link set {node.link} up",
                "ip link set lo up",
            ):
                node.sh(line)
        yield left, right


@contextlib.contextmanager
def job(nodes: tuple[Node, Node], folder: Path, module: str) -> Iterator[list[subprocess.Popen[str]]]:
    options = (*JOB, "--tp", "1", "--save-every", "2", "--out", "run")
    agents = [node.agent(folder, nodes[0].address, *options, module=module) for node in nodes]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def alone(folder: Path) -> Path:
    """The same job on one machine."""
    command = [sys.executable, "-m", "muon_tutorial", "train", *JOB, "--dp", "2", "--tp", "1"]
    subprocess.run(
        [*command, "--save-every", "2", "--out", "alone"], cwd=folder, check=True, capture_output=True
    )
    return folder / "alone"


def said_at_the_end(agents: list[subprocess.Popen[str]]) -> list[str]:
    said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    return said


def test_a_rank_killed_on_one_of_two_nodes_ends_with_one_machines_bits(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    with job(nodes, tmp_path, "-m muon_tutorial torchrun") as agents:
        deadline = time.monotonic() + PATIENCE
        while len(losses(tmp_path / "run")) < 5:
            assert time.monotonic() < deadline
            assert agents[0].poll() is None, agents[0].communicate()[0]
            time.sleep(0.01)
        (rank,) = (it for it in psutil.Process(agents[1].pid).children() if SCRIPT in it.cmdline())
        rank.send_signal(signal.SIGKILL)
        said_at_the_end(agents)
    whole = alone(tmp_path)
    assert losses(tmp_path / "run") == losses(whole)
    assert final_bits(tmp_path / "run") == final_bits(whole)


def test_torchs_own_torchrun_is_told_what_to_set_before_restarts_fail(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    with job(nodes, tmp_path, "-m torch.distributed.run") as agents:
        said = said_at_the_end(agents)
    assert sum(text.count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") for text in said) == 1
