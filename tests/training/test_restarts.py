"""Under ``torchrun --max-restarts``, runs whose ranks are killed end like undisturbed runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest

from muon_tutorial import cli
from scripts.lab.faults.nodes import SCRIPT, final_bits, losses

STEPS = 12
JOB = f"--layers 1 --width 16 --heads 2 --context 16 --batch 12 --steps {STEPS} --save-every 2 --json".split()
TP = {2: ("--tp", "1"), 4: ("--tp", "2")}
PATIENCE = 180.0

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.live,
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
]


@contextmanager
def torchrun(ranks: int, folder: Path, *options: str, restarts: int = 2) -> Iterator[subprocess.Popen]:
    """The job under torchrun, in a run folder."""
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
    """Wait for the end; one rank alone prints the result, once."""
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    (result,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert result["check"]["passed"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The job on launched ranks, run on first use."""
    root = tmp_path_factory.mktemp("undisturbed")

    @cache
    def run(ranks: int) -> Path:
        dp = ranks // int(TP[ranks][1])
        folder = root / str(ranks)
        assert cli.main(["train", *JOB, "--dp", str(dp), *TP[ranks], "--out", str(folder)]) == 0
        return folder

    return run


def kill_a_rank(folder: Path, process: subprocess.Popen, at: int, rank: int) -> float:
    """Kill a rank once ``at`` steps are recorded; returns the seconds until a later step is."""
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


def killed_run(tmp_path: Path, seed: int, undisturbed: Callable[[int], Path], ranks: int = 4) -> float:
    """A run whose rank is killed at a random step ends with the undisturbed run's bits."""
    draw = random.Random(seed)
    folder = tmp_path / f"run-{seed}"
    named = ["--out", folder.name] if seed % 2 else []  # otherwise found again by torchrun's run id
    with torchrun(ranks, folder, *JOB, *TP[ranks], *named) as process:
        if not named:
            folder = _only_run(tmp_path / "runs", process)
        seconds = kill_a_rank(folder, process, draw.randint(1, STEPS - 2), draw.randrange(ranks))
        finish(process)
    assert (folder / "result.json").exists()
    assert losses(folder) == losses(undisturbed(ranks))
    assert len(final_bits(folder, STEPS)) == ranks
    assert final_bits(folder, STEPS) == final_bits(undisturbed(ranks), STEPS)
    if not named:
        folder.rename(tmp_path / f"run-{seed}")
    return seconds


def _only_run(runs: Path, process: subprocess.Popen) -> Path:
    deadline = time.monotonic() + PATIENCE
    while not (found := [it for it in runs.glob("*") if (it / "settings.json").exists()]):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def test_a_run_with_a_killed_rank_ends_with_the_undisturbed_runs_bits(
    tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    killed_run(tmp_path, 0, undisturbed, ranks=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_thirty_runs_with_a_killed_rank_end_with_the_undisturbed_runs_bits(
    tmp_path: Path, undisturbed: Callable[[int], Path], capsys: pytest.CaptureFixture
) -> None:
    seconds = sorted(killed_run(tmp_path, seed, undisturbed) for seed in range(30))
    with capsys.disabled():
        print(f"\n30 killed runs went on after {seconds[15]:.1f} s (median), at most {seconds[-1]:.1f} s")


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_five_killed_runs_go_on_with_fewer_ranks_and_with_more_again(
    tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    """4 ranks, then 3, then 4: the same losses except for the order of sums."""
    for seed in range(5):
        folder = tmp_path / f"run-{seed}"
        with torchrun(4, folder, *JOB, *TP[4], "--out", folder.name, restarts=0) as process:
            kill_a_rank(folder, process, 5, seed % 4)
            process.communicate(timeout=PATIENCE)
            assert process.returncode != 0
        with torchrun(3, folder, "--resume", folder.name, "--tp", "1", restarts=0) as process:
            kill_a_rank(folder, process, 9, seed % 3)
            process.communicate(timeout=PATIENCE)
        with torchrun(4, folder, "--resume", folder.name, *TP[4], "--json", restarts=0) as process:
            finish(process)
        assert losses(folder) == pytest.approx(losses(undisturbed(4)), abs=1e-3)
