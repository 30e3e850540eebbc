"""Exercises of lesson 05: matrices that a slice boundary cuts, the local range, and the quiz."""

from __future__ import annotations

from typing import Any

from ... import DistMeta, Plan
from ..exercises.judge import Exercise, names_or_none, numbers, value_of
from .ranges import BUCKETS, SHAPES, LocalRange, keepers, padding_of, plan_of, split_matrices

GRIDS = ((4, 1), (3, 1), (2, 2), (5, 1), (3, 2), (1, 1))


def split_exercise(plan: Plan) -> Exercise:
    """The prediction: which matrices does a slice boundary cut?"""

    def judge(answer: object) -> str | None:
        said = names_or_none(answer, SHAPES)
        if said is None:
            return 'Give a list of names, such as ["A", "D"].'
        right = split_matrices(plan)
        if extra := [name for name in said if name not in right]:
            return f"{extra[0]} lies whole in the slice of rank {keepers(plan, extra[0])[0]}."
        if missing := [name for name in right if name not in said]:
            return f"{missing[0]} is shared, too: ranks {keepers(plan, missing[0])} keep parts of it."
        return None

    return Exercise(
        judge,
        ("Follow each dashed line up to the first ruler: which letters does it cut?",),
        "Ranges do not care where a matrix ends.",
    )


def range_exercise() -> Exercise:
    """The interval of a matrix within a slice, judged against ``plan.dist_meta`` on several grids."""

    def judge(local_range: LocalRange) -> str | None:
        plans = (plan_of(dp, tp, bucket) for dp, tp in GRIDS for bucket in BUCKETS)
        return next(filter(None, (_judge_plan(local_range, plan) for plan in plans)), None)

    hints = (
        "Slice number place begins at place * length in the bucket, and ends length later.",
        "Two intervals share what lies between the larger of their starts and the smaller of their ends.",
    )
    return Exercise(judge, hints, "The same as plan.dist_meta, on every grid that was tried.")


def _judge_plan(local_range: LocalRange, plan: Plan) -> str | None:
    for rank in plan.grid.ranks:
        at = plan.grid.at(rank)
        for meta in plan.dist_meta(at):
            bucket = plan.buckets[meta.bucket_idx]
            length = bucket.length(bucket.storage_layout, at)
            said = value_of(local_range, meta.global_range, at["dp"], length)
            if wrong := _judge_range(said, meta, at["dp"], length):
                return f"{meta.name} at {meta.global_range}, slice {at['dp']} of length {length}: {wrong}"
    return None


def _judge_range(said: Any, meta: DistMeta, place: int, length: int) -> str | None:
    if not isinstance(said, (tuple, list)) or len(said) != 2:
        return f"give a pair (start, stop), not {said!r}."
    start, stop = said
    right = meta.local_range
    if (start, stop) == right:
        return None
    if right == (0, 0):
        return f"they share nothing; say (0, 0), not ({start}, {stop})."
    if place and (start - place * length, stop - place * length) == right:
        return f"({start}, {stop}) counts from the start of the bucket. Count from the start of the slice."
    if start < 0 or stop > length:
        return f"({start}, {stop}) reaches out of the slice, which goes from 0 to {length}."
    if (start, stop + 1) == right:
        return f"({start}, {stop}) leaves out the last number: a range ends before its stop."
    return f"({start}, {stop}) is not the part that lies in the slice."


def quiz(plan: Plan) -> Exercise:
    """Numbers that the notebook has measured."""
    at = plan.grid.at(0)
    expected = {
        "kept": sum(held.numel for bucket in plan.buckets for held in bucket.stored_shards(at)),
        "padding": padding_of(plan),
        "buckets": len(plan_of(plan.grid.size("dp"), plan.grid.size("tp"), BUCKETS[0]).buckets),
    }
    why = {
        "kept": "Add up the last column of the plan, as rank 0 reads it.",
        "padding": "It is written above the rulers.",
        "buckets": f"Press the button {BUCKETS[0]} above the rulers, and count.",
    }
    return numbers(expected, why)


def all_exercises(plan: Plan) -> tuple[Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: split, ranges, quiz."""
    return split_exercise(plan), range_exercise(), quiz(plan)
