"""Exercises of lesson 05: straddling matrices, the local range, bytes, and the quiz."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import DistMeta, Plan
from ...plan.bucket import Interval
from ..exercises.judge import Exercise, guesses, names_or_none, numbers, written
from . import on_ranks
from .on_ranks import BUCKETS, SHAPES, kept_of, padding_of, plan_of, slice_length, split_matrices

GRIDS = ((4, 1), (3, 1), (2, 2), (5, 1), (3, 2), (1, 1))


def split_exercise(plan: Plan) -> Exercise:
    """The prediction: which matrices does a slice boundary cut, and how much padding is there?"""
    more = f"{plan.grid.size('dp')} ranks along dp"

    def judge(straddle: object, padding: object) -> str | None:
        said = names_or_none(straddle, SHAPES)
        if said is None:
            return 'straddle: give a list of names, such as ["A", "D"].'
        right = split_matrices(plan)
        if extra := [name for name in said if name not in right]:
            place = min(kept_of(plan, extra[0]))
            return f"straddle: with {more}, {extra[0]} lies whole in the slice of rank {place}."
        if missing := [name for name in right if name not in said]:
            kept = list(kept_of(plan, missing[0]))
            return f"straddle: with {more}, {missing[0]} is cut, too: ranks {kept} keep parts of it."
        told = "Each bucket is filled up by itself, until dp divides its length."
        return f"padding: not {padding}. {told}" if padding != padding_of(plan) else None

    hints = (
        "Fill the buckets first: a bucket takes matrices as long as it stays within its limit.",
        "Then the length of a slice: the bucket's length divided by dp, rounded up.",
        "A boundary cuts a matrix that begins before it and ends after it, not one that ends there.",
    )
    return Exercise(judge, hints, "Boundaries do not care where a matrix ends.")


def address(meta: DistMeta, row: int, column: int, length: int) -> tuple[int, int]:
    """The exercise's reference: an entry's slice in its bucket, and its offset there."""
    return divmod(meta.global_range[0] + row * meta.shape[1] + column, length)


def address_exercise() -> Exercise:
    plan = plan_of(4, 1, 400)
    metas = [meta for meta in plan.dist_meta(plan.grid.at(0)) if meta.name in ("A", "C", "E")]
    cases = [(meta, *spot) for meta in metas for spot in ((1, 5, 93), (2, 3, 40))]

    def at(entry: Callable[[DistMeta, int, int], int]) -> Callable[..., tuple[int, int]]:
        return lambda meta, row, column, length: divmod(entry(meta, row, column), length)

    turned = at(lambda meta, row, column: meta.global_range[0] + row * meta.shape[0] + column)
    alone = at(lambda meta, row, column: row * meta.shape[1] + column)
    by_columns = at(lambda meta, row, column: meta.global_range[0] + column * meta.shape[0] + row)
    slips = (
        ("A row has as many entries as the matrix has columns, meta.shape[1].", turned),
        ("Matrices before this one come first: add meta.global_range[0].", alone),
        ("Matrices are written out row after row.", by_columns),
        ("First the number of the slice, then the offset.", lambda *given: address(*given)[::-1]),
    )
    say = "{0.name}, of shape {0.shape} from entry {0.global_range[0]} on, row {1}, column {2}, slices of {3}"
    hints = ("How many entries of the bucket are before it? divmod(n, length) does the rest.",)
    return written(address, cases, *slips, say=say, hints=hints, praise="No message was needed to find it.")


def bytes_exercise(dp: int, tp: int, bucket: int) -> Exercise:
    """The prediction: bytes that rank 0 sends for whole buckets, and for straddling matrices only."""
    everything = "All other ranks lack rank 0's slice of every bucket."
    straddling = "Rank 0 sends its part of a matrix to each rank that keeps another part of it."
    right = on_ranks.sent_for_momentum(dp, tp, bucket)

    def asked(name: str, told: str) -> tuple[Any, ...]:
        entries = right[name] // 2, "These are entries. On the wire each entry takes 2 bytes."
        float32 = 2 * right[name], "That would be float32. On the wire each entry takes 2 bytes."
        return name, right[name], told, entries, float32

    hints = (
        "Every other rank lacks rank 0's slice of every bucket, padding included.",
        "Which matrix does the end of rank 0's slice cut, and how many other ranks keep a part of it?",
    )
    both = asked("everything", everything), asked("straddling", straddling)
    return guesses(*both, hints=hints, praise="A rank sends what others lack, once for each of them.")


def range_exercise() -> Exercise:
    due: dict[tuple[Interval, int, int], Interval] = {}
    for plan in (plan_of(dp, tp, bucket) for dp, tp in GRIDS for bucket in BUCKETS):
        for at in map(plan.grid.at, plan.grid.ranks):
            for meta in plan.dist_meta(at):
                due[meta.global_range, at["dp"], slice_length(plan, meta.bucket_idx)] = meta.local_range

    def from_the_bucket(whole: Interval, place: int, length: int) -> Interval:
        start, stop = due[whole, place, length]
        return (start + place * length, stop + place * length) if stop else (0, 0)

    def backwards(whole: Interval, place: int, length: int) -> Interval:
        begin = place * length
        return max(whole[0], begin) - begin, min(whole[1], begin + length) - begin

    def inclusive(*case: Any) -> Interval:
        start, stop = due[case]
        return (start, stop - 1) if stop else (0, 0)

    slips = (
        ("If they share nothing, say (0, 0).", backwards),
        ("Count from the start of the slice, not of the bucket.", from_the_bucket),
        ("A range ends before its stop: you leave out the last number.", inclusive),
    )
    hints = (
        "Slice number `place` begins at place * length in the bucket, and ends at (place + 1) * length.",
        "Two intervals share what lies between the larger of their starts and the smaller of their ends.",
    )
    praise = "The same as plan.dist_meta, on every grid that was tried."
    right, say = (lambda *case: due[case]), "a matrix at {}, slice {} of length {}"
    return written(right, list(due), *slips, say=say, hints=hints, praise=praise, keeps=("local_range",))


def quiz(plan: Plan) -> Exercise:
    kept = sum(held.numel for bucket in plan.buckets for held in bucket.stored_shards(plan.grid.at(0)))
    buckets = len(plan_of(plan.grid.size("dp"), plan.grid.size("tp"), BUCKETS[0]).buckets)
    return numbers(
        ("kept", kept, "Add up its slices, and take off the padding that they hold."),
        ("padding", padding_of(plan), "The padding is written above the rulers of the first picture."),
        ("buckets", buckets, f"Press the button {BUCKETS[0]} above the rulers."),
    )


def all_exercises(dp: int, tp: int, bucket: int) -> tuple[Exercise, ...]:
    split = split_exercise(plan_of(dp + 1, tp, bucket))
    sent = bytes_exercise(dp, tp, bucket)
    return split, address_exercise(), range_exercise(), sent, quiz(plan_of(dp, tp, bucket))
