"""A scheduler's signal to torchrun's agent, and Ctrl-C while ranks start; the lab sends more signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import muon_tutorial
from scripts.lab.faults.preempted import preempt

from ..exhaustive import left_out

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a run in /proc"),
]


@pytest.mark.parametrize(
    ("sent", "code"), [("SIGTERM", 143), left_out("SIGHUP", 129), left_out("SIGINT", 130)]
)
def test_a_signal_to_torchruns_agent_alone_saves_the_step_in_hand(
    sent: str, code: int, tmp_path: Path
) -> None:
    seen = preempt("torchrun", 2, "metrics.jsonl", 0.2, sent, "it", tmp_path)
    assert (seen.code, seen.tracebacks, seen.orphans) == (code, 0, ()), seen
    assert seen.saved == seen.steps > 0


@pytest.mark.parametrize("moment", [0.0, 0.4])
def test_ctrl_c_while_ranks_start_ends_the_command_with_130(moment: float, tmp_path: Path) -> None:
    seen = preempt("launch", 2, ".", moment, "SIGINT", "its group", tmp_path)
    assert (seen.code, seen.tracebacks, seen.orphans) == (130, 0, ()), seen
    assert "launch again" not in seen.words


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
    environment = {**os.environ, "PYTHONPATH": str(Path(muon_tutorial.__file__).parents[1])}
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment) as agent:
        while not (tmp_path / "begun").exists():
            assert agent.poll() is None
            time.sleep(0.05)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(120) == 130
    assert (tmp_path / "saved").exists()
