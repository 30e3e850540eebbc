"""Exercises of lesson 00: a rank's own columns, the part of the momentum that it keeps, and the quiz."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ... import Grid, Plan
from ...plan.layout import Box
from ..exercises.judge import Diagnosis, Exercise, MistakeError, numbers, value_of
from ..pictures.holdings import Boxes, say_held
from .on_ranks import SHAPE, TP_DIM, my_columns, weight
from .pictures import draw_grid

TP_HINT = "rank % tp is a rank's place along tp: 0, 1, … from left to right, in every row of the grid."
CUT_HINT = "matrix.chunk(tp, dim=1) is a list of tp pieces, side by side. Take the one at your place."


def check_columns(dp: int, tp: int) -> Exercise:
    grid, whole = Grid.of(dp=dp, tp=tp), weight(0)

    def judge(function: Callable[[Tensor, int], Any]) -> str | Diagnosis | None:
        given = [value_of(function, whole, rank, told=f"Rank {rank}: {{}}") for rank in grid.ranks]
        for rank, mine in enumerate(given):
            if not isinstance(mine, Tensor):
                return f"Rank {rank}: return a tensor, not a {type(mine).__name__}."
            if not torch.equal(mine, my_columns(whole, rank, tp)):
                return _judge_columns(grid, rank, given)
        return _judge_longer(check_columns, grid, function)

    return Exercise(judge, (TP_HINT, CUT_HINT), "Ranks of one column of the grid hold the same columns.")


def check_momentum(dp: int, tp: int) -> Exercise:
    """The exercise: a rank has some columns; which part of their momentum does it keep?"""
    whole, pieces = weight(0), [my_columns(weight(0), rank, tp) for rank in range(dp * tp)]
    parts = [piece.flatten().chunk(dp) for piece in pieces]
    kept = [parts[rank][rank // tp] for rank in range(dp * tp)]
    slips = (
        ("those of another place along dp, which is rank // tp.", lambda r: parts[r][r % dp]),
        ("not cut over tp: take the rank's own columns first.", lambda r: whole.flatten().chunk(dp)[r // tp]),
        ("cut between columns: write them out row by row first.", lambda r: pieces[r].chunk(dp, 1)[r // tp]),
        ("all its columns: along dp, each rank keeps only a part.", lambda r: pieces[r]),
    )

    def judge(function: Callable[[Tensor, int], Any]) -> str | None:
        given = [value_of(function, whole, rank, told=f"Rank {rank}: {{}}") for rank in range(dp * tp)]
        for rank, mine in enumerate(given):
            if not isinstance(mine, Tensor):
                return f"Rank {rank}: return a tensor, not a {type(mine).__name__}."
            if not torch.equal(mine.flatten(), kept[rank]):
                due = kept[rank].numel()
                said = "as many as it should" if mine.numel() == due else f"and should keep {due}"
                made = (what for what, slip in slips if _all_equal(given, slip))
                said = f"Rank {rank} gets {mine.numel()} entries, {said}. They are"
                return f"{said} {next(made, 'not the ones that it keeps.')}"
            if mine.ndim > 1:
                return "Cut the flat list, since a part may end in the middle of a row."
        for rank, piece in enumerate(my_columns(whole[1:], rank, tp) for rank in range(dp * tp)):
            part = piece.flatten().chunk(dp)[rank // tp]
            told = f"With {len(whole) - 1} rows, rank {rank}: {{}}"
            mine = value_of(function, whole[1:], rank, told=told) if piece.numel() % dp == 0 else part
            if not isinstance(mine, Tensor) or not torch.equal(mine.flatten(), part):
                return f"Right for {len(whole)} rows, not for one less: cut the flat list, wherever rows end."
        return _judge_longer(check_momentum, Grid.of(dp=dp, tp=tp), function)

    hints = ("mine.chunk(dp) is a list of dp equal parts. A rank's place along dp is rank // tp.",)
    return Exercise(judge, hints, "Cut both ways, the momentum has no copies left.")


def _judge_longer(check: Callable[[int, int], Exercise], grid: Grid, function: Any) -> str | None:
    """On a square grid, judge the notebook's function on a longer one, too, where dp and tp are not alike."""
    (dp, tp), names = grid.sizes, getattr(function, "__globals__", {})
    if dp != tp or not {"dp", "tp"} <= names.keys():
        return None
    try:
        with patch.dict(names, dp=dp + 1):
            wrong = check(dp + 1, tp).judge(function)
    except MistakeError as mistake:
        wrong = str(mistake)
    said = wrong.what if isinstance(wrong, Diagnosis) else wrong
    return said and f"Right on {grid}, but not on dp={dp + 1} × tp={tp}: is dp used where tp belongs? {said}"


def _all_equal(given: Sequence[Tensor], slip: Callable[[int], Any]) -> bool:
    try:
        return all(torch.equal(mine, slip(rank)) for rank, mine in enumerate(given))
    except IndexError:  # a wrong cut makes fewer parts
        return False


def _judge_columns(grid: Grid, rank: int, given: Sequence[Tensor]) -> Diagnosis:
    """What is wrong with the piece of ``rank``, and a picture of all pieces."""
    whole, tp, at = weight(0), grid.size("tp"), grid.at(rank)
    held = [_found_in(whole, mine) for mine in given]
    picture = draw_grid(grid, held, "What your function takes", "grey: not taken", "first_look-taken")
    due = my_columns(whole, rank, tp)
    if not held[rank]:
        what = f"{at} gets a tensor of shape {tuple(given[rank].shape)} that is no block of the matrix."
        return Diagnosis(what, (CUT_HINT,), picture)
    said = f"{at} gets {say_held(held[rank], SHAPE)}"
    if given[rank].shape[TP_DIM] == SHAPE[TP_DIM] and tp > 1:
        return Diagnosis(f"{said}: rows are cut, and columns should be.", (CUT_HINT,), picture)
    if given[rank].shape != due.shape:
        return Diagnosis(f"{said}: {due.shape[1]} of the columns should be its own.", (CUT_HINT,), picture)
    return Diagnosis(f"{said}: they belong to another place along tp.", (TP_HINT,), picture)


def _found_in(whole: Tensor, piece: Tensor) -> Boxes:
    """The box of the whole matrix that equals ``piece``; empty if there is none."""
    if not isinstance(piece, Tensor) or piece.dim() != 2 or not piece.numel():
        return ()
    for row, column in (whole == piece[0, 0]).nonzero().tolist():
        box = Box((row, column), (piece.shape[0], piece.shape[1]))
        if torch.equal(whole[box.slices], piece):
            return (box,)
    return ()


def check_join(dp: int, tp: int) -> Exercise:
    wanted = weight(0)
    pieces = [my_columns(wanted, rank, tp) for rank in range(dp * tp)]

    def judge(function: Callable[[list[Tensor]], Any]) -> str | Diagnosis | None:
        whole = value_of(function, list(pieces))
        if not isinstance(whole, Tensor):
            return f"Return a tensor, not a {type(whole).__name__}."
        if torch.equal(whole, wanted):
            return _judge_longer(check_join, Grid.of(dp=dp, tp=tp), function)
        what = f"The weight is {SHAPE[0]} × {SHAPE[1]}; yours is {' × '.join(map(str, whole.shape))}."
        if tuple(whole.shape) == (SHAPE[0], dp * SHAPE[1]):
            return Diagnosis(what, ("Along dp the columns are copies: take only the ranks 0 to tp − 1.",))
        if len(whole) == tp * SHAPE[0] > SHAPE[0]:
            return Diagnosis(what, ("The pieces stand one above the other. Side by side is dim=1.",))
        if whole.shape == wanted.shape:
            return "The columns are not in the order of the ranks 0 to tp − 1."
        return Diagnosis(what, ("How many ranks together hold each column once?",))

    return Exercise(judge, (), "The ranks of one row of the grid hold everything once.")


def all_exercises(plan: Plan) -> tuple[Exercise, ...]:
    dp, tp = plan.grid.size("dp"), plan.grid.size("tp")
    return check_columns(dp, tp), check_momentum(dp, tp), check_join(dp, tp), quiz(plan)


def quiz(plan: Plan) -> Exercise:
    at = plan.grid.at(0)
    kept = plan.buckets[0].stored_shards(at)[0].numel
    return numbers(
        ("copies", at.size("dp") + 1, "Ranks at one place along tp hold the same columns."),
        ("kept", kept, "dp cuts the flat list of its entries into equal parts."),
    )
