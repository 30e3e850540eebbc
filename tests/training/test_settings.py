"""Suggested settings work, and the learning rate follows its schedule; ``test_cli`` tests what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muon_tutorial.training.lr_schedule import lr_share
from muon_tutorial.training.settings import TrainSettings


def test_a_suggested_width_and_batch_work() -> None:
    assert replace(TrainSettings(), heads=3, tp=1, width=126).width == 126
    assert replace(TrainSettings(), dp=3, batch=33).world_size == 6


@pytest.mark.parametrize("steps", [1, 2, 10, 41])
def test_the_learning_rate_warms_up_to_its_peak_and_then_falls_to_near_a_tenth(steps: int) -> None:
    assert lr_share(99, 100) == pytest.approx(0.11)
    shares = [lr_share(step, steps) for step in range(steps)]
    peak = shares.index(max(shares))
    assert max(shares) == 1.0
    assert all(0 < share <= 1 for share in shares)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
