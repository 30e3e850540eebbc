"""Exercises of lesson 14: an unseen grid, a ring that leaves its node, and a quiz."""

from __future__ import annotations

import math
from typing import Any

from ..exercises.judge import Exercise, numbers
from .scaling import RANKS, UNSEEN, gradient_wire, step_at, steps

SPOILERS = {
    "idle": [r"idle\s+–\s+288"],
    "shrinks": [r"shrinks\s+–\s+1(?!\d)"],
    "slower": [r"slower\s+–\s+True"],
    "sooner": [r"sooner\s+–\s+neither"],
}
"""What would answer each prediction of the notebook."""


def unseen() -> dict[str, Any]:
    """What the planner says of the model that was not shown: the answers of the first prediction."""
    fewer, more, most = (step_at(UNSEEN, ranks) for ranks in (2048, 4096, RANKS[-1]))
    return {
        "idle": more.idle_owners,
        "shrinks": round(fewer.busiest / more.busiest, 2),
        "slower": most.seconds() > more.seconds(),
    }


def unseen_exercise() -> Exercise:
    """The prediction of a grid that no picture has shown."""
    right = unseen()
    why = {
        "idle": "A matrix has one owner. How many owners are there, and how many matrices?",
        "shrinks": "With an owner for each matrix, who is the busiest, and has it less to do than before?",
        "slower": "Newton–Schulz stays, and so do the bytes a rank sends. What grows with the ranks?",
    }

    def judge(*said: Any) -> str | None:
        wrong = [
            f"{name}: not {mine}. {why[name]}"
            for name, mine in zip(right, said, strict=True)
            if not _agrees(mine, right[name])
        ]
        return " ".join(wrong) or None

    return Exercise(judge, (), "From here on, each new owner stands idle.")


def _agrees(mine: Any, right: Any) -> bool:
    if isinstance(right, bool):
        return mine is right
    try:
        return math.isclose(mine, right, rel_tol=0.01)
    except TypeError:
        return False


def wires() -> str:
    """Which grid's gradients are reduced sooner: the answer of the second prediction."""
    alone, with_tp = (gradient_wire(UNSEEN, 64, tp)[2] for tp in (1, 8))
    if math.isclose(alone, with_tp, rel_tol=0.01):
        return "neither"
    return "tp=1" if alone < with_tp else "tp=8"


def wires_exercise() -> Exercise:
    """The prediction of what becomes of a ring that leaves its node."""

    def judge(sooner: str) -> str | None:
        if sooner not in ("tp=1", "tp=8", "neither"):
            return 'Say "tp=1", "tp=8" or "neither".'
        if sooner == wires():
            return None
        if sooner == "tp=8":
            return "An eighth of the bytes, yes. But how many network cards does each ring have now?"
        return "Eight cards for one ring, yes. But how many bytes does each rank send now?"

    return Exercise(judge, (), "Eight rings share the cards that one had, and the bytes, too.")


def quiz() -> Exercise:
    """Numbers that the notebook has predicted."""
    found = steps()
    expected = {
        "idle": found[-1].idle_owners,
        "floor": 1000 * found[-1].floor,
        "latency": found[-1].latency / found[0].latency,
    }
    why = {
        "idle": "Ask lesson.steps()[-1].idle_owners.",
        "floor": "In milliseconds: 1000 * lesson.steps()[-1].floor.",
        "latency": "Divide the last step's latency by the first one's.",
    }
    return numbers(expected, why, within=0.02)


def all_exercises() -> tuple[Exercise, ...]:
    """The notebook's exercises in order: unseen, wires, quiz."""
    return (
        unseen_exercise(),
        wires_exercise(),
        quiz(),
    )


__all__ = [
    "SPOILERS",
    "all_exercises",
    "quiz",
    "unseen",
    "unseen_exercise",
    "wires",
    "wires_exercise",
]
