"""Exercises of lesson 04: owners, a skipped offset, two ways to share updates, load balance, the quiz."""

from __future__ import annotations

import operator
from functools import partial
from typing import SupportsFloat, SupportsIndex

from ..exercises.judge import Diagnosis, Exercise, Par, first, names_or_none, numbers, why
from ..exercises.on_real_ranks import judge_on_ranks
from .balance import TOY, WORST, fair_shares, toy_makespans
from .first_wrong_place import early_starts, early_wrong, explain, explain_gathered, reaches_into
from .on_ranks import (
    LENGTH,
    PLACES,
    SHAPES,
    Lacking,
    SharingRun,
    owner_lacks,
    place_of,
    predict_ring,
    ring_sent,
    run_cases,
    say_trouble,
)

LACKING = "k1"
SPOILERS = {
    "owner_of_last": [r"owner_of_last\W+\w*\W+1\b"],
    "zeros": [r"zeros\W+\w*\W+0\.8\b"],
    "wrong": [r"(wrong places:|wrong, in red:|\[)\W*up1\W+down1\W+v2\W+o2"],
    "longest_first": [r"longest_first\W+\w*\W+17\b", r"longest first: makespan 17"],
    "best": [r"best\W+\w*\W+15\b"],
}
"""Patterns that would give the notebook's predictions away."""


def guess(ranks: int) -> Exercise:
    """The prediction: with one more rank, the last matrix's owner, and the part of buffers that is zero."""
    more = ranks + 1
    right = PLACES[-1].owner(more)

    def judge(owner_of_last: SupportsIndex, zeros: SupportsFloat) -> str | None:
        try:
            said, part = operator.index(owner_of_last), float(zeros)
        except (TypeError, ValueError):
            return "Give a rank, and a number between 0 and 1."
        last = len(PLACES) - 1
        if said != right:
            told = why(
                (
                    not 0 <= said <= ranks,
                    f"there is no rank {said}; with one more, ranks go from 0 to {ranks}.",
                ),
                (said == PLACES[-1].owner(ranks), f"{said} owns it only with the current number of ranks."),
                (
                    said == (last + 1) % more,
                    f"numbers begin at 0, so the last of {last + 1} has number {last}.",
                ),
                otherwise=f"matrix i belongs to rank i modulo {more}; {said} is not that of matrix {last}.",
            )
            return f"owner_of_last: {told}"
        if abs(part - ranks / more) <= 0.005:
            return None
        told = why(
            (not 0 <= part <= 1, f"{part:g} is no part of a whole: give a number between 0 and 1."),
            (abs(part - 1 / more) < 0.005, f"{part:g} is the part that is filled."),
            (
                abs(part - (ranks - 1) / ranks) < 0.005,
                f"{part:g} is the part only with the current number of ranks.",
            ),
            otherwise=f"{part:g} is not it. Look at one place: on how many ranks is it zero?",
        )
        return f"zeros: {told}"

    hints = (
        "The last matrix has number 11. Deal out 0, 1, 2 … in turn.",
        "Every place is filled on one rank, and zero on all others.",
    )
    return Exercise(judge, hints, "Each place is filled once. On all other ranks it is zero.")


def predict(ranks: int) -> Exercise:
    """The prediction: which matrices come out wrong if a missing gradient does not move the offset?"""
    lacking = owner_lacks(LACKING, ranks)
    right = early_wrong(ranks, lacking)

    def judge(answer: object) -> str | None:
        said = names_or_none(answer, SHAPES)
        if said is None:
            return 'Give a list of names, such as ["q1", "v2"].'
        if extra := [name for name in said if name not in right]:
            why = "Its owner puts it in its place, and no other rank writes there."
            if extra[0] == LACKING:
                why = "No rank has an update for it, so its place stays zero, and its weight does not change."
            return f"{extra[0]} comes out as it should. {why}"
        if missing := [name for name in right if name not in said]:
            return f"{missing[0]} comes out wrong, too. {_why_wrong(missing[0], ranks, lacking)}"
        return None

    hints = (
        "After k1, at which offset does k1's owner write? Too early, by the size of k1.",
        "Two kinds are wrong: updates in the wrong place, and updates that they overwrite.",
    )
    return Exercise(
        judge, hints, "Updates in the wrong place are wrong, and so are the ones that they overwrite."
    )


def _why_wrong(name: str, ranks: int, lacking: Lacking) -> str:
    starts, place = early_starts(ranks, lacking), place_of(name)
    mine = starts.get(name, place.start)
    if mine != place.start:
        return f"Rank {place.owner(ranks)} puts its update at {mine:,}; its place begins at {place.start:,}."
    upon = (other for other in starts if other != name and reaches_into(other, starts[other], place))
    other = place_of(next(upon))
    said = f"puts its update for {other.name} at {starts[other.name]:,}, and that reaches into it."
    return f"Rank {other.owner(ranks)} {said}"


def check_share(ranks: int, backend: str = "gloo", seed: int = 0) -> Exercise:
    """The exercise: every update in its place on real ranks, even if any rank lacks any gradient."""
    cases = [
        (),
        owner_lacks(LACKING, ranks),
        tuple((rank, "up1") for rank in range(ranks)),
        owner_lacks("q1", ranks) + owner_lacks("o2", ranks),
    ]

    play = partial(run_cases, ranks=ranks, cases=cases, backend=backend, seed=seed)
    judge = judge_on_ranks(play, lambda runs: first(map(explain, runs)), say_trouble)
    hints = (
        "The offset must say the same on all ranks. What may it depend on?",
        "`continue` skips the rest of the loop, and the last line of the loop moves the offset.",
        "Fill a place only if it is yours and there is a gradient. Move the offset in any case.",
    )
    return Exercise(judge, hints, "Whatever is missing, every other update is in its place, on every rank.")


def check_gather(ranks: int, backend: str = "gloo", seed: int = 0) -> Exercise:
    """The exercise: all updates on all ranks, with fewer bytes than the zero-filled all_reduce sends."""
    summed, par = ring_sent("all_reduce", LENGTH * 2, ranks), predict_ring(ranks)
    sent: list[int] = []

    def judge(runs: list[SharingRun]) -> str | Diagnosis | None:
        sent.append(runs[0].sent)
        if wrong := explain_gathered(runs[0]):
            return wrong
        if sent[-1] >= summed > par:
            hint = "Leave the zeros at home: a rank brings its own updates, one after the other, and no more."
            said = f"a rank sends {sent[-1]:,} bytes, and the all_reduce of the whole buffer {summed:,}."
            return Diagnosis(f"All updates arrive. But {said}", (hint,))
        if ranks > 1 and not sent[-1]:
            return "All updates are there, and no all_gather was called: how did they get there?"
        fewer = f"a rank sends {sent[-1]:,} bytes, fewer than the updates that the others lack"
        asked = "did every rank compute all of them?"
        return f"All updates are there, but {fewer}: {asked}" if sent[-1] < par else None

    play = partial(run_cases, ranks=ranks, cases=[()], backend=backend, seed=seed)
    hints = (
        "Rank r owns parameters[r::ranks]. How many entries is that, for each r? Fill up to the longest.",
        "dist.all_gather(segments, mine) wants a list of empty tensors, each as long as mine.",
        "For matrix i: from segment i % ranks take the next p.numel() entries.",
    )
    praise = "Every rank has every update, and no zero has travelled."
    scored = Par("bytes", par, lambda _: sent[-1])
    return Exercise(judge_on_ranks(play, judge, say_trouble), hints, praise, scored, ("gathered_share",))


def check_toy() -> Exercise:
    """The prediction: the makespans of five matrices on two owners, with the costliest first and at best."""
    longest, best = toy_makespans().values()

    def judge(longest_first: SupportsFloat, best_possible: SupportsFloat) -> str | None:
        try:
            said, less = float(longest_first), float(best_possible)
        except (TypeError, ValueError):
            return "Give two numbers."
        if said != longest:
            return f"longest_first: not {said:g}. In this order, each goes to the lighter owner."
        if less < best:
            return f"best: {less:g} is less than half of all the work, which is {sum(TOY) / 2:g}."
        if less != best:
            return f"best: one of them can do better than {less:g}. Which costs add up to half of {sum(TOY)}?"
        return None

    return Exercise(judge, praise="Longest first puts 8 and 7 apart. The best keeps them together.")


def quiz(ranks: int) -> Exercise:
    """Three numbers that the notebook measured."""
    own = sum(place.size for place in PLACES if place.owner(ranks) == 0)
    sent = predict_ring(ranks)
    return numbers(
        ("zeros", LENGTH - own, "Press rank 0 and 'own updates' above the buffers, or ask first.zeros(0)."),
        ("busiest", fair_shares(WORST), f"Put the slider at {WORST}, or ask lesson.fair_shares({WORST})."),
        ("bytes", sent, "It is par of your all_gather; or ask counted[0][1].ring."),
        within=1e-6,
    )


def all_exercises(dp: int, backend: str, seed: int) -> tuple[Exercise, ...]:
    """The notebook's exercises in order: guess, prediction, repair, gather, five matrices, quiz."""
    fixed, less = check_share(dp, backend, seed), check_gather(dp, backend, seed)
    return guess(dp), predict(dp), fixed, less, check_toy(), quiz(dp)
