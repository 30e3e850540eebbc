"""Signals to torchrun's agent, a stopped rank under it, and signals while ranks start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import muon_tutorial
from muon_tutorial.training.checkpoints import Saving
from scripts.lab.faults.processes import MARK, left_behind, wait_until

from ..exhaustive import left_out
from ..launching.launch_traces import heed_interrupts
from .runs import MODEL, OURS, SCRIPT, losses, wait_for_a_step

CHECKOUT = str(Path(muon_tutorial.__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1"}
JOB = (*MODEL, "--dp", "2", "--steps", "100000", "--timeout", "30", "--out", "run")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a run in /proc"),
]


@contextmanager
def begun(words: Sequence[str], sign: str, folder: Path, *options: str) -> Iterator[subprocess.Popen]:
    """Start a run, and yield its process once the file ``sign`` exists; then wait for its end.

    It must leave no process behind. The file ``said.log`` has what it wrote to stderr.
    """
    mark = f"preempted-{os.getpid()}"
    with open(folder / "said.log", "wb") as said:
        started = subprocess.Popen(
            [sys.executable, "-m", *words, *JOB, *options],
            cwd=folder,
            env={**ENVIRONMENT, MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
    try:
        while not (folder / sign).exists():
            assert started.poll() is None, (folder / "said.log").read_text()
            time.sleep(0.005)
        yield started
        started.wait(90)
        assert left_behind(mark) == ()
    finally:
        started.kill()
        started.wait()
        left_behind(mark)


RANKS = ["--standalone", "--nproc-per-node=2", SCRIPT]
AGENT = [*OURS.split(), *RANKS]


@pytest.mark.parametrize(
    ("first", "sent", "code"),
    [
        ("SIGUSR1", "SIGTERM", 143),
        left_out("SIGUSR2", "SIGHUP", 129),
        left_out(None, "SIGTERM", 143),
        left_out(None, "SIGINT", 130),
    ],
)
def test_a_signal_to_torchruns_agent_alone_saves_the_step_in_hand(
    first: str | None, sent: str, code: int, tmp_path: Path
) -> None:
    """If the first signal only asks to save, the run saves and steps on until the second signal ends it."""
    run = tmp_path / "run"
    with begun(AGENT, "run/metrics.jsonl", tmp_path) as agent:
        if first:
            agent.send_signal(signal.Signals[first])
            wait_until(lambda: (run / "checkpoints" / "latest").exists() or agent.poll() is not None, 60)
            wait_for_a_step(run, [agent], len(losses(run)) + 1)
            assert (run / "checkpoints" / "latest").exists()
        time.sleep(0.2)
        agent.send_signal(signal.Signals[sent])
    said = (tmp_path / "said.log").read_text()
    assert agent.returncode == code, said
    assert "Traceback" not in said
    assert Saving(run).whole_step(print) == len(losses(run)) > 0


@pytest.mark.exhaustive  # ``test_torchrun`` has a stopped process and a killed parent, without ranks
def test_the_other_rank_names_a_rank_that_is_stopped_under_torchrun(tmp_path: Path) -> None:
    words = ["torch.distributed.run", *RANKS]
    with begun(words, "run/metrics.jsonl", tmp_path, "--timeout", "15") as agent:
        children = psutil.Process(agent.pid).children()
        (rank,) = (child for child in children if child.environ().get("RANK") == "1")
        rank.suspend()
    said = (tmp_path / "said.log").read_text()
    assert agent.returncode == 1, said
    assert "error: rank 0 of 2 got no answer from rank 1, which is stopped (SIGSTOP)" in said


@pytest.mark.exhaustive
def test_ranks_end_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with begun(AGENT, "run/metrics.jsonl", tmp_path) as agent:
        agent.kill()


@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("moment", [0.0, 0.4])
def test_a_signal_while_ranks_start_ends_the_command_at_once(
    moment: float, sent: str, code: int, tmp_path: Path
) -> None:
    with begun(["muon_tutorial", "train"], "run", tmp_path) as train:
        time.sleep(moment)
        os.killpg(train.pid, signal.Signals[sent])
    said = (tmp_path / "said.log").read_text()
    assert train.returncode == code, said
    run = tmp_path / "run"
    assert (Saving(run).whole_step(print) or 0) - len(losses(run)) in (0, 1)
    assert "Traceback" not in said
    assert "launch again" not in said


OTHER = """
import time
try:
    open("begun", "w").close()
    time.sleep(120)
except KeyboardInterrupt:
    open("saved", "w").close()
"""


def test_a_script_of_another_host_still_gets_ctrl_c_as_keyboard_interrupt(tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(OTHER)
    words = ["-m", "muon_tutorial", "torchrun", "--standalone", "--nproc-per-node=1", "host.py"]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=ENVIRONMENT) as agent:
        while not (tmp_path / "begun").exists():
            assert agent.poll() is None
            time.sleep(0.05)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(120) == 130
    assert (tmp_path / "saved").exists()
