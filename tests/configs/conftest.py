"""What holds for the tests of configs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_torchs_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL the constructor of DistributedDataParallel on a group of backend
    "gloo" ends in a segmentation fault (torch 2.13, CPU), and everything takes twice as long."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
