"""A machine's figures in a lesson are measured, not guessed."""

from __future__ import annotations

import os

import torch

from muon_tutorial.learn.inputs import measure


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= measure.cores() <= (os.cpu_count() or 1)


def test_private_memory_grows_with_what_is_held() -> None:
    before = measure.private_bytes()
    held = torch.ones(16_000_000)
    assert measure.private_bytes() - before > held.nbytes / 2


def test_work_is_timed_and_the_first_run_does_not_count() -> None:
    value, seconds = measure.timed(lambda: "done")
    assert value == "done"
    assert seconds >= 0
    runs: list[int] = []
    assert measure.median_seconds(lambda: runs.append(1), 3) >= 0
    assert len(runs) == 4
