"""Under ``torchrun --max-restarts``, a run in which a rank is killed has the same end as an undisturbed run.

A usual run leaves these tests out, because ``test_two_agents`` also kills a rank.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from muon_tutorial import cli

from .runs import SCRIPT, final_bits, losses, only_run

STEPS = 12
JOB = f"--layers 1 --width 16 --heads 2 --context 16 --batch 12 --steps {STEPS} --save-every 2 --json".split()
RANKS, TP = 4, ("--tp", "2")
PATIENCE = 180.0

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
]


@contextmanager
def torchrun(ranks: int, folder: Path, *options: str, restarts: int = 2) -> Iterator[subprocess.Popen]:
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
    command = [*starter, f"--nproc-per-node={ranks}", SCRIPT, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder.parent, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen) -> None:
    """Wait for the end, and assert that the result was printed exactly once."""
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    (result,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert result["check"]["passed"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job on launched ranks."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert cli.main(["train", *JOB, "--dp", "2", *TP, "--out", str(folder)]) == 0
    return folder


def kill_a_rank(folder: Path, process: subprocess.Popen, at: int, rank: int) -> float:
    """Kill a rank once ``at`` steps are recorded; returns the seconds until a later step is recorded."""
    deadline = time.monotonic() + PATIENCE
    while len(losses(folder)) < at:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ranks = [it for it in psutil.Process(process.pid).children() if SCRIPT in it.cmdline()]
    ranks[rank].send_signal(signal.SIGKILL)
    killed, seen = time.monotonic(), len(losses(folder))
    while len(losses(folder)) <= seen and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return time.monotonic() - killed


def killed_run(tmp_path: Path, seed: int, undisturbed: Path) -> float:
    """A run whose rank is killed at a random step ends with the undisturbed run's bits."""
    draw = random.Random(seed)
    folder = tmp_path / f"run-{seed}"
    named = ["--out", folder.name] if seed % 2 else []  # otherwise ranks find the run by torchrun's run id
    with torchrun(RANKS, folder, *JOB, *TP, *named) as process:
        if not named:
            folder = only_run(tmp_path / "runs", [process])
        seconds = kill_a_rank(folder, process, draw.randint(1, STEPS - 2), draw.randrange(RANKS))
        finish(process)
    assert (folder / "result.json").exists()
    assert losses(folder) == losses(undisturbed)
    assert len(final_bits(folder, STEPS)) == RANKS
    assert final_bits(folder, STEPS) == final_bits(undisturbed, STEPS)
    if not named:
        folder.rename(tmp_path / f"run-{seed}")
    return seconds


def test_thirty_runs_with_a_killed_rank_end_with_the_undisturbed_runs_bits(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture
) -> None:
    seconds = sorted(killed_run(tmp_path, seed, undisturbed) for seed in range(30))
    with capsys.disabled():
        print(f"\n30 killed runs went on after {seconds[15]:.1f} s (median), at most {seconds[-1]:.1f} s")


def test_five_killed_runs_go_on_with_fewer_ranks_and_with_more_again(
    tmp_path: Path, undisturbed: Path
) -> None:
    """On 4 ranks, then 3, then 4, the losses differ only by the order of sums."""
    for seed in range(5):
        folder = tmp_path / f"run-{seed}"
        with torchrun(RANKS, folder, *JOB, *TP, "--out", folder.name, restarts=0) as process:
            kill_a_rank(folder, process, 5, seed % 4)
            process.communicate(timeout=PATIENCE)
            assert process.returncode != 0
        with torchrun(3, folder, "--resume", folder.name, "--tp", "1", restarts=0) as process:
            kill_a_rank(folder, process, 9, seed % 3)
            process.communicate(timeout=PATIENCE)
        with torchrun(RANKS, folder, "--resume", folder.name, *TP, "--json", restarts=0) as process:
            finish(process)
        assert losses(folder) == pytest.approx(losses(undisturbed), abs=1e-3)
