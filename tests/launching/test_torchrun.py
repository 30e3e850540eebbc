"""Ranks under torchrun end with it, meet again after a restart, and name the rank they wait for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from muon_tutorial import cli
from muon_tutorial.errors import LaunchError, UsageError
from muon_tutorial.launching import join_torchrun
from muon_tutorial.launching.stopped_peers import Peers
from tests.launching.launch_traces import WITHIN, free_port, still_running

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("torchrun_rank.py"))


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_restarted_ranks_meet_with_a_timeout_and_a_killed_one_was_named_in_one_line() -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*start, "--max-restarts=1", SCRIPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agent = subprocess.run(words, env=ENVIRONMENT, timeout=100, check=False, **pipes)  # type: ignore[call-overload]
    said = agent.stdout
    assert agent.returncode == 0, said
    assert said.count("attempt 0 sum 2") == said.count("attempt 1 sum 2") == 2
    assert said.count("{60.0} True True parent watch") == 4, said
    assert "exitcode: -9) local_rank: 1" in said  # from torchrun's own report
    assert "Traceback" not in said


def test_a_killed_rank_of_a_static_rendezvous_ends_both_agents_in_one_line_each() -> None:
    start = [sys.executable, "-m", "muon_tutorial", "torchrun", "--nnodes=2", "--nproc-per-node=1"]
    start += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = [
        subprocess.Popen(
            [*start, f"--node-rank={node}", SCRIPT],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        for node in range(2)
    ]
    try:
        first, second = (agent.communicate(timeout=100)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [1, 128 + signal.SIGKILL], first + second
    assert "error: rank 0 ended with exit code 1; it was the first to fail" in first.splitlines()
    assert "error: rank 1 was killed by SIGKILL; it was the first to fail" in second.splitlines()
    assert "Traceback" not in first + second


CHILD = """
import os, signal
from muon_tutorial.launching.end_with_parent import end_with_parent
end_with_parent("its parent ended")
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.{})
signal.pause()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("state", ["SIGCONT", "SIGSTOP"])
def test_a_process_ends_with_its_parent_also_if_it_is_stopped(state: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [sys.executable, "-c", PARENT, CHILD.format(state)]
    with subprocess.Popen(words, cwd=ROOT, **pipes) as parent:  # type: ignore[call-overload]
        child = psutil.Process(int(parent.stdout.readline()))
        while state == "SIGSTOP" and child.status() != psutil.STATUS_STOPPED:
            time.sleep(0.02)
        parent.kill()
        assert parent.stdout.read() == "its parent ended\n"
    assert not still_running([child.pid], WITHIN)


SEAT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
TWO_MACHINES = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_whose_agent_ended_before_it_joined_does_not_wait(rank, monkeypatch, capfd) -> None:
    """On several machines, rank 0 first says how ranks could restart under torch's own torchrun."""
    monkeypatch.setattr(join_torchrun, "end_with_parent", lambda says: None)
    monkeypatch.setattr(join_torchrun, "let_new_groups_time_out", lambda seconds: None)
    monkeypatch.delenv(join_torchrun.OWN_STORE, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # the port is in use, but nothing listens
        own = {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "1"}
        for name, value in {**SEAT, **TWO_MACHINES, **own, **elastic}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match=f"torchrun's agent ended before rank {rank} joined it"):
            join_torchrun.join_torchrun()
    assert capfd.readouterr().err == ("" if rank == "1" else f"{join_torchrun.RESTARTS_FAIL}\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "abc"),
        ("RANK", "3"),
        ("RANK", "-1"),
        ("LOCAL_RANK", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "9" * 5000),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_one_line(name, value, monkeypatch, capsys) -> None:
    for key, own in {**SEAT, name: value}.items():
        monkeypatch.setenv(key, own)
    says = "torchrun's environment variables are damaged or contradict each other: {'RANK': '"
    with pytest.raises(UsageError, match=says):
        join_torchrun.join_torchrun()
    assert cli.main(["train"]) == cli.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert len(line) < 400


def test_ranks_that_do_not_meet_say_so_in_one_line() -> None:
    with pytest.raises(LaunchError) as caught, join_torchrun._meeting(1, 2):
        raise torch.distributed.DistNetworkError("The client socket has timed out\nException raised from …")
    assert str(caught.value) == "rank 1 of 2 did not meet the others: The client socket has timed out"
    with pytest.raises(LaunchError, match="ended before"), join_torchrun._meeting(1, 2):
        raise LaunchError("torchrun's agent ended before rank 1 joined it")


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 0.0, -1.0, "30"])
def test_a_wrong_timeout_is_refused(timeout) -> None:
    with pytest.raises(UsageError, match="positive number of seconds"):
        join_torchrun.join_torchrun(timeout=timeout)


LOGS = "/t/7_b/attempt_1/0/error.json"


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({}, []),
        ({"TORCHELASTIC_RUN_ID": "7"}, ["7"]),
        ({"TORCHELASTIC_RUN_ID": "none"}, []),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": LOGS}, ["7_b"]),
        ({"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_ERROR_FILE": LOGS}, ["7_b"]),
        ({"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_ERROR_FILE": ""}, ["7"]),
        ({"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_ERROR_FILE": LOGS, **TWO_MACHINES}, ["7", "7_b"]),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": LOGS, **TWO_MACHINES}, ["7_b"]),
    ],
)
def test_a_job_is_named_by_what_outlives_its_ranks_and_no_other_job_shares(said, names, monkeypatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert join_torchrun.names_of_job([join_torchrun.agent_name()]) == names


@pytest.mark.parametrize("state", ["has ended", "is stopped (SIGSTOP)"])
def test_a_rank_that_misses_another_says_which_and_lets_it_go_on(state, capfd, monkeypatch) -> None:
    """A stopped rank must be continued, or else it would not react to torchrun's SIGTERM."""
    monkeypatch.setattr(join_torchrun, "_has_missed_rank", False)  # restored after the test
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        peer = psutil.Process(process.pid)
        process.send_signal(signal.SIGKILL if state == "has ended" else signal.SIGSTOP)
        while peer.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            time.sleep(0.02)
        joined = join_torchrun.TorchrunEnvironment(0, 2, Peers({1: process.pid}))
        assert not joined.report_lost_rank(RuntimeError("a bug"))
        assert joined.report_lost_rank(RuntimeError("[/gloo/pair.cc:5] Connection closed by peer [::1]:5"))
        assert peer.status() != psutil.STATUS_STOPPED
        process.kill()
    words = f"no answer from rank 1, which {state}: Connection closed by peer [::1]:5"
    assert capfd.readouterr().err == f"error: rank 0 of 2 got {words}\n"
