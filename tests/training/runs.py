"""Reads what a run of the main job has written so far, for tests that disturb it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.lab.faults.processes import wait_until

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "distributed_muon.py")
MODEL = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "12", "--tp", "1")
OURS = "muon_tutorial torchrun"
PATIENCE = 300.0
"""Seconds for a job to take its next step on a busy machine."""


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def final_bits(run: Path, steps: int) -> list[tuple[str, str]]:
    """The hashes of the last checkpoint's tensor files."""
    said = json.loads((run / "checkpoints" / f"step-{steps:08d}" / "manifest.json").read_text())
    files = said["manifest"]["files"]
    return sorted((name, facts["sha256"]) for name, facts in files.items() if name.endswith(".distcp"))


def only_run(runs: Path, agents: Sequence[subprocess.Popen]) -> Path:
    """Wait until a run has made its folder below ``runs``; returns that folder."""
    wait_until(lambda: [*runs.glob("*/settings.json")] or have_ended(agents), PATIENCE)
    return next(runs.glob("*/settings.json")).parent


def wait_for_a_step(run: Path, agents: Sequence[subprocess.Popen], wanted: int) -> None:
    """Wait until ``wanted`` steps are recorded. It is an error if all agents end before."""
    wait_until(lambda: len(losses(run)) >= wanted or have_ended(agents), PATIENCE)
    said = {log.name: log.read_text()[-1500:] for log in run.parent.glob("*.log")}
    assert len(losses(run)) >= wanted, said


def have_ended(agents: Sequence[subprocess.Popen]) -> bool:
    return all(agent.poll() is not None for agent in agents)
