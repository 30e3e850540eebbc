"""Exercises of lesson 00: which rank keeps which part of the momentum, a rank's own columns, and the quiz."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import Grid, Plan
from ...plan.layout import Box
from ..exercises.judge import Diagnosis, Exercise, numbers, value_of
from ..pictures.holdings import RankBoxes, holders_of, momentum_holdings, say_held
from .on_ranks import SHAPE, TP_DIM, my_columns, weight
from .pictures import draw_grid

SPOILERS = {"holders": [r"rank 3[^;]*rows 24 to 47", r"\bholders\W+(\w[\w, ]*\W+)?\[3\]"]}

TP_HINT = "rank % tp is a rank's place along tp: 0, 1, … from left to right, in every row of the grid."
CUT_HINT = "matrix.chunk(tp, dim=1) is a list of tp pieces, side by side. Take the one at your place."


def guess_holders(plan: Plan) -> Exercise:
    """The prediction: which ranks keep the momentum's entry in the last row and column?"""
    grid, held, right = plan.grid, momentum_holdings(plan), last_holders(plan)

    def judge(holders: object) -> str | None:
        if not isinstance(holders, (list, tuple, set)) or not all(isinstance(rank, int) for rank in holders):
            return "Give a list of ranks, such as [0, 1]."
        if strangers := [rank for rank in holders if rank not in grid.ranks]:
            return f"There is no rank {strangers[0]}; ranks go from 0 to {grid.world_size - 1}."
        extra, missing = sorted(set(holders) - set(right)), sorted(set(right) - set(holders))
        if extra:
            return f"{grid.at(extra[0])} keeps {say_held(held[extra[0]], SHAPE)} only."
        return f"{len(holders)} named, but {grid.at(missing[0])} keeps it." if missing else None

    hints = ("The last row belongs to the last place along dp, the last column to the last place along tp.",)
    return Exercise(judge, hints, "Cut both ways, the momentum has no copies left.")


def last_holders(plan: Plan) -> list[int]:
    """The ranks that keep the momentum's entry in the last row and column."""
    return holders_of(momentum_holdings(plan), SHAPE[0] - 1, SHAPE[1] - 1)


def check_columns(dp: int, tp: int) -> Exercise:
    """The exercise: the columns of a whole matrix that a rank holds."""
    grid, whole = Grid.of(dp=dp, tp=tp), weight(0)

    def judge(function: Callable[[Tensor, int], Any]) -> str | Diagnosis | None:
        given = [value_of(function, whole, rank, told=f"Rank {rank}: {{}}") for rank in grid.ranks]
        for rank, mine in enumerate(given):
            if not isinstance(mine, Tensor):
                return f"Rank {rank}: return a tensor, not a {type(mine).__name__}."
            if not torch.equal(mine, my_columns(whole, rank, tp)):
                return _judge_columns(grid, rank, given)
        return None

    return Exercise(judge, (TP_HINT, CUT_HINT), "Ranks of one column of the grid hold the same columns.")


def _judge_columns(grid: Grid, rank: int, given: Sequence[Tensor]) -> Diagnosis:
    """What is wrong with the piece of ``rank``, and a picture of all pieces."""
    whole, tp, at = weight(0), grid.size("tp"), grid.at(rank)
    held = [RankBoxes(each, _found_in(whole, mine)) for each, mine in enumerate(given)]
    picture = draw_grid(grid, held, "What your function takes", "grey: not taken", "first_look-taken")
    due = my_columns(whole, rank, tp)
    if not held[rank].boxes:
        what = f"{at} gets a tensor of shape {tuple(given[rank].shape)} that is no block of the matrix."
        return Diagnosis(what, (CUT_HINT,), picture)
    said = f"{at} gets {say_held(held[rank], SHAPE)}"
    if given[rank].shape[TP_DIM] == SHAPE[TP_DIM] and tp > 1:
        return Diagnosis(f"{said}: rows are cut, and columns should be.", (CUT_HINT,), picture)
    if given[rank].shape != due.shape:
        return Diagnosis(f"{said}: {due.shape[1]} of the columns are its own.", (CUT_HINT,), picture)
    return Diagnosis(f"{said}: they belong to another place along tp.", (TP_HINT,), picture)


def _found_in(whole: Tensor, piece: Tensor) -> tuple[Box, ...]:
    """The box of the whole matrix that equals ``piece``; empty if there is none."""
    if not isinstance(piece, Tensor) or piece.dim() != 2 or not piece.numel():
        return ()
    for row, column in (whole == piece[0, 0]).nonzero().tolist():
        box = Box((row, column), (piece.shape[0], piece.shape[1]))
        if torch.equal(whole[box.slices], piece):
            return (box,)
    return ()


def quiz(plan: Plan) -> Exercise:
    at = plan.grid.at(0)
    return numbers(
        ("copies", at.size("dp"), "Count the ranks whose weight has the same letter as rank 0's."),
        ("kept", plan.buckets[0].stored_shards(at)[0].numel, "Ask reports[0].momentum.numel()."),
    )
