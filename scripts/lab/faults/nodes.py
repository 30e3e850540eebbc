"""Simulates two nodes that lose each other: two linked network namespaces on one machine, each with an agent.

python -m scripts.lab.faults.nodes --seed 0 --jobs 4 --losses 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(ROOT / "scripts" / "distributed_muon.py")
MODEL = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "12", "--tp", "1")
OURS = "muon_tutorial torchrun"
PATIENCE = 300.0
"""Seconds for a job to take its next step on a busy machine."""
BOUND = 1e-3
"""How far losses may differ from an undisturbed run, because sums over fewer ranks round differently."""


class NoNamespacesError(Exception):
    """This kernel allows no network namespaces without root; the text names the command that failed."""


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

    def agent(self, folder: Path, endpoint: str, *options: str, least: int = 2) -> subprocess.Popen[str]:
        """Start an agent with one rank; the job needs at least ``least`` of two. Output goes to a file."""
        starter = [sys.executable, "-m", *OURS.split(), f"--nnodes={least}:2", "--nproc-per-node=1"]
        is_host = str(self.address == endpoint).lower()  # torchrun would need host names
        meeting = [f"--rdzv-endpoint={endpoint}:29400", "--rdzv-id=one", f"--rdzv-conf=is_host={is_host}"]
        rdzv = ["--rdzv-backend=c10d", *meeting, "--max-restarts=20"]
        command = [*starter, *rdzv, f"--local-addr={self.address}", SCRIPT, *MODEL, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.link}
        with open(folder / f"{self.link}.log", "a", encoding="utf-8") as said:
            return subprocess.Popen(
                self.inside(*command), cwd=folder, env=environment, text=True, stdout=said, stderr=said
            )


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes joined by a link.

    Raises:
        NoNamespacesError: the kernel does not allow the namespaces.
    """
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
                raise NoNamespacesError(" ".join(command))
            return process.pid

        left = Node(keeper("unshare", "-rn"), "left", "10.77.0.1")
        right = Node(keeper(*left.inside("unshare", "-n")), "right", "10.77.0.2")
        try:
            left.sh(f"ip link add name left type veth peer name right netns {right.keeper}")
            for node in (left, right):
                node.sh(f"ip addr add {node.address}/24 dev {node.link}")
                node.sh(f"ip link set {node.link} up")
                node.sh("ip link set lo up")
        except subprocess.CalledProcessError as error:
            raise NoNamespacesError(str(error.stderr)) from error
        yield left, right


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def final_bits(run: Path, steps: int) -> list[tuple[str, str]]:
    """The hashes of the last checkpoint's tensor files."""
    said = json.loads((run / "checkpoints" / f"step-{steps:08d}" / "manifest.json").read_text())
    files = said["manifest"]["files"]
    return sorted((name, facts["sha256"]) for name, facts in files.items() if name.endswith(".distcp"))


def only_run(runs: Path, agents: Sequence[subprocess.Popen[str]]) -> Path:
    """Wait until a run has made its folder below ``runs``; returns that folder."""
    deadline = time.monotonic() + PATIENCE
    while not (found := [path.parent for path in runs.glob("*/settings.json")]):
        if time.monotonic() > deadline or all(agent.poll() is not None for agent in agents):
            raise TimeoutError(f"no run was placed in {runs}")
        time.sleep(0.02)
    return found[0]


def _saving(steps: int) -> tuple[str, ...]:
    return ("--steps", str(steps), "--save-every", "2")


def wait_for_a_step(run: Path, agents: Sequence[subprocess.Popen[str]], wanted: int) -> None:
    """Wait until ``wanted`` steps are recorded.

    Raises:
        TimeoutError: the steps do not come, or all agents have ended.
    """
    deadline = time.monotonic() + PATIENCE
    while len(losses(run)) < wanted:
        if time.monotonic() > deadline or all(agent.poll() is not None for agent in agents):
            said = {log.name: log.read_text()[-1500:] for log in run.parent.glob("*.log")}
            raise TimeoutError(f"only {len(losses(run))} of {wanted} steps were recorded: {said}")
        time.sleep(0.02)


@dataclass(slots=True)
class Job:
    """A disturbed run on two nodes. ``seconds``: from each loss of a node or link to the next step."""

    nodes: tuple[Node, Node]
    folder: Path
    steps: int
    least: int
    agents: list[subprocess.Popen[str]]
    seconds: list[float]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, node: Node) -> subprocess.Popen[str]:
        options = (*_saving(self.steps), "--timeout", "20", "--out", "run")
        return node.agent(self.folder, self.nodes[0].address, *options, least=self.least)

    def lose(self, kind: str, dice: Random) -> None:
        """Lose the second node or its link for some seconds; if one node suffices, lose the node for good."""
        wait_for_a_step(self.run, self.agents, len(losses(self.run)) + dice.randint(1, 6))
        file, lost, right = self.run / "metrics.jsonl", time.monotonic(), self.nodes[1]
        before = file.stat().st_ino
        if kind == "link":
            right.sh("ip link set right down")
            time.sleep(dice.uniform(1.0, 30.0))
            right.sh("ip link set right up")
        else:
            self.agents[1].send_signal(signal.SIGKILL)
            self.agents[1].wait()
            if self.least == 2:
                time.sleep(dice.uniform(0.0, 5.0))
                self.agents[1] = self.start(right)
        seen = len(losses(self.run))
        # Resumed ranks write a new file. If the link is up again before any rank uses it, no rank is resumed.
        while file.stat().st_ino == before and not (kind == "link" and len(losses(self.run)) > seen):
            if time.monotonic() > lost + PATIENCE:
                raise TimeoutError("the job did not resume")
            time.sleep(0.02)
        wait_for_a_step(self.run, self.agents, min(self.steps, len(losses(self.run)) + 1))
        self.seconds.append(time.monotonic() - lost)


def disturbed(
    dice: Random, kinds: Sequence[str], least: int, folder: Path, steps: int
) -> tuple[bool, list[float]]:
    """Run a job that several times loses a node or link. Returns whether the job ends like an undisturbed
    one, and the seconds from each loss to the next step."""
    whole = folder / "alone"
    command = [sys.executable, "-m", "muon_tutorial", "train", *MODEL, "--dp", "2", *_saving(steps)]
    subprocess.run([*command, "--out", "alone"], cwd=folder, check=True, capture_output=True)
    with two_nodes() as nodes:
        job = Job(nodes, folder, steps, least, [], [])
        job.agents += [job.start(node) for node in nodes]
        try:
            for kind in kinds:
                job.lose(kind, dice)
                print(f"    {kind} lost; went on after {job.seconds[-1]:.1f} s", flush=True)
            wait_for_a_step(job.run, job.agents, steps)
            job.agents[0].wait(PATIENCE)
        finally:
            for agent in job.agents:
                agent.kill()
                agent.wait()
    if least == 1:
        gaps = [abs(a - b) for a, b in zip(losses(job.run), losses(whole), strict=True)]
        return max(gaps) < BOUND, job.seconds
    alike = losses(job.run) == losses(whole)
    return alike and final_bits(job.run, steps) == final_bits(whole, steps), job.seconds


def main() -> int:
    """Disturb jobs and say how each ends; every fourth may go on with one node. Returns 1 if a job failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--losses", type=int, default=5)
    seconds: list[float] = []
    asked, good = parser.parse_args(), 0
    for number in range(asked.jobs):
        dice = Random(f"{asked.seed}/{number}")
        least = 1 if number % 4 == 3 else 2
        kinds = ["node"] if least == 1 else [dice.choice(("node", "link")) for _ in range(asked.losses)]
        with tempfile.TemporaryDirectory() as folder:
            is_good, took = disturbed(dice, kinds, least, Path(folder), 12 * len(kinds) + 8)
        ended = "as it should" if is_good else "WRONG"
        print(f"job {number}, at least {least} nodes: {', '.join(kinds)}: {ended}", flush=True)
        seconds, good = seconds + took, good + is_good
    print(f"{good} of {asked.jobs} jobs ended correctly, after {len(seconds)} losses; ", end="")
    print(f"median {statistics.median(seconds):.1f} s to go on, at most {max(seconds):.1f} s")
    return int(good < asked.jobs)


if __name__ == "__main__":
    raise SystemExit(main())
