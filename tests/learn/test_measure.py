"""A machine's figures in a lesson are measured, not guessed."""

from __future__ import annotations

import torch

from muon_tutorial.learn.inputs import measure


def test_private_memory_grows_with_what_is_held() -> None:
    before = measure.private_bytes()
    held = [torch.ones(16_000_000) for _ in range(4)]  # one tensor may fit into freed memory of the process
    assert measure.private_bytes() - before > sum(it.nbytes for it in held) / 2
