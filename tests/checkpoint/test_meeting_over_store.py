"""Ranks that fail, stop or stay away while others wait. All ranks are told which rank it was, and why."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from muon_tutorial.checkpoint import (
    CheckpointManager,
    load_checkpoint,
    meeting_over_store,
    save_checkpoint,
    saving,
)
from muon_tutorial.checkpoint.meeting_over_store import Meeting
from muon_tutorial.errors import CheckpointError, RankFailedError
from muon_tutorial.launching.group_timeouts import group_timeout
from muon_tutorial.launching.launch import launch
from muon_tutorial.worlds.live import gather_objects

from ..configs.setups import error_of
from .models import assert_same_bits, bits, fresh, same, trained

TIMEOUT, STOPPED = 12.0, 8.0
"""Seconds that ranks wait for each other, and for a rank that is stopped on purpose."""
WRITE = saving.write_pieces


def meetings(size: int, timeout: float = TIMEOUT) -> list[Meeting]:
    """Meetings for threads that play the ranks; the store cannot tell the difference."""
    store = dist.HashStore()
    return [Meeting("id", "a test", rank, size, timeout, store) for rank in range(size)]


def together(meetings: list[Meeting], act: Callable[[Meeting], Any]) -> list[Any]:
    found: list[Any] = [None] * len(meetings)

    def run(place: int) -> None:
        try:
            found[place] = act(meetings[place])
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_rank_0_decides_with_what_all_have_made_and_each_gets_its_answer() -> None:
    def act(meeting: Meeting) -> Any:
        for stage in ("first", "second"):
            answer = meeting.agree(
                stage,
                lambda: (f"kept {meeting.rank}", meeting.rank),
                lambda found: [10 * its for its in found],
            )
        return answer

    ranks = meetings(3)
    assert together(ranks, act) == [("kept 0", 0), ("kept 1", 10), ("kept 2", 20)]
    assert ranks[0].store.num_keys() == 0


def test_a_rank_that_fails_is_blamed_by_the_others_and_nothing_is_decided() -> None:
    def act(meeting: Meeting) -> Any:
        def make() -> tuple[None, int]:
            if meeting.rank == 1:
                raise OSError(28, "No space left on device", "/x/file")
            return None, 1

        return meeting.agree("write", make, lambda found: pytest.fail("decided"))

    found = together(meetings(3), act)
    assert {str(error) for error in found} == {"rank 1: No space left on device: /x/file (a test)"}
    assert [type(error) for error in found] == [CheckpointError] * 3
    assert [error.rank for error in found] == [1, None, 1]
    assert isinstance(found[1].__cause__, OSError)


@pytest.mark.parametrize(
    ("error", "says", "guilty"),
    [
        (CheckpointError("they differ"), "they differ", None),
        (OSError("no space"), "rank 0: OSError: no space (a test)", 0),
    ],
)
def test_a_decision_that_fails_is_told_to_all(error: Exception, says: str, guilty: int | None) -> None:
    """The package's own errors blame no rank; any other error while rank 0 decides is blamed on rank 0."""

    def decide(found: list[int]) -> list[int]:
        raise error

    found = together(meetings(3), lambda meeting: meeting.agree("compare", lambda: (None, 1), decide))
    assert [str(each) for each in found] == [says] * 3
    assert [each.rank for each in found[1:]] == [guilty] * 2


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named_and_one_that_comes_late_is_told(absent: int) -> None:
    ranks = meetings(3, timeout=0.3)
    decided: list[int] = []

    def act(meeting: Meeting) -> Any:
        def decide(found: list[None]) -> list[None]:
            decided.append(meeting.rank)
            return found

        return meeting.agree("write its files", lambda: (None, None), decide)

    here = [meeting for meeting in ranks if meeting.rank != absent]
    found = together(here, act)
    assert {str(error) for error in found} == {f"rank {absent} did not write its files within 0.3 s (a test)"}
    assert [error.rank for error in found] == [absent] * 2
    [late] = together([ranks[absent]], act)
    assert isinstance(late, CheckpointError)
    assert decided == []


def test_a_rank_0_that_is_lost_while_it_decides_is_named() -> None:
    let_go = threading.Event()

    def act(meeting: Meeting) -> Any:
        def decide(found: list[None]) -> list[None]:
            let_go.wait(60)
            return found

        try:
            return meeting.agree("write", lambda: (None, None), decide)
        finally:
            let_go.set()

    found = together(meetings(2, timeout=0.3), act)
    late = "rank 0, which decides for all ranks, did not write within 0.3 s (a test), but may still decide"
    assert str(found[1]) == late


def test_a_store_that_fails_is_a_named_error(tmp_path: Path) -> None:
    class Full:
        def set(self, key: str, value: bytes) -> None:
            raise dist.DistStoreError("no space")

    meeting = Meeting("id", "a test", 1, 2, TIMEOUT, Full())
    with pytest.raises(CheckpointError, match="the ranks' store failed: DistStoreError: no space"):
        meeting.agree_that("write", lambda: None)


def test_an_error_can_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("one line", 3)))
    assert (str(error), error.rank) == ("one line", 3)


# --- real ranks ---------------------------------------------------------------------------------------------


def patch_write(write: Any) -> None:
    """Replace the function with which this rank writes its files."""
    saving.write_pieces = write


def full_disk(*args: Any) -> Any:
    """Write under a file size limit of a few bytes. The system's error is like that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
    try:
        return WRITE(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def raising(*_: Any) -> Any:
    raise ZeroDivisionError("of a hook")


def stopping(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return WRITE(*args)


def faults(rank: int, root: str) -> dict[str, Any]:
    """Each rank's errors while rank 1 has one fault after another. A good checkpoint is saved first."""
    folder, pair = Path(root, "a"), trained(3)
    save_checkpoint(folder, *trained(2))

    def save() -> None:
        save_checkpoint(folder, *pair, existing="replace")

    pids = gather_objects(os.getpid())
    told: dict[str, Any] = {}
    for name, write in {"full": full_disk, "raises": raising, "stopped": stopping}.items():
        patch_write(write if rank == 1 else WRITE)
        meeting_over_store.group_timeout = Mock(return_value=STOPPED if name == "stopped" else TIMEOUT)
        told[name] = error_of(save)
    meeting_over_store.group_timeout = group_timeout
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    patch_write(WRITE)
    told["listing"] = sorted(os.listdir(root))
    # The group still works, and the old checkpoint is still there.
    dist.barrier()
    other = fresh()
    load_checkpoint(folder, *other)
    told["old stands"] = same(bits(*other), bits(*trained(2)))
    save()
    load_checkpoint(folder, *other)
    told["saved at last"] = same(bits(*other), bits(*pair))
    told["threaded"] = in_a_thread(rank, Path(root, "run"))
    return told


def in_a_thread(rank: int, folder: Path) -> tuple[str, str]:
    """This rank's error if rank 1's saving thread fails while the main threads go on with collectives."""
    manager = CheckpointManager(folder)
    manager.save(1, *trained(1))
    patch_write(raising if rank == 1 else WRITE)
    pending = manager.save(2, *trained(2), wait=False)
    for _ in range(50):
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
    told = error_of(pending.wait)
    patch_write(WRITE)
    assert manager.latest_step() == 1
    manager.save(2, *trained(2), wait=False).wait()
    other = fresh()
    manager.load(*other)
    assert_same_bits(other[0], trained(2)[0])
    return told


def test_every_rank_is_told_which_one_failed_and_why(tmp_path: Path) -> None:
    first, second = launch(faults, 2, args=(str(tmp_path),), timeout=TIMEOUT)
    for told in (first, second):
        assert told["full"] == ("CheckpointError", first["full"][1])
        assert told["full"][1].startswith("rank 1: File too large")
        assert told["raises"] == ("CheckpointError", "rank 1: ZeroDivisionError: of a hook (save_checkpoint)")
        assert told["stopped"][0] == "CheckpointError"
        assert told["stopped"][1] == f"rank 1 did not write its files within {STOPPED:g} s (save_checkpoint)"
        assert told["old stands"]
        assert told["saved at last"]
        assert told["threaded"][1].startswith("rank 1: ZeroDivisionError")
    assert first["listing"] == ["a"]


def stop_while_writing(rank: int, folder: str) -> None:
    patch_write(stopping if rank == 1 else WRITE)
    save_checkpoint(folder, *trained(1))


def test_a_launch_names_the_rank_that_stopped(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(stop_while_writing, 3, args=(str(tmp_path / "a"),), timeout=5.0, output="quiet")
    assert caught.value.rank == 1
    assert str(caught.value).splitlines()[0].startswith("rank 1 of 3")
    assert "save_checkpoint · write its files" in str(caught.value)
    assert os.listdir(tmp_path) == []
