"""Exercises of lesson 12: makespan, prefetch, missing wait, pipeline, recomputing, quiz, recorded steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ... import Grid
from ...worlds.local import LocalWorld
from ..exercises.judge import Diagnosis, Exercise, first, numbers, value_of, written
from ..pictures.picture import Picture
from . import loops
from .loops import Loop, LoopTimes, one_by_one, prefetch, time_loop
from .missing_wait import RIGHT_LINE, RIGHT_TICKET, run_program, with_wait
from .pictures import draw_loops, draw_program
from .pipelines import Schedule, most_kept, one_f_one_b, recomputing_exercise

COUNT = 4
QUICK, SLOW = LoopTimes.alike(COUNT, 2, 3), LoopTimes.alike(COUNT, 5, 3)
TRIED = (
    (LoopTimes.alike(5, 2, 3), 1),
    (LoopTimes.alike(5, 2, 3), 2),
    (LoopTimes((9, 1, 1, 1, 9, 1), (4,) * 6), 3),
    (LoopTimes.alike(3, 5, 3), 6),
)
"""The times and windows that a loop is tried with."""


def makespan(gathers: Sequence[float], works: Sequence[float], window: int) -> float:
    """The exercise's reference: milliseconds until a loop that asks ahead has done all work.

    >>> makespan([2] * 4, [3] * 4, 1), makespan([2] * 4, [3] * 4, 2), makespan([5] * 4, [3] * 4, 2)
    (20.0, 14.0, 23.0)
    """
    link, rank, done = 0.0, 0.0, [0.0] * window
    for gather, work in zip(gathers, works, strict=True):
        link = max(link, done[-window]) + gather
        rank = max(rank, link) + work
        done.append(rank)
    return rank


def makespan_exercise() -> Exercise:
    """The exercise: a loop's time if a window limits how many matrices are asked for and not yet done."""
    cases = [
        ([2, 2, 2, 2], [3, 3, 3, 3], 1),
        ([2, 2, 2, 2], [3, 3, 3, 3], 2),
        ([5, 5, 5, 5], [3, 3, 3, 3], 2),
        ([9, 1, 1, 1, 9, 1], [4] * 6, 3),
        ([1, 1, 1, 1, 8], [5, 1, 1, 1, 1], 2),
    ]

    def shifted(by: int) -> Callable[..., float]:
        return lambda gathers, works, window: makespan(gathers, works, max(1, window + by))

    overlap = "That is the time with a window of 1. With more, gathers and work overlap."
    unlimited = "Your gathers begin without a limit. Let gather i begin only when matrix i − window is done."
    slips = (
        (overlap, lambda g, w, window: makespan(g, w, 1)),
        (unlimited, lambda g, w, window: makespan(g, w, len(g))),
        ("Every work waits for its own gather, not only the first.", lambda g, w, window: g[0] + sum(w)),
        ("Your window is one too large: with 1, gather i begins when matrix i − 1 is done.", shifted(1)),
        ("Your window is one too small: with 2, gather i begins when matrix i − 2 is done.", shifted(-1)),
        ("Gathers travel one at a time.", _side_by_side),
    )
    praise = "The busier lane sets the pace; the other one adds only its first gather or its last work."
    return written(makespan, cases, *slips, say="gathers {}, work {} and window {}", praise=praise)


def _side_by_side(gathers: Sequence[float], works: Sequence[float], window: int) -> float:
    """A wrong makespan: each gather begins as soon as it is asked for, even while others travel."""
    rank, done = 0.0, [0.0] * window
    for gather, work in zip(gathers, works, strict=True):
        rank = max(rank, done[-window] + gather) + work
        done.append(rank)
    return rank


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
    """The exercise: where a wait is missing, and for which ticket; judged by a run with that wait."""
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
            said = "Right bits, but you wait for the share from the *other* buffer: two buffers gain nothing."
            return Diagnosis(said, ("Which matrix used buffers[i % 2] before matrix i?",))
        return None

    return Exercise(judge, (), "No buffer is written while a share may still read it.")


def pipeline_exercise() -> Exercise:
    """The exercise: 1F1B's order of work: of the fastest orders, it keeps the fewest micro-batches."""
    hint = "A micro-batch is back after `stages` F and `stages` B. How many pairs F, B fit into that time?"
    praise = "As idle as GPipe, but a stage keeps at most one micro-batch for itself and each later stage."
    return Exercise(_judge_schedule, (hint,), praise, optional=True)


def _judge_schedule(schedule: Schedule) -> str | None:
    for stages, micro in (4, 6), (3, 7), (4, 2), (1, 3):
        for stage in range(stages):
            mine, due = value_of(schedule, stage, stages, micro), one_f_one_b(stage, stages, micro)
            where = f"Stage {stage} of {stages}, {micro} micro-batches: {mine!r}."
            if not isinstance(mine, str) or sorted(mine) != sorted(due):
                return f"{where} It needs {micro} F and {micro} B."
            if any(mine[:n].count("B") > mine[:n].count("F") for n in range(len(mine))):
                return f"{where} A B stands before the F of its micro-batch."
            kept, least = most_kept(mine), most_kept(due)
            if kept > least:
                return f"{where} It keeps up to {kept} micro-batches; {least} are enough."
            if mine != due:
                return f"{where} An F comes too late: the stages after this one wait for it."
    return None


def with_window_3(computes: float, waits: float, count: int) -> float:
    """The exercise's reference: milliseconds with window 3, predicted from a recording with window 1."""
    return makespan([waits / count] * count, [computes / count] * count, 3)


def recorded_exercise() -> Exercise:
    slips = (
        ("computes and waits are sums over all matrices.", lambda c, w, n: makespan([w] * n, [c] * n, 3)),
        ("That is the time with a window of 1.", lambda c, w, n: c + w),
        ("The other lane adds its first gather or its last work.", lambda c, w, n: max(c, w)),
    )
    say, praise = "computes {}, waits {} and count {}", "If your loop is right, a recording agrees. Does it?"
    return written(with_window_3, [(120, 60, 6), (40, 200, 4), (9, 9, 3)], *slips, say=say, praise=praise)


def draw_schedules(ranks: int) -> Picture:
    """Timelines of three loops over four matrices: one by one; asking ahead; asking ahead on a slow link."""
    tried = {"one by one": (one_by_one, QUICK, 1), "asks ahead": (prefetch, QUICK, 2)}
    tried["asks ahead, slow link"] = (prefetch, SLOW, 2)
    loops = {name: time_loop(*each, ranks) for name, each in tried.items()}
    return draw_loops(loops, f"{COUNT} matrices, three schedules", "schedules")


def quiz(ranks: int) -> Exercise:
    two, three, all_at_once = (time_loop(prefetch, QUICK, window, ranks) for window in (2, 3, COUNT))
    ahead = "A window of three holds the matrix being worked on and those asked for ahead."
    no_gain = "Once a rank waits for the link only at the start, a larger window gains nothing."
    return numbers(
        ("window 4", all_at_once.milliseconds, no_gain),
        ("held", float(three.watch.held), ahead),
        ("exposed", round(1000 * two.timeline.total("wait", 0), 6), "What hides the first gather?"),
    )


def all_exercises(ranks: int, seed: int) -> tuple[Exercise, ...]:
    ahead, find = prefetch_exercise(ranks, seed), wait_exercise(ranks)
    last = pipeline_exercise(), recomputing_exercise(), quiz(ranks), recorded_exercise()
    return makespan_exercise(), ahead, find, *last
