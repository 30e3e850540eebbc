"""Ranks that end badly on purpose, in every way, for the campaign's own tests. Does not import pytest."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from muon_tutorial.step import momentum
from scripts.lab.faults import in_rank
from scripts.lab.faults.case import STRUCK, Case, RankRecord


def a_broken_package(rank: int, case: Case, folder: str) -> RankRecord:
    """One rank multiplies every gradient by 1.5: nothing is raised, and the numbers are wrong."""
    right = momentum.momentum_update

    def wrong(buffer: torch.Tensor, grad: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(buffer, grad * 1.5, *rest)

    if rank == case.rank:
        vars(momentum)["momentum_update"] = wrong
    return in_rank.play(rank, case, folder)


def an_orphan(rank: int, case: Case, folder: str) -> RankRecord:
    """One rank leaves a detached process behind."""
    if rank == case.rank and os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    return RankRecord(rank, equal=True)


def an_abort(rank: int, case: Case, folder: str) -> None:
    """SIGABRT ends every rank except the guilty one."""
    if rank != case.rank:
        os.abort()
    time.sleep(30)


def a_hang(rank: int, case: Case, folder: str) -> RankRecord:
    """The fault happens, and all ranks go on only after twice the time limit."""
    if rank == case.rank:
        Path(folder, STRUCK).write_text(str(time.monotonic()))
    time.sleep(0.4)
    return RankRecord(rank, equal=True)


def a_bare_error(rank: int, case: Case, folder: str) -> RankRecord:
    """All ranks raise one of torch's own errors."""
    return RankRecord(rank, "index out of range", "IndexError", named=False)
