"""Exercises of lesson 06: the groups of a rank and of any grid, shapes of the pieces of a weight, the quiz.

What is said of a wrong answer names the first wrong group or tp position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import Coordinate, Grid
from ..exercises.judge import Exercise, numbers, value_of
from .on_ranks import DIM, KINDS, UP, CutKind, ShapeOf, local_shape, plan_of

SHAPES = ((10, 8), (6, 10), (7, 3), (12, 12), (1, 5), (64, 256))
PARTS = (1, 2, 3, 4, 5, 8)
GRIDS = ((2, 3), (3, 2), (2, 2), (1, 4), (4, 1), (3, 3), (5, 2), (1, 1), (2, 7))
Groups = Callable[[int, int], Any]


def predict(dp: int, tp: int) -> Exercise:
    """The guess: with whom is the last rank in a group?"""
    at = Grid.of(dp=dp, tp=tp).at(dp * tp - 1)

    def judge(dp_group: object, tp_group: object) -> str | None:
        if sorted_or_none(dp_group) == list(at.group("tp")) != list(at.group("dp")):
            return f"dp_group: {dp_group} is its row. Along a row tp changes, and dp does not."
        for axis, said in (("dp", dp_group), ("tp", tp_group)):
            if sorted_or_none(said) is None:
                return f"{axis}_group: give a list of ranks, such as [0, 1]."
            if wrong := _judge_members(axis, list(said), at):  # type: ignore[call-overload]
                return wrong
        return None

    hints = ("Press its button above the picture.",)
    return Exercise(judge, hints, "One row, one column, and it stands where they cross.")


def sorted_or_none(said: object) -> list[int] | None:
    """A list of whole numbers in order, or None where it is none."""
    if not isinstance(said, (list, tuple, set, frozenset, range)):
        return None
    return sorted(said) if all(type(rank) is int for rank in said) else None


def _judge_members(axis: str, said: Sequence[int], at: Coordinate) -> str | None:
    """What is wrong with a group of the rank that stands at ``at``."""
    right, name = at.group(axis), f"{axis} group {list(said)}"
    for rank in said:
        if rank not in at.grid.ranks:
            return f"{name}: there is no rank {rank}; ranks go from 0 to {at.grid.world_size - 1}."
    stranger = next((rank for rank in said if rank not in right), None)
    if stranger is not None:
        other, found = "tp" if axis == "dp" else "dp", at.grid.at(stranger)
        return f"{name}: {found} and {at} differ in {other}; in a {axis} group only {axis} does."
    if len(set(said)) < len(said):
        return f"{name}: a rank stands in it twice."
    missing = [rank for rank in right if rank not in said]
    line = {"dp": "column", "tp": "row"}[axis]
    return f"{name}: {at.grid.at(missing[0])} is missing; it stands in the same {line}." if missing else None


def groups_exercise(dp: int, tp: int) -> Exercise:
    """The exercise: a function that returns the dp groups and the tp groups of any grid."""
    grids = dict.fromkeys([(dp, tp), *GRIDS])

    def judge(function: Groups) -> str | None:
        for sizes in grids:
            wrong = _judge_groups(value_of(function, *sizes), Grid.of(dp=sizes[0], tp=sizes[1]))
            if wrong:
                return f"On a grid of dp {sizes[0]}, tp {sizes[1]}: {wrong}"
        return None

    hints = (
        "There are tp dp groups, one for each column of the grid; and dp tp groups, one for each row.",
        "Neighbours in a row are 1 apart, neighbours in a column tp apart.",
        "range(first, end, step) counts in steps.",
    )
    return Exercise(judge, hints, f"Right on {len(grids)} grids, of one row and of one column, too.")


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
    return next(filter(None, (_judge_axis(axis, found, grid) for axis, found in listed.items())), None)


def read_groups(said: object) -> list[list[int]] | None:
    """Groups as lists, in the order given; None where they are no list of lists of whole numbers."""
    if not isinstance(said, (list, tuple)) or any(sorted_or_none(group) is None for group in said):
        return None
    return [list(group) for group in said]


def _judge_axis(axis: str, listed: Sequence[Sequence[int]], grid: Grid) -> str | None:
    seen: dict[int, Sequence[int]] = {}
    for group in listed:
        if not group:
            return f"a {axis} group is empty."
        twice = next((rank for rank in group if rank in seen), None)
        if twice is not None:
            return f"rank {twice} is in two {axis} groups, {list(seen[twice])} and {list(group)}."
        first = group[0] if group[0] in grid.ranks else 0
        if wrong := _judge_members(axis, group, grid.at(first)):
            return wrong
        seen.update(dict.fromkeys(group, group))
    lost = next((rank for rank in grid.ranks if rank not in seen), None)
    return None if lost is None else f"{grid.at(lost)} is in no {axis} group."


def shapes_exercise() -> Exercise:
    """The exercise: local shapes, column parallel and row parallel, of sizes that tp does not divide."""

    def judge(function: ShapeOf) -> str | None:
        for shape, tp in ((shape, tp) for tp in PARTS for shape in SHAPES):
            for kind in KINDS:
                case = f"A weight of {shape}, {kind} parallel, tp {tp}"
                said = [
                    value_of(function, shape, kind, place, tp, told=f"{case}, place {place}: {{}}")
                    for place in range(tp)
                ]
                if wrong := _judge_shapes(said, shape, kind, tp):
                    return f"{case}: {wrong}"
        return None

    hints = (
        "Column parallel cuts dimension 0, out; row parallel cuts dimension 1, in. The other stays whole.",
        "The length of a run is n / tp, rounded up: -(-n // tp).",
        "What is left for a place is n - step * place; never less than 0, never more than step.",
    )
    return Exercise(judge, hints, "As torch.chunk cuts, for places that get less, or nothing, too.")


def _judge_shapes(said: Sequence[Any], shape: tuple[int, int], kind: CutKind, tp: int) -> str | None:
    right = [local_shape(shape, kind, place, tp) for place in range(tp)]
    for place, (one, expected) in enumerate(zip(said, right, strict=True)):
        if not _is_pair(one):
            return f"give a pair (rows, columns) of whole numbers for place {place}, not {one!r}."
        if tuple(one) != expected:
            pieces = [(int(piece[0]), int(piece[1])) for piece in said if _is_pair(piece)]
            return f"place {place} holds {expected}, not {tuple(one)}. {_why_not(pieces, shape, kind, tp)}"
    return None


def _is_pair(said: object) -> bool:
    """Whether it is a pair of whole numbers. 4.0 is none: the lesson cuts with them."""
    pair = isinstance(said, (tuple, list)) and len(said) == 2
    return pair and all(hasattr(value, "__index__") for value in said)  # type: ignore[attr-defined]


def _why_not(said: Sequence[tuple[int, int]], shape: tuple[int, int], kind: CutKind, tp: int) -> str:
    dim, length = DIM[kind], shape[DIM[kind]]
    other, sides = KINDS[1 - dim], ("out", "in")
    held = [piece[dim] for piece in said]
    if any(piece[1 - dim] != shape[1 - dim] for piece in said):
        swapped = all(piece == local_shape(shape, other, place, tp) for place, piece in enumerate(said))
        what = f"That is {other} parallel" if swapped else f"Dimension {1 - dim} stays whole"
        return f"{what}: {kind} parallel cuts dimension {dim}, {sides[dim]}."
    if all(piece == length for piece in held):
        return "That is the whole weight. tp cuts it."
    if min(held) < 0:
        return "A length is never below 0: once all is given away, a place holds nothing."
    if sum(held) != length:
        fault = "Round up" if sum(held) < length else "A place cannot hold more than is left"
        return f"Your places hold {sum(held)} of {length} together. {fault}."
    return f"Together yours hold all, but in runs of {held}; torch.chunk fills one place after another."


def quiz(dp: int, tp: int) -> Exercise:
    """Numbers that the notebook has measured."""
    plan = plan_of(dp, tp)
    expected = {
        "groups": dp + tp,
        "rows": local_shape(UP, "column", tp - 1, tp)[0],
        "kept": sum(held.numel for bucket in plan.buckets for held in bucket.stored_shards(plan.grid.at(0))),
    }
    why = {
        "groups": "Ask len(dp_groups) + len(tp_groups) of what your function returns.",
        "rows": f"Ask local_shape({UP}, 'column', tp - 1, tp).",
        "kept": "Ask kept[0].numbers, or add up rank 0's line.",
    }
    return numbers(expected, why)


def all_exercises(dp: int, tp: int) -> tuple[Exercise, Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: predict, groups, shapes, quiz."""
    return predict(dp, tp), groups_exercise(dp, tp), shapes_exercise(), quiz(dp, tp)
