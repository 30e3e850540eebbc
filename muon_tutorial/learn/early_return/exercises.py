"""Exercises of lesson 12: a makespan, a loop that asks ahead, a missing wait, an order of gathers, a quiz.

Loops and programs are judged by what they do: in the timed world, and over real matrices.
"""

from __future__ import annotations

import re
from typing import Any

from ... import Grid
from ...worlds.local import LocalWorld
from ..exercises.judge import Diagnosis, Exercise, numbers
from ..pictures.picture import Picture
from .loops import Loop, LoopTimes, TimedLoop, first_wrong, one_by_one, prefetch, real_walks, time_loop
from .missing_wait import PROGRAM, RIGHT_LINE, RIGHT_TICKET, run_program, with_wait
from .pictures import draw_loops, draw_program

COUNT = 4
QUICK, SLOW = LoopTimes.alike(COUNT, 2, 3), LoopTimes.alike(COUNT, 5, 3)
TRIED = (
    (LoopTimes.alike(5, 2, 3), 1),
    (LoopTimes.alike(5, 2, 3), 2),
    (LoopTimes((9, 1, 1, 1, 9, 1), (4,) * 6), 3),
    (LoopTimes.alike(3, 5, 3), 6),
)
"""Times and windows that a loop is tried with."""

SPOILERS = {
    "one_at_a_time": [r"one_at_a_time\s+–\s+20"],
    "ahead_of_work": [r"ahead_of_work\s+–\s+14"],
    "slow_link": [r"slow_link\s+–\s+23"],
}
"""What would answer each prediction of the notebook."""


def makespans(ranks: int) -> dict[str, int]:
    """The answers of the prediction, by the timed world: milliseconds of three loops over four matrices."""
    loops: dict[str, tuple[Loop, LoopTimes, int]] = {
        "one_at_a_time": (one_by_one, QUICK, 1),
        "ahead_of_work": (prefetch, QUICK, 2),
        "slow_link": (prefetch, SLOW, 2),
    }
    return {name: round(time_loop(*given, ranks).milliseconds) for name, given in loops.items()}


def makespan_exercise(ranks: int) -> Exercise:
    """The prediction: how long three schedules take."""
    right = makespans(ranks)
    why = {
        "one_at_a_time": "Nothing overlaps: a gather and the work, then the next.",
        "ahead_of_work": "While it works on one matrix the next one comes. What is left to wait for?",
        "slow_link": "Now a gather takes longer than the work. Draw both lanes: which one is never idle?",
    }

    def judge(*said: Any) -> str | None:
        pairs = zip(right, said, strict=True)
        return next((f"{name}: not {mine}. {why[name]}" for name, mine in pairs if mine != right[name]), None)

    return Exercise(judge, (), "The busier lane sets the pace; the other one only adds its first, or last.")


def prefetch_exercise(ranks: int, seed: int) -> Exercise:
    """A loop with a window, judged by time, by what it holds, and by bits."""

    def judge(loop: Loop) -> Diagnosis | None:
        for times, window in TRIED:
            if wrong := _judge_times(loop, times, window, ranks):
                return wrong
        return _judge_bits(loop, ranks, seed)

    return Exercise(judge, (), "Right bits, no gather too early, and none too late.", keeps=("prefetch",))


def _judge_times(loop: Loop, times: LoopTimes, window: int, ranks: int) -> Diagnosis | None:
    mine, due = time_loop(loop, times, window, ranks), time_loop(prefetch, times, window, ranks)
    count = len(times.work)
    where = f"{count} matrices, window {window}"
    if mine.watch.done != list(range(count)):
        said = f"{where}: your loop works on {mine.watch.done}; each of 0 to {count - 1} once, in order."
        return Diagnosis(said, ("How often does work run, and with which i?",))
    if mine.watch.held > window:
        said = (
            f"{where}: yours holds {mine.watch.held} at once, asked for and not done. Memory grows with it."
        )
        hints = (
            "Ask for matrix a only when a < i + window.",
            "Ask first, then wait and work: a gather that is asked for before work(i) counts beside i.",
        )
        return Diagnosis(said, hints, _beside(mine, due, where))
    if mine.milliseconds > due.milliseconds:
        said = f"{where}: yours takes {mine.milliseconds:g} ms; {due.milliseconds:g} are possible."
        hints = (
            "When you work on matrix i, which gathers are already under way? There may be window − 1.",
            "Keep the tickets in a list. Before you wait for matrix i, ask for all up to i + window − 1.",
        )
        return Diagnosis(said, hints, _beside(mine, due, where))
    return None


def _beside(mine: TimedLoop, due: TimedLoop, where: str) -> Picture:
    return draw_loops({"yours": mine, "possible": due}, where, "tried")


def _judge_bits(loop: Loop, ranks: int, seed: int) -> Diagnosis | None:
    count = 4
    held, walks = real_walks(loop, count, 2, ranks, seed)
    LocalWorld(Grid.of(dp=ranks)).run(walks)
    for each in held:
        turn = first_wrong(each, count)
        if turn is not None:
            said = f"The schedule is right, but on rank {each.rank} work({turn}, …) got another matrix."
            return Diagnosis(said, ("Tickets are answered in the order in which you asked.",))
    return None


def wait_exercise(ranks: int) -> Exercise:
    """Where a wait is missing, and for what: judged by the program with that wait."""
    due = run_program(with_wait(RIGHT_LINE, RIGHT_TICKET), ranks)

    def judge(line: Any, ticket: Any) -> Diagnosis | None:
        run = run_program(with_wait(line, ticket), ranks)
        if run.wrong is not None:
            said = (
                f"With your wait, matrix {run.wrong} still comes out wrong: others receive what was written "
                f"for matrix {run.wrong + 2}."
            )
            hints = (
                "Two buffers, used in turn. Which matrix used this one before matrix i?",
                "The wait goes before the line that writes, not after it.",
            )
            return Diagnosis(said, hints, draw_program(run, "Your run"))
        if run.milliseconds > due.milliseconds:
            times = f"{run.milliseconds:g} ms; {due.milliseconds:g} are possible"
            said = f"The bits are right, but it takes {times}."
            return Diagnosis(
                said,
                ("Wait as late as you can, and for the oldest ticket that will do.",),
                draw_program(run, "Your run: right, and slow"),
            )
        if re.sub(r"\s", "", ticket) == "leaving[i-1]":
            return Diagnosis(
                "The bits are right. But that share used the *other* buffer: with this wait, one would do.",
                ("Which matrix used buffers[i % 2] before matrix i?",),
            )
        return None

    return Exercise(judge, (), "Nobody writes what somebody may still read.")


def draw_schedules(ranks: int) -> Picture:
    """The three loops of the prediction."""
    loops = {
        "one by one": time_loop(one_by_one, QUICK, 1, ranks),
        "asks ahead": time_loop(prefetch, QUICK, 2, ranks),
        "asks ahead, slow link": time_loop(prefetch, SLOW, 2, ranks),
    }
    return draw_loops(loops, f"{COUNT} matrices, three schedules", "schedules")


def broken_program(ranks: int) -> Picture:
    """The program as it stands, drawn: what goes wrong in it."""
    return draw_program(run_program(PROGRAM, ranks), "The program as it stands")


def quiz(ranks: int) -> Exercise:
    """Numbers that the notebook has measured, or can in a line."""
    expected = {
        "endless": time_loop(prefetch, QUICK, COUNT, ranks).milliseconds,
        "held": float(time_loop(prefetch, QUICK, 3, ranks).watch.held),
        "exposed": round(1000 * time_loop(prefetch, QUICK, 2, ranks).timeline.total("wait", 0), 6),
    }
    why = {
        "endless": "Once the link is never waited for but at the start, a larger window gains nothing.",
        "held": "A window of three holds what is worked on, and what was asked for ahead.",
        "exposed": "What hides the first gather?",
    }
    return numbers(expected, why)


def all_exercises(ranks: int, seed: int) -> tuple[Exercise, ...]:
    """The notebook's exercises in order: makespan, prefetch, wait, quiz."""
    return (
        makespan_exercise(ranks),
        prefetch_exercise(ranks, seed),
        wait_exercise(ranks),
        quiz(ranks),
    )
