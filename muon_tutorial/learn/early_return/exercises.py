"""Exercises of lesson 12: a makespan, a loop that prefetches, a missing wait, and a quiz."""

from __future__ import annotations

import re
from typing import Any

from ... import Grid
from ...worlds.local import LocalWorld
from ..exercises.judge import Diagnosis, Exercise, beside, first, guesses, numbers
from ..pictures.picture import Picture
from . import loops
from .loops import Loop, LoopTimes, TimedLoop, one_by_one, prefetch, time_loop
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
"""The times and windows that a loop is tried with."""

SPOILERS = beside(one_at_a_time=20, ahead_of_work=14, slow_link=23)


def makespans(ranks: int) -> dict[str, int]:
    """The prediction's answers from the timed world: milliseconds of three loops over four matrices."""
    names = ("one_at_a_time", "ahead_of_work", "slow_link")
    return {name: round(loop.milliseconds) for name, loop in zip(names, _schedules(ranks), strict=True)}


def _schedules(ranks: int) -> list[TimedLoop]:
    tried = ((one_by_one, QUICK, 1), (prefetch, QUICK, 2), (prefetch, SLOW, 2))
    return [time_loop(loop, times, window, ranks) for loop, times, window in tried]


def makespan_exercise(ranks: int) -> Exercise:
    """The prediction: how long three schedules take."""
    hints = (
        "Nothing overlaps: a gather and the work, then the next.",
        "While a rank works, its next matrix arrives. What is left to wait for?",
        "Now a gather takes longer than the work. Draw both lanes: which one is never idle?",
    )
    asked = ((*right, hint) for right, hint in zip(makespans(ranks).items(), hints, strict=True))
    return guesses(*asked, praise="The busier lane sets the pace; the other only adds its first, or last.")


def prefetch_exercise(ranks: int, seed: int) -> Exercise:
    """The exercise: a loop with a window, judged by time, by the matrices that it holds, and by bits."""

    def judge(loop: Loop) -> Diagnosis | None:
        if tried := first(_judge_times(loop, times, window, ranks) for times, window in TRIED):
            return tried
        held = [loops.RealMatrices(rank, ranks, seed) for rank in range(ranks)]
        walks = [loops.guarded(loop, COUNT, each.gather, each.work, 2) for each in held]
        LocalWorld(Grid.of(dp=ranks)).run(walks)
        for each in held:
            if (turn := loops.first_wrong(each, COUNT)) is not None:
                said = f"The schedule is right, but on rank {each.rank} work({turn}, …) got another matrix."
                return Diagnosis(said, ("Tickets are answered in the order in which you asked.",))
        return None

    return Exercise(judge, (), "Right bits, no gather too early, and none too late.", keeps=("prefetch",))


def _judge_times(loop: Loop, times: LoopTimes, window: int, ranks: int) -> Diagnosis | None:
    mine, due = time_loop(loop, times, window, ranks), time_loop(prefetch, times, window, ranks)
    count = len(times.work)
    where = f"{count} matrices, window {window}"
    if mine.watch.done != list(range(count)):
        said = f"{where}: your loop works on {mine.watch.done}, not on 0 to {count - 1}, once each, in order."
        return Diagnosis(said, ("How often does work run, and with which i?",))
    both = {"yours": mine, "possible": due}
    if mine.watch.held > window:
        held = f"{where}: yours holds {mine.watch.held} at once, asked for and not done"
        said = f"{held}. The more it holds, the more memory it needs."
        hints = (
            "Ask for matrix a only when a < i + window.",
            "Ask first, then wait and work: a gather asked for before work(i) is held at the same time as i.",
        )
        return Diagnosis(said, hints, draw_loops(both, where, "tried"))
    if mine.milliseconds > due.milliseconds:
        said = f"{where}: yours takes {mine.milliseconds:g} ms; {due.milliseconds:g} ms are enough."
        hints = (
            "When you work on matrix i, which gathers are already under way? There may be window − 1.",
            "Keep the tickets in a list. Before you wait for matrix i, ask for all up to i + window − 1.",
        )
        return Diagnosis(said, hints, draw_loops(both, where, "tried"))
    return None


def wait_exercise(ranks: int) -> Exercise:
    """The exercise: where a wait is missing, and for which ticket; judged by running the program with it."""
    due = run_program(with_wait(RIGHT_LINE, RIGHT_TICKET), ranks)

    def judge(line: Any, ticket: Any) -> Diagnosis | None:
        run = run_program(with_wait(line, ticket), ranks)
        if run.wrong is not None:
            what = f"others receive what was written for matrix {run.wrong + 2}."
            said = f"With your wait, matrix {run.wrong} still comes out wrong: {what}"
            hints = (
                "Two buffers, used in turn. Which matrix used this one before matrix i?",
                "The wait goes before the line that writes, not after it.",
            )
            return Diagnosis(said, hints, draw_program(run, "Your run"))
        if run.milliseconds > due.milliseconds:
            times = f"{run.milliseconds:g} ms; {due.milliseconds:g} ms are enough"
            said = f"The bits are right, but it takes {times}."
            hint = "Wait as late as you can, and for the oldest ticket that will do."
            return Diagnosis(said, (hint,), draw_program(run, "Your run: right, and slow"))
        if re.sub(r"\s", "", ticket) == "leaving[i-1]":
            said = "The bits are right, but that share used the *other* buffer. So you need only one buffer."
            return Diagnosis(said, ("Which matrix used buffers[i % 2] before matrix i?",))
        return None

    return Exercise(judge, (), "No buffer is written while a share may still read it.")


def draw_schedules(ranks: int) -> Picture:
    shown = zip(("one by one", "asks ahead", "asks ahead, slow link"), _schedules(ranks), strict=True)
    return draw_loops(dict(shown), f"{COUNT} matrices, three schedules", "schedules")


def broken_program(ranks: int) -> Picture:
    return draw_program(run_program(PROGRAM, ranks), "The program as it stands")


def quiz(ranks: int) -> Exercise:
    two, three, all_at_once = (time_loop(prefetch, QUICK, window, ranks) for window in (2, 3, COUNT))
    ahead = "A window of three holds the matrix being worked on and those asked for ahead."
    endless = "Once a rank waits for the link only at the start, a larger window gains nothing."
    return numbers(
        ("endless", all_at_once.milliseconds, endless),
        ("held", float(three.watch.held), ahead),
        ("exposed", round(1000 * two.timeline.total("wait", 0), 6), "What hides the first gather?"),
    )


def all_exercises(ranks: int, seed: int) -> tuple[Exercise, ...]:
    return makespan_exercise(ranks), prefetch_exercise(ranks, seed), wait_exercise(ranks), quiz(ranks)
