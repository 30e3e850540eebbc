"""launch(): return values, the ranks' environment, output, functions of every origin, and its arguments."""

from __future__ import annotations

import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from muon_tutorial.errors import LaunchError, RankFailedError, UsageError
from muon_tutorial.launching import run_files
from muon_tutorial.launching.fork_server import warm_server
from muon_tutorial.launching.join_torchrun import joined_by_torchrun
from muon_tutorial.launching.launch import launch
from muon_tutorial.launching.phase_and_line import report_phase
from tests.launching import launch_ranks as ranks
from tests.launching.launch_traces import nothing_is_left

PATIENCE = 60.0


def test_every_rank_returns_its_value_and_leaves_nothing() -> None:
    with nothing_is_left():
        assert launch(ranks.total, 4, args=(2.0,)) == [12.0] * 4
        assert launch(ranks.total, 2, kwargs={"scale": 3.0}) == [3.0] * 2
        assert launch(ranks.total, 1) == [0.0]


def test_large_values_travel_both_ways() -> None:
    x = torch.arange(1 << 20, dtype=torch.float32)
    for back in launch(lambda rank, x: x * 2, 2, args=(x,)):
        torch.testing.assert_close(back, x * 2, rtol=0, atol=0)


def test_ranks_live_where_their_launcher_does(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUTORIAL_TEST", "here")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    for seen in launch(ranks.surroundings, 2, threads=2):
        assert (seen["folder"], seen["variable"], seen["threads"]) == (str(tmp_path), "here", 2)
        assert not seen["torchrun"]
        assert seen["group"] == os.getpgrp()  # a notebook ends its ranks by ending its process group
        assert set(seen["path"]) >= set(map(os.path.abspath, sys.path))


def test_functions_of_any_kind_run_on_ranks() -> None:
    weights = torch.ones(3)

    def outer(rank: int) -> float:
        return inner(rank) + weights.sum().item()

    def inner(rank: int) -> int:
        return 10 * rank

    assert launch(outer, 2) == [3.0, 13.0]
    assert launch(lambda rank: rank + 1, 2) == [1, 2]
    assert launch(functools.partial(ranks.total, scale=2.0), 2) == [2.0, 2.0]


def test_lines_come_in_order_behind_their_rank_or_not_at_all(capsys) -> None:
    launch(ranks.chatter, 2, args=(50,))
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] line {number}" for number in range(50)]
    assert len(lines) == 100
    launch(ranks.chatter, 1, args=(3,), output="quiet")
    assert capsys.readouterr().out == ""


def test_a_flood_is_cut_in_the_middle() -> None:
    seen: list[str] = []
    launch(ranks.chatter, 1, args=(100_000,), max_lines=5, output=lambda rank, line: seen.append(line))
    assert seen[:5] == [f"line {number}" for number in range(5)]
    assert seen[-1] == "line 99999"
    assert "99,985 lines not shown" in seen[5]
    assert len(seen) == 16


def test_progress_bars_and_unfinished_lines_are_shown_once() -> None:
    def redraw(rank: int) -> None:
        print("10%\r50%\r100%")
        os.write(1, b"half a line")  # written below Python's streams

    seen: list[str] = []
    launch(redraw, 1, output=lambda rank, line: seen.append(line))
    assert seen == ["100%", "half a line"]


def test_threads_may_launch_at_the_same_time() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda scale: launch(ranks.total, 2, args=(scale,)), range(4))
    assert list(found) == [[scale, scale] for scale in range(4)]


def test_a_rank_may_launch() -> None:
    def nest(rank: int) -> list[float]:
        return launch(ranks.total, 2, args=(10.0,)) if rank == 0 else []

    assert launch(nest, 2, timeout=60.0) == [[10.0, 10.0], []]


def test_launches_share_a_warm_server_which_is_replaced_when_it_is_lost() -> None:
    server = warm_server()
    assert server._child.poll() is None
    launch(ranks.total, 1)
    assert warm_server() is server
    server.close()
    assert launch(ranks.total, 2) == [1.0, 1.0]
    assert warm_server() is not server


def test_spawned_ranks_do_the_same(monkeypatch) -> None:
    monkeypatch.delattr(os, "waitid")  # as on macOS before Python 3.13
    seen: list[tuple[int, str]] = []

    def talk(rank: int) -> float:
        print("hello")
        return ranks.total(rank)

    assert launch(talk, 2, method="spawn", output=lambda *heard: seen.append(heard)) == [1.0, 1.0]
    assert sorted(seen) == [(0, "hello"), (1, "hello")]


def test_ranks_listen_on_loopback_alone() -> None:
    for addresses in launch(ranks.listeners, 2):
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}
    # A listener on all interfaces would be seen.
    assert set(launch(ranks.listeners, 1, args=(True,))[0]) & {"0.0.0.0", "::"}


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_every_group_has_the_timeout(monkeypatch, debug) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    for found, own in launch(ranks.timeouts, 4, timeout=17.0):
        assert len(found) == 4
        assert set(found.values()) == {17.0}
        assert own == {7.0}


def test_phases_cost_nothing_outside_a_launch() -> None:
    report_phase("nowhere")
    assert not joined_by_torchrun()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"fn": 3}, "a function to run"),
        ({"world_size": 0}, "at least 1 rank"),
        ({"world_size": 2.0}, "at least 1 rank"),
        ({"world_size": True}, "at least 1 rank"),
        ({"backend": "mpi"}, '"gloo" or "nccl"'),
        ({"backend": "nccl", "world_size": 1000}, "a GPU for each rank"),
        ({"timeout": 0}, "the timeout is a positive number of seconds"),
        ({"timeout": float("nan")}, "the timeout is a positive number of seconds"),
        ({"timeout": float("inf")}, "the timeout is a positive number of seconds"),
        ({"limit": float("nan")}, "the limit is a positive number of seconds"),
        ({"threads": "2"}, "at least 1 thread"),
        ({"threads": None}, "at least 1 thread"),
        ({"max_lines": "3"}, "max_lines must be an integer of at least 0"),
        ({"max_lines": -1}, "max_lines must be an integer of at least 0"),
        ({"args": "ab"}, "args is a tuple"),
        ({"kwargs": [1]}, "kwargs is a dict"),
        ({"kwargs": {1: 2}}, "kwargs is a dict"),
        ({"method": "frok"}, 'the method is "fork" or "spawn"'),
        ({"output": "loud"}, "a function of"),
    ],
)
def test_a_call_that_cannot_work_is_refused(call, says) -> None:
    with pytest.raises(UsageError, match=says):
        launch(**{"fn": ranks.total, "world_size": 2, **call})


def test_a_child_that_the_function_forks_does_not_speak_for_the_rank() -> None:
    (child_ended,) = launch(ranks.fork, 1, limit=PATIENCE)
    assert child_ended


def test_a_working_directory_that_is_gone_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="working directory no longer exists"):
        launch(ranks.total, 1)


def test_too_few_descriptors_are_told() -> None:
    resource = pytest.importorskip("resource")
    launch(ranks.total, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # files that are open stay open
    try:
        with pytest.raises(LaunchError, match="4 ranks need more files open at once"):
            launch(ranks.total, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert launch(ranks.total, 2) == [1.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_machine_that_hides_proc_is_told_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_files, "_OPEN_FILES", str(tmp_path / "proc/self/fd"))
    with pytest.raises(LaunchError, match="/proc is hidden or not mounted, and ranks need it: mount -t proc"):
        launch(ranks.total, 1)


def test_values_that_cannot_be_sent_are_named() -> None:
    in_place, moved = ".*; create it inside the function", ".*; move it to a module"
    with pytest.raises(UsageError, match=r"argument 0 of total\(\), a generator, " + in_place):
        launch(ranks.total, 1, args=((number for number in range(3)),))
    lock = threading.Lock()

    def helper() -> None:
        lock.acquire()

    def guarded(rank: int) -> None:
        helper()

    with pytest.raises(UsageError, match=r"the enclosed variable 'lock' of helper\(\), a lock, " + in_place):
        launch(helper, 1)
    with pytest.raises(UsageError, match=r"'helper' of guarded\(\), a function, " + moved):
        launch(guarded, 1)
    with pytest.raises(RankFailedError, match="the value returned, a generator, cannot be sent"):
        launch(lambda rank: (number for number in range(rank)), 1)
