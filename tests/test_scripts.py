"""The set-up scripts: each failure is one clear line, and a filled environment is reused.

A fake Python has every name that the scripts look for. The fake answers as the test's variables say, logs its
calls, and makes a virtual environment by copying itself. Nothing is installed or downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON_NAMES = ("python", "python3", *(f"python3.{minor}" for minor in range(10, 15)))

STAND_IN = """#!/bin/bash
echo "$*" >>"$FAKE_CALLS"
case "$*" in
  *version_info*) [ -n "$FAKE_VERSION" ] && echo "$FAKE_VERSION" ;;
  *ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) echo "Collecting torch"; [ -z "$FAKE_PIP_SAYS" ] || { echo "$FAKE_PIP_SAYS"; exit 1; } ;;
  "-m $FAKE_FAILING"*) exit 1 ;;
  "-m "*) echo "ran: $*; $PYTHONPATH$PYTHONHOME$VIRTUAL_ENV" ;;
esac
"""

NO_NETWORK = (
    "WARNING: Retrying after connection broken by 'NewConnectionError(\"Failed to establish a new "
    "connection: [Errno -3] Temporary failure in name resolution\")': /simple/torch/\n"
    "ERROR: Could not find a version that satisfies the requirement torch (from versions: none)"
)
DISK_FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
NO_WHEEL = "ERROR: No matching distribution found for torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Clone:
    """A copy of the files that the scripts need, with a folder of stand-ins and its own home folder."""

    folder: Path
    stand_ins: Path
    calls: Path

    @property
    def filling(self) -> Path:
        return self.folder / ".venv" / ".filling"

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "HOME": str(self.stand_ins),
            "PATH": f"{self.stand_ins}:/usr/bin:/bin",
            "FAKE_CALLS": str(self.calls),
            "FAKE_VERSION": "3.11.7",
            "FAKE_FAILING": "nothing",
            "MUON_NEEDED_MB": "0",
        }
        return subprocess.run(
            ["bash", f"scripts/{script}.sh", *arguments],
            cwd=self.folder,
            env=settings | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def count(self, call: str) -> int:
        """Return how often Python was called with ``call`` so far."""
        return self.calls.read_text().count(call)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    made = Clone(tmp_path / "a clone", tmp_path / "bin", tmp_path / "calls")
    made.folder.mkdir()
    shutil.copytree(ROOT / "scripts", made.folder / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, made.folder)
    made.stand_ins.mkdir()
    for name in PYTHON_NAMES:
        (made.stand_ins / name).write_text(STAND_IN)
        (made.stand_ins / name).chmod(0o755)
    return made


def the_one_line(run: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a failed set-up, which must be one line on standard error."""
    lines = run.stderr.splitlines()
    assert run.returncode == 1, run.stdout + run.stderr
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("setup: error: ")
    return lines[0]


FAILURES = {
    "too old": ({"FAKE_VERSION": "3.9.2"}, "Python 3.10 or newer is needed"),
    "no Python": ({"FAKE_VERSION": ""}, "no Python found"),
    "no venv module": ({"FAKE_NO_VENV": "1"}, "apt install python3-venv"),
    "no network": ({"FAKE_PIP_SAYS": NO_NETWORK}, "no network"),
    "disk full": ({"FAKE_PIP_SAYS": DISK_FULL}, "disk full"),
    "disk too small from the start": ({"MUON_NEEDED_MB": "999999999999"}, "disk full"),
    "no wheel": ({"FAKE_PIP_SAYS": NO_WHEEL}, "No matching distribution found for torch==2.13.0"),
    "anything else": ({"FAKE_PIP_SAYS": "Killed"}, "could not fill"),
}


@pytest.mark.parametrize(
    ("script", "failure"),
    [*(("demo", failure) for failure in FAILURES), ("test", "too old"), ("lab", "no wheel")],
)
def test_a_failed_set_up_says_why_in_one_line(clone: Clone, script: str, failure: str) -> None:
    """The scripts share the set-up."""
    environment, said = FAILURES[failure]
    run = clone.run(script, **environment)
    assert said in the_one_line(run)
    assert "ran:" not in run.stdout


def test_the_demo_runs_the_main_job_in_an_environment_that_no_other_active_one_reaches(clone: Clone) -> None:
    other = {"VIRTUAL_ENV": "/elsewhere", "PYTHONPATH": "/elsewhere", "PYTHONHOME": "/elsewhere"}
    run = clone.run("demo", "--steps", "3", **other)
    assert run.returncode == 0, run.stderr
    assert "ran: -m muon_tutorial train --dp 2 --tp 2 --compare --steps 3" in run.stdout
    assert "/elsewhere" not in run.stdout
    assert clone.count("--constraint constraints.txt --editable .[notebooks,tests]") == 1


def test_a_second_run_uses_the_environment_again_and_installs_changed_versions_into_it(clone: Clone) -> None:
    clone.run("demo")
    again = clone.run("test", FAKE_PIP_SAYS=NO_NETWORK)
    assert again.returncode == 0, again.stderr
    assert "already filled" in again.stdout
    assert (clone.count("-m venv"), clone.count("-m pip")) == (1, 1)
    with (clone.folder / "constraints.txt").open("a") as file:
        file.write("new==1\n")
    clone.run("demo")
    clone.run("demo")
    assert (clone.count("-m venv"), clone.count("-m pip")) == (1, 2)


def test_an_extra_asked_for_is_installed_beside_the_usual_ones(clone: Clone) -> None:
    clone.run("test")
    for _ in range(2):
        assert clone.run("test", MUON_EXTRAS="hosts").returncode == 0
    assert clone.count("--editable .[notebooks,tests]") == 1
    assert clone.count("--editable .[notebooks,tests,hosts]") == 1


@pytest.mark.parametrize(("failure", "kept"), [(DISK_FULL, False), (NO_NETWORK, True)])
def test_a_half_built_environment_is_built_again_but_kept_if_only_the_network_failed(
    clone: Clone, failure: str, kept: bool
) -> None:
    clone.run("demo", FAKE_PIP_SAYS=failure)
    assert clone.filling.exists() is not kept
    (clone.folder / ".venv" / "torn").touch()
    run = clone.run("demo")
    assert run.returncode == 0, run.stderr
    assert (clone.folder / ".venv" / "torn").exists() is kept
    assert (clone.count("-m venv"), clone.count("-m pip")) == (1 if kept else 2, 2)


def test_an_environment_being_filled_is_left_alone(clone: Clone) -> None:
    clone.run("demo")
    clone.filling.write_text(f"{os.getpid()}\n")
    assert f"process {os.getpid()} is filling" in the_one_line(clone.run("test"))


def test_an_environment_made_by_hand_is_filled_and_kept(clone: Clone) -> None:
    (clone.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(clone.stand_ins / "python", clone.folder / ".venv" / "bin" / "python")
    assert clone.run("demo").returncode == 0
    assert (clone.count("-m venv"), clone.count("-m pip")) == (0, 1)


def test_a_moved_project_is_filled_anew(clone: Clone) -> None:
    clone.run("demo")
    moved = Clone(clone.folder.rename(clone.folder.with_name("elsewhere")), clone.stand_ins, clone.calls)
    assert moved.run("demo").returncode == 0
    assert clone.count("-m venv") == 2


def test_the_asked_for_python_is_tried_first(clone: Clone) -> None:
    mine = clone.stand_ins / "mine"
    mine.write_text(STAND_IN.replace("$FAKE_VERSION", "3.12.0"))
    mine.chmod(0o755)
    assert "with Python 3.12.0" in clone.run("demo", PYTHON=str(mine)).stdout


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
def test_the_tests_fail_when_a_part_fails_and_still_run_the_others(clone: Clone, failing: str) -> None:
    run = clone.run("test", FAKE_FAILING=failing)
    assert run.returncode == 1
    assert f"failed: {failing}" in run.stderr
    assert run.stdout.count("ran:") == 2
