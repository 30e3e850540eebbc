"""Lesson 13 on real ranks: all wait for one. This file is separate, as recording imports drawing code."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ... import Muon, build_mesh
from ...evidence.traces.recording import RankRecorder, record
from ...evidence.traces.time_split import Timeline

SIDE = 1024


def step_late(rank: int, recorder: RankRecorder, ranks: int, steps: int, seed: int) -> None:
    """Take steps of ``round_robin`` and record all but the first. Rank 0's matrix is by far the largest."""
    torch.manual_seed(seed)
    sides = [SIDE, *[SIDE // 8] * (ranks - 1)]
    params = [(f"matrix {i}", torch.nn.Parameter(torch.randn(side, side))) for i, side in enumerate(sides)]
    muon = Muon(params, strategy="round_robin", mesh=build_mesh({"dp": ranks}))
    muon.world.observers.append(recorder)  # type: ignore[union-attr]
    for _, param in params:
        param.grad = torch.randn_like(param)
    muon.step()
    with recorder:
        for _ in range(steps):
            muon.step()


def record_late(ranks: int, steps: int, seed: int, backend: str = "gloo") -> Timeline:
    """Record ``step_late`` on real ranks, which share one clock."""
    with TemporaryDirectory() as folder:
        arguments = (ranks, steps, seed)
        run = record(step_late, ranks, Path(folder), args=arguments, backend=backend, output="quiet")
        return run.timeline
