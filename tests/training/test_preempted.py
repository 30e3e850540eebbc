"""A scheduler's signal to torchrun's agent, and Ctrl-C while ranks start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import muon_tutorial
from muon_tutorial.training.checkpoints import Saving
from scripts.lab.faults.processes import MARK, left_behind

from ..exhaustive import left_out
from ..launching.launch_traces import heed_interrupts
from .runs import MODEL, OURS, SCRIPT, losses

CHECKOUT = str(Path(muon_tutorial.__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1"}
JOB = (*MODEL, "--dp", "2", "--steps", "100000", "--timeout", "30", "--out", "run")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a run in /proc"),
]


def preempt(
    words: Sequence[str], begun: Path, moment: float, sent: str, to_group: bool, folder: Path
) -> tuple[int, str]:
    """Start a run, and send a signal ``moment`` seconds after ``begun`` exists, to it or to its group.

    Returns the exit code and what it wrote to stderr; it must leave no process behind.
    """
    mark = f"preempted-{os.getpid()}"
    with open(folder / "said", "wb") as said:
        started = subprocess.Popen(
            [sys.executable, "-m", *words, *JOB],
            cwd=folder,
            env={**ENVIRONMENT, MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
    try:
        while not begun.exists():
            assert started.poll() is None, (folder / "said").read_text()
            time.sleep(0.005)
        time.sleep(moment)
        (os.killpg if to_group else os.kill)(started.pid, signal.Signals[sent])
        code = started.wait(90)
    finally:
        started.kill()
        started.wait()
        orphans = left_behind(mark)
    assert orphans == ()
    return code, (folder / "said").read_text()


@pytest.mark.parametrize(
    ("sent", "code"), [("SIGTERM", 143), left_out("SIGHUP", 129), left_out("SIGINT", 130)]
)
def test_a_signal_to_torchruns_agent_alone_saves_the_step_in_hand(
    sent: str, code: int, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", [*OURS.split(), "--standalone", "--nproc-per-node=2", SCRIPT]
    ended, said = preempt(words, run / "metrics.jsonl", 0.2, sent, False, tmp_path)
    assert ended == code, said
    assert "Traceback" not in said
    assert Saving(run).whole_step(print) == len(losses(run)) > 0


@pytest.mark.parametrize("moment", [0.0, 0.4])
def test_ctrl_c_while_ranks_start_ends_the_command_with_130(moment: float, tmp_path: Path) -> None:
    ended, said = preempt(["muon_tutorial", "train"], tmp_path / "run", moment, "SIGINT", True, tmp_path)
    assert ended == 130, said
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
