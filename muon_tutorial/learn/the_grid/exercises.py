"""Exercises of lesson 06: groups of one rank, of any grid; which ranks must call; a quiz."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from ... import Coordinate, Grid
from ..exercises.judge import Diagnosis, Exercise, first, guesses, numbers, value_of, written
from ..exercises.on_real_ranks import judge_on_ranks, say_ranks
from .on_ranks import PATIENCE, AnswerRun, Groups, play_answers, read_groups
from .pictures import picture_of_groups

GRIDS = ((2, 3), (3, 2), (2, 2), (1, 4), (4, 1), (3, 3), (5, 2), (1, 1), (2, 7))


def predict(dp: int, tp: int) -> Exercise:
    """The guess: which ranks share a group with the last rank?"""
    at = Grid.of(dp=dp, tp=tp).at(dp * tp - 1)
    column, row = set(at.group("dp")), set(at.group("tp"))
    is_row = "That is its row. Along a row tp changes, and dp does not."
    is_column = "That is its column. Along a column dp changes, and tp does not."
    return guesses(
        ("dp_group", column, "It has all ranks of a column of the grid: only dp differs.", (row, is_row)),
        ("tp_group", row, "It has all ranks of a row of the grid: only tp differs.", (column, is_column)),
        hints=("Press its button above the picture.",) * 2,
        praise="One row and one column, and the rank is where they cross.",
    )


def _judge_members(axis: str, said: Sequence[int], at: Coordinate) -> str | None:
    """What is wrong with ``said`` as a group of the rank ``at``."""
    right, name = at.group(axis), f"{axis} group {list(said)}"
    if unknown := [rank for rank in said if rank not in at.grid.ranks]:
        return f"{name}: there is no rank {unknown[0]}; ranks go from 0 to {at.grid.world_size - 1}."
    if strangers := [rank for rank in said if rank not in right]:
        other, found = "tp" if axis == "dp" else "dp", at.grid.at(strangers[0])
        return f"{name}: {found} and {at} differ in {other}; in a {axis} group only {axis} differs."
    if len(set(said)) < len(said):
        return f"{name}: a rank is in it twice."
    missing = [rank for rank in right if rank not in said]
    line = {"dp": "column", "tp": "row"}[axis]
    return f"{name}: {at.grid.at(missing[0])} is missing; it stands in the same {line}." if missing else None


def groups_exercise(dp: int, tp: int) -> Exercise:
    grids = dict.fromkeys([(dp, tp), *GRIDS])

    def judge(function: Groups) -> Diagnosis | None:
        for dp, tp in grids:
            made = value_of(function, dp, tp)
            if wrong := _judge_groups(made, Grid.of(dp=dp, tp=tp)):
                told = f"On a grid of dp {dp}, tp {tp}: {wrong}"
                return Diagnosis(told, picture=picture_of_groups(made, dp, tp))
        return None

    hints = (
        "Each of the tp columns of the grid is a dp group, and each of the dp rows is a tp group.",
        "Neighbours in a row are 1 apart, neighbours in a column tp apart.",
        "range(first, end, step) counts in steps.",
    )
    praise = f"Right on all {len(grids)} grids that were tried, also on those of one row or one column."
    return Exercise(judge, hints, praise, keeps=("groups",))


def _judge_groups(said: object, grid: Grid) -> str | None:
    if not isinstance(said, (tuple, list)) or len(said) != 2:
        return "return two lists: dp_groups, tp_groups."
    listed = {}
    for axis, part in zip(("dp", "tp"), said, strict=True):
        if (found := read_groups(part)) is None:
            return f"{axis}_groups is no list of lists of ranks, such as [[0, 1], [2, 3]]."
        listed[axis] = found
    as_sets = {axis: set(map(frozenset, found)) for axis, found in listed.items()}
    right = {axis: {frozenset(grid.at(rank).group(axis)) for rank in grid.ranks} for axis in ("dp", "tp")}
    if as_sets == {"dp": right["tp"], "tp": right["dp"]} != right:
        row = list(grid.at(0).group("tp"))
        return f"rows and columns are swapped. {row} is a row: in it tp changes, so it is a tp group."
    return first(_judge_axis(axis, found, grid) for axis, found in listed.items())


def _judge_axis(axis: str, listed: Sequence[Sequence[int]], grid: Grid) -> str | None:
    seen: dict[int, Sequence[int]] = {}
    for group in listed:
        if not group:
            return f"a {axis} group is empty."
        if twice := [rank for rank in group if rank in seen]:
            return f"rank {twice[0]} is in two {axis} groups, {list(seen[twice[0]])} and {list(group)}."
        if wrong := _judge_members(axis, group, grid.at(group[0] if group[0] in grid.ranks else 0)):
            return wrong
        seen.update(dict.fromkeys(group, group))
    lost = next((rank for rank in grid.ranks if rank not in seen), None)
    return None if lost is None else f"{grid.at(lost)} is in no {axis} group."


def answers_exercise(dp: int, tp: int, backend: str = "gloo", timeout: float = PATIENCE) -> Exercise:
    """The exercise: real ranks make all groups of a list, and gather ranks in their own groups."""
    play = partial(play_answers, dp=dp, tp=tp, backend=backend, timeout=timeout)
    hints = (
        "dist.new_group(ranks) makes the group. Who has to call it?",
        "found = [None] * len(ranks); dist.all_gather_object(found, rank, group=group) fills found.",
        "Only the gathering belongs under if rank in ranks.",
    )
    judge = judge_on_ranks(play, lambda run: first(itertools.chain(_judge_calls(run), _judge_heard(run))))
    return Exercise(judge, hints, "Every rank made every group, and gathered only in its own.")


def _judge_calls(run: AnswerRun) -> Iterator[str | Diagnosis]:
    stuck = [rank for rank, report in enumerate(run.reports) if report.stuck]
    timed_out = f"{say_ranks(stuck).capitalize()} timed out" if stuck else ""
    made_by_some = {ranks for report in run.reports for ranks in report.made}
    for rank, report in enumerate(run.reports):
        rest = iter(run.wanted)
        if stuck and not all(ranks in rest for ranks in report.made):  # the list's order is broken
            yield f"Rank {rank} makes its groups in another order than the list's: {list(report.made)}."
        # a stuck rank has not reached the groups after the last one that it made
        last = run.wanted.index(report.made[-1]) if report.stuck and report.made else len(run.wanted)
        left_out = (ranks for ranks in run.wanted[:last] if ranks in made_by_some - set(report.made))
        left = next((ranks for ranks in left_out if rank not in ranks), None)
        if left is not None:  # even if no rank waits: ranks that count groups differently mix up messages
            what = f"Rank {rank} is not in {list(left)}, and never made that group, so others wait for it"
            hint = "new_group is for all ranks, members or not. Is yours under the if?"
            yield Diagnosis(f"{timed_out and timed_out + '. '}{what}, or hear wrong ranks.", (hint,))
    if stuck:
        inside = "Does every member of a group call all_gather_object in it, and no other rank?"
        yield f"{timed_out}: {run.reports[stuck[0]].stuck}. {inside}"


def _judge_heard(run: AnswerRun) -> Iterator[str | Diagnosis]:
    for rank, report in enumerate(run.reports):
        heard, expected = read_groups(report.returned), run.expected(rank)
        if report.outside:
            what = f"Rank {rank} also asks in {report.outside} groups that it is not in. Only members may."
            yield Diagnosis(what, ("Only the gathering belongs under if rank in ranks.",))
        if heard is None:
            what = f"Return a list of ranks for each group of this rank, here {expected}."
            yield f"Rank {rank} returned {report.returned!r}. {what}"
        elif heard != expected:
            yield f"Rank {rank} heard {heard}; in its groups, in order, there are {expected}."
        elif report.gathers < len(expected):
            asked = f"Rank {rank} is in {len(expected)} groups, and asked in {report.gathers}"
            yield f"{asked}: call all_gather_object in each of them."
        elif report.returned != expected:  # tuples; the next cells compare lists
            yield f"Rank {rank} returned {report.returned!r}. Make it a list of lists."


Lists = list[list[list[int]]]
"""For each rank, the groups that it is about to make, in order."""


def first_mismatch(lists: Lists) -> int | None:
    """The exercise's reference: the number of the first call that is not the same on all ranks.

    >>> first_mismatch([[[0, 1], [2]], [[0, 1]]])
    1
    """
    rows = itertools.zip_longest(*lists)
    return next((number for number, row in enumerate(rows) if any(each != row[0] for each in row)), None)


def mismatch_exercise() -> Exercise:
    """The exercise: at which call of new_group do ranks differ?"""
    rows: list[list[int]] = [[0, 1], [2, 3], [0, 2], [1, 3]]
    cases: list[tuple[Lists]] = [
        ([rows, rows, rows, rows],),
        ([rows[::-1], rows, rows, rows],),
        ([rows, rows, rows, rows[:3]],),
        ([rows, rows, [*rows[:2], rows[3], rows[2]], rows],),
        ([rows[:1], rows[:1], rows[:1], rows[:2]],),
    ]

    def from_one(lists: Lists) -> int | None:
        at = first_mismatch(lists)
        return None if at is None else at + 1

    over = "A rank whose list has ended makes no such call: go to the end of the longest list."
    slips = (
        (over, lambda lists: first_mismatch([wanted[: min(map(len, lists))] for wanted in lists])),
        ("Count calls from 0.", from_one),
        ("Compare all ranks, not only the first two.", lambda lists: first_mismatch(lists[:2])),
        ("The order counts: compare call by call.", lambda lists: first_mismatch(list(map(sorted, lists)))),
    )
    say, praise = "the lists {}", "If this is None, groups can be made."
    return written(first_mismatch, cases, *slips, say=say, praise=praise)


def quiz(dp: int, tp: int) -> Exercise:
    return numbers(
        ("groups", dp + tp, "Each row of the grid is a group, and so is each column."),
        ("number", (dp * tp - 1) % tp, "In its tp group a rank's number is its tp coordinate: rank % tp."),
        ("shared", 1, "Rank 0's row and rank 0's column cross. In how many places?"),
    )


def all_exercises(dp: int, tp: int, backend: str = "gloo") -> tuple[Exercise, ...]:
    made = groups_exercise(dp, tp), answers_exercise(dp, tp, backend), mismatch_exercise()
    return predict(dp, tp), *made, quiz(dp, tp)
