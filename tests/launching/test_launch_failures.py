"""If a rank breaks, launch() soon raises an error with the rank, its phase and the other ranks' texts."""

from __future__ import annotations

import os
import re
import time
from unittest.mock import Mock

import pytest

from muon_tutorial.errors import LaunchTimeoutError, RankFailedError
from muon_tutorial.launching import spawn, watch_ranks
from muon_tutorial.launching.launch import launch
from tests.launching import launch_ranks as ranks
from tests.launching.launch_traces import WITHIN, nothing_is_left


def failure_of(fault: str, timeout: float = 60.0) -> tuple[RankFailedError, float]:
    """Return the error of a launch whose third rank breaks, and the seconds from fault to report."""
    lines: list[str] = []
    with nothing_is_left(), pytest.raises(RankFailedError) as caught:
        launch(ranks.fail_with, 4, args=(fault,), timeout=timeout, output=lambda _, line: lines.append(line))
    taken = time.monotonic()
    begun = next(float(line.split()[-1]) for line in lines if line.startswith("fault at"))
    return caught.value, taken - begun


@pytest.mark.parametrize(
    ("fault", "headline"),
    [
        ("raise", "rank 2 of 4 raised ZeroDivisionError: a planted fault"),
        ("kill", "rank 2 of 4 was killed by SIGKILL"),
        ("sys.exit", "rank 2 of 4 raised SystemExit: leaving"),
        ("os._exit", "rank 2 of 4 ended with exit code 0 before its function returned"),
        ("download", "rank 2 of 4 raised RuntimeError: Connection reset by peer"),
        ("memory", "rank 2 of 4 raised RuntimeError: .*can't allocate memory"),
    ],
)
def test_the_rank_that_broke_comes_first(fault, headline) -> None:
    error, seconds = failure_of(fault)
    first, *rest = str(error).splitlines()
    assert re.match(headline, first)
    assert first.endswith("[in phase: dp gather · bucket 2]")
    assert error.rank == ranks.FAULTY
    assert "muon_tutorial/launching" not in str(error)
    others = [line for line in rest if line.startswith("  rank ")]
    assert [line[:9] for line in others] == ["  rank 0:", "  rank 1:", "  rank 3:"]
    assert all("[in phase: dp gather · bucket" in line for line in others)
    assert seconds < WITHIN
    if fault == "kill":
        assert launch(ranks.total, 4) == [6.0] * 4  # the next launch is not affected
    if fault == "raise":
        assert 'raise ZeroDivisionError("a planted fault")' in str(error)
        assert isinstance(error.original, ZeroDivisionError)


@pytest.mark.parametrize(
    ("fault", "headline"),
    [
        ("stop", r"rank 2 of 4 was stopped \(SIGSTOP\) and did not go on within 1 s"),
        ("spin", r"rank 2 of 4 kept the others waiting for more than 1 s"),
        ("hold the GIL", r"rank 2 of 4 "),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named(fault, headline) -> None:
    error, seconds = failure_of(fault, timeout=1.0)
    assert re.match(headline, str(error))
    assert seconds < 1.0 + WITHIN
    if fault == "spin":
        assert re.search(r"It was at File .*launch_ranks.py\", line \d+, in _spin: time.sleep", str(error))


@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_that_wait_for_messages_are_not_blamed(in_background: bool) -> None:
    with nothing_is_left(), pytest.raises(RankFailedError) as caught:
        launch(ranks.exchange, 3, args=(in_background,), timeout=1.0, output="quiet")
    first, *rest = str(caught.value).splitlines()
    assert re.match(r"rank 2 of 3 kept the others waiting for more than 1 s", first)
    others = [line for line in rest if line.startswith("  rank ")]
    assert len(others) == 2
    assert all("[in phase: swap]" in line for line in others)


def test_a_rank_that_returned_while_the_others_waited_is_named() -> None:
    with nothing_is_left(), pytest.raises(RankFailedError) as caught:
        launch(ranks.return_early, 4, timeout=1.0)
    assert str(caught.value).startswith("rank 2 of 4 returned while the others still waited for it")
    assert caught.value.rank == ranks.FAULTY


@pytest.mark.parametrize(
    ("how", "asked"),
    [("shape", r"ALLREDUCE of \[6\] Float"), ("dtype", r"ALLREDUCE of \[4\] Int"), ("order", "BROADCAST")],
)
def test_the_rank_that_asked_differently_is_named(monkeypatch, how, asked) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    said = f"requests do not match: rank 2 asked for {asked}"
    with nothing_is_left(), pytest.raises(RankFailedError, match=said):
        launch(ranks.ask_differently, 4, args=(how,))


def test_ranks_that_wait_for_each_other_are_not_blamed() -> None:
    with nothing_is_left(), pytest.raises(RankFailedError, match="no rank crashed"):
        launch(ranks.wait_on_two_groups, 2)


def test_a_run_past_its_limit_is_ended() -> None:
    with nothing_is_left(), pytest.raises(LaunchTimeoutError, match=r"limit of 0\.5 s") as caught:
        launch(ranks.hang, 3, args=(2,), limit=0.5, timeout=60.0, output="quiet")
    assert "rank 0: running at" in str(caught.value)
    assert "rank 1: waiting for the others at" in str(caught.value)
    assert "rank 2: stopped (SIGSTOP)" in str(caught.value)


def test_a_spawned_rank_that_breaks_is_named_too() -> None:
    said = "rank 2 of 3 was killed by SIGKILL"
    with nothing_is_left(), pytest.raises(RankFailedError, match=said) as caught:
        launch(ranks.fail_with, 3, args=("kill",), method="spawn", output="quiet")
    assert "[in phase: dp gather · bucket 2]" in str(caught.value)


def test_a_spawned_rank_that_ends_between_two_looks_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look the rank exists; at the second look it is no longer a child."""
    looks = iter([None, 3])
    child = Mock(pid=os.getpid(), poll=lambda: next(looks))  # no child of this process
    assert spawn._state(0, child, None).exit_code == 3


def test_a_stopped_rank_gets_no_more_than_the_timeout_if_no_other_runs(monkeypatch) -> None:
    monkeypatch.setattr(watch_ranks, "_REVIVING", 3000.0)
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 was stopped \(SIGSTOP\) .* within 1 s"):
        launch(ranks.stop_the_last, 2, timeout=1.0, limit=300.0)  # a busy machine takes long to start
