"""The functions on the way from ``Muon.step()`` to the last write, for a step after the first."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import muon_tutorial
from muon_tutorial import Muon, build_mesh, launch

ROOT = Path(muon_tutorial.__file__).parent
ANSWERING = ("worlds", "engine", "launching", "plan")
"""Packages whose functions answer the guard's requests (one per axis) before the first phase."""

LIMITS = {
    "functions": 74,
    "files": 20,
    "the guard's functions": 12,
    "functions before the first phase": 29,
}

Function = tuple[str, str]


def functions_of_a_step(strategy: str) -> list[Function]:
    """The package's functions that a second step calls, each once, in the order of their first calls."""
    torch.manual_seed(0)
    params = [(f"w{index}", nn.Parameter(torch.randn(8, 8))) for index in range(3)]
    muon = Muon(params, strategy=strategy, mesh=build_mesh({"dp": 2}))
    for _ in range(2):
        muon.zero_grad()
        torch.stack([param.square().sum() for _, param in params]).sum().backward()
        found: dict[Function, None] = {}

        def note(frame: FrameType, event: str, _: Any, found: dict[Function, None] = found) -> None:
            code = frame.f_code
            if event == "call" and ROOT in Path(code.co_filename).parents and code.co_name[0] != "<":
                name = getattr(code, "co_qualname", code.co_name)
                found[Path(code.co_filename).relative_to(ROOT).as_posix(), name] = None

        sys.setprofile(note)
        muon.step()
        sys.setprofile(None)
    return list(found)


def on_rank(rank: int, strategy: str) -> list[Function]:
    return functions_of_a_step(strategy)


@pytest.mark.parametrize("strategy", ["zero1", "owner"])
def test_a_step_is_short_to_read(strategy: str) -> None:
    for found in launch(on_rank, 2, args=(strategy,), timeout=60):
        first_phase = [name for _, name in found].index("step_bucket")
        before = [file for file, _ in found[:first_phase]]
        counts = {
            "functions": len(found),
            "files": len({file for file, _ in found}),
            "the guard's functions": len([file for file in before if not file.startswith(ANSWERING)]),
            "functions before the first phase": len(before),
        }
        assert {what for what, count in counts.items() if count > LIMITS[what]} == set(), (
            f"{counts}, at most {LIMITS}: a new check must call no more functions"
        )
