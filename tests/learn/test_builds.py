"""Builds without a stub: the test in the lesson accepts a solution, and says what is wrong with others."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from muon_tutorial import LaunchError

HERE = Path(__file__).resolve().parent
LESSONS = HERE.parents[1] / "notebooks" / "src"
PRINTED = {
    "ring": "all of them, on every ring that was tried",
    "zero3": "the weights of one process, a part of them on each rank",
    "pipeline": "3 ranks, 6 micro-batches: idle ",
}
"""What the lesson's test prints at last."""
WRONG = {
    "an all_gather that leaves pieces in order of arrival": (
        "ring",
        ("for place in range(ranks)]\n\n\ndef reduce", "for place in pieces]\n\n\ndef reduce"),
        "all_gather",
    ),
    "torch's all_gather in place of the ring": (
        "ring",
        ("    pieces = {rank: piece}", "    dist.all_gather([], piece)\n    pieces = {rank: piece}"),
        "not callable",
    ),
    "whole weights on every rank": (
        "zero3",
        ("return Sharded(model)", "return model"),
        "a rank keeps too much",
    ),
    "gradients added up, and not averaged": ("zero3", ("part / len(flat)", "part"), "weights differ"),
    "weights kept from forward to backward": (
        "zero3",
        ("checkpoint(self.run, layer, shapes, x, use_reentrant=False)", "self.run(layer, shapes, x)"),
        "a whole weight waits for backward",
    ),
    "the last micro-batch alone": ("pipeline", ("in pairs:", "in pairs[-1:]:"), "the gradient of stage"),
    "a micro-batch goes back before the next one comes": (
        "pipeline",
        (
            "def step(stage, batches, rank, ranks):",
            "def step(stage, batches, *at):\n    for each in batches:\n        one(stage, [each], *at)\n\n\n"
            "def one(stage, batches, rank, ranks):",
        ),
        "only one rank computes at a time",
    ),
}


def run_build(build: str, solution: str) -> None:
    """Run the lesson's test of a build, with this text as the reader's file."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(LESSONS.glob("*.py")))
    blocks = re.findall(r"^# ```python\n(.*?)^# ```$", text, re.DOTALL | re.MULTILINE)
    (block,) = (it for it in blocks if f"import {build}  # yours" in it)
    reader = ModuleType(build)
    exec(solution, reader.__dict__)
    names: dict[str, Any] = {"__name__": "__main__", build: reader}
    exec(re.sub(r"^# ?| +import \w+  # yours.*", "", block, flags=re.MULTILINE), names)


@pytest.mark.parametrize("build", PRINTED)
def test_the_lessons_test_accepts_a_solution(build: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_build(build, (HERE / "builds" / f"{build}.py").read_text(encoding="utf-8"))
    assert capsys.readouterr().out.splitlines()[-1].startswith(PRINTED[build])


@pytest.mark.parametrize("slip", WRONG)
def test_the_lessons_test_says_what_is_wrong(slip: str) -> None:
    build, (old, new), says = WRONG[slip]
    right = (HERE / "builds" / f"{build}.py").read_text(encoding="utf-8")
    assert old in right
    with pytest.raises(LaunchError, match=says):
        run_build(build, right.replace(old, new))
