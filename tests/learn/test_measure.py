"""A machine's figures in a lesson are measured, not guessed."""

from __future__ import annotations

import torch

from muon_tutorial.learn.inputs import measure


def test_private_memory_grows_with_what_is_held() -> None:
    def growth() -> float:
        before = measure.private_bytes()
        held = torch.ones(16_000_000)
        return (measure.private_bytes() - before) / held.nbytes

    assert max(growth() for _ in range(5)) > 0.5  # meanwhile the system may take other pages away
