"""Exercises of lesson 14: an unseen grid, a ring that leaves its node, and a quiz."""

from __future__ import annotations

import math
from typing import Any

from ..exercises.judge import Exercise, beside, guesses, numbers, why
from .scaling import RANKS, UNSEEN, gradient_wire, step_at, steps

SPOILERS = beside(idle=288, shrinks=r"1(?!\d)", slower=True, sooner="neither")


def unseen() -> dict[str, Any]:
    """The planner's numbers for the model that was not shown: the answers to the first prediction."""
    fewer, more, most = (step_at(UNSEEN, ranks) for ranks in (2048, 4096, RANKS[-1]))
    return {
        "idle": more.idle_owners,
        "shrinks": round(fewer.busiest / more.busiest, 2),
        "slower": most.seconds() > more.seconds(),
    }


def unseen_exercise() -> Exercise:
    """The prediction for a grid that no picture has shown."""
    right = unseen()
    fewer = "Each matrix has its own owner now. Which is the busiest, and has it less to do than before?"
    slower = "Newton–Schulz stays, and so do the bytes a rank sends. What grows with the ranks?"
    return guesses(
        ("idle", right["idle"], "A matrix has one owner. How many owners are there, and how many matrices?"),
        ("shrinks", right["shrinks"], fewer),
        ("slower", right["slower"], slower),
        praise="From here on, each new owner stands idle.",
        within=0.01,
    )


def wires() -> str:
    """The grid whose gradients are reduced sooner: the answer to the second prediction."""
    alone, with_tp = (gradient_wire(UNSEEN, 64, tp)[2] for tp in (1, 8))
    if math.isclose(alone, with_tp, rel_tol=0.01):
        return "neither"
    return "tp=1" if alone < with_tp else "tp=8"


def wires_exercise() -> Exercise:
    """The prediction: on which of two grids are gradients reduced sooner, if rings leave their node?"""

    def judge(sooner: str) -> str | None:
        if sooner == wires():
            return None
        return why(
            (sooner not in ("tp=1", "tp=8", "neither"), 'Say "tp=1", "tp=8" or "neither".'),
            (sooner == "tp=8", "An eighth of the bytes, yes. But how many network cards has each ring?"),
            otherwise="Eight cards for one ring, yes. But how many bytes does each rank send now?",
        )

    return Exercise(judge, (), "Eight rings share the cards that one ring had, and also its bytes.")


def quiz() -> Exercise:
    found = steps()
    return numbers(
        ("idle", found[-1].idle_owners, "Ask lesson.steps()[-1].idle_owners."),
        ("floor", 1000 * found[-1].floor, "In milliseconds: 1000 * lesson.steps()[-1].floor."),
        ("latency", found[-1].latency / found[0].latency, "Divide the last latency by the first."),
        within=0.02,
    )


def all_exercises() -> tuple[Exercise, ...]:
    return unseen_exercise(), wires_exercise(), quiz()
