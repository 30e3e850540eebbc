"""An agent that cannot go on says why in one line, without torch's traceback."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from muon_tutorial.launching.start_torchrun import run_agent


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
