"""Torchrun starts with a time limit; an agent that fails says why in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from muon_tutorial.errors import LaunchError
from muon_tutorial.launching.start_torchrun import run_agent, start_torchrun, torchrun_words

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def test_a_job_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(LaunchError, match=r"exit code 1:[\s\S]*no such luck|no such luck"):
        start_torchrun(torchrun_words("job.py", 1, 0, []), tmp_path, limit=110)
    assert list(tmp_path.glob("torchelastic_*"))  # not in the shared temporary folder


def test_a_job_past_its_limit_is_ended(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time; time.sleep(600)")
    with pytest.raises(LaunchError, match=r"did not end within 0\.5 s"):
        start_torchrun(torchrun_words("job.py", 1, 0, []), tmp_path, limit=0.5)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RendezvousClosedError(), 1, "another agent has ended the job, so this one cannot start its ranks"),
        (RendezvousConnectionError("a\nb"), 1, "the agent at --rdzv-endpoint does not answer"),
        (RuntimeError("a\nb"), 1, "torchrun's agent ended: RuntimeError: a b"),
        (ValueError("no number: x"), 2, "torchrun's agent ended: ValueError: no number: x"),
    ],
)
def test_an_agent_whose_job_has_ended_says_so_in_one_line(error, code, line, monkeypatch, capsys) -> None:
    def end(options: object) -> None:
        raise error

    monkeypatch.setattr("torch.distributed.run.run", end)
    monkeypatch.setattr("signal.signal", lambda number, heed: None)
    assert run_agent(["--standalone", "job.py"]) == code
    assert capsys.readouterr().err == f"error: {line}\n"
