"""Exercises of lesson 08: what becomes of singular values, a gather on real ranks, and the quiz."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..exercises.judge import Exercise, numbers
from ..exercises.on_real_ranks import judge_on_ranks
from .cuts import SHAPE, compare, gradient, my_piece, pieces_alone
from .on_ranks import GatherRun, first_wrong, play_gather, probe, say_trouble


def predict(tp: int) -> Exercise:
    """The guess: the largest singular value of the pieces' update, and whether it is UVᵀ."""
    result = compare(pieces_alone(gradient(), 1, tp), gradient())

    def judge(largest: object, is_uvt: object) -> str | None:
        if not isinstance(largest, (int, float)) or not isinstance(is_uvt, bool):
            return "Give a number, and True or False."
        if abs(largest - result.values[0]) > 0.03:
            return f"largest: {largest:g} is not it. {_why_not(largest, tp)}"
        if is_uvt != (result.distance < 1e-6):
            return "is_uvt: a UVᵀ has no singular value but 1."
        return None

    hints = ("Take one row of length 1 from each piece, and put them side by side. How long is the result?",)
    return Exercise(judge, hints, "The whole has more length than any piece, in every direction.")


def _why_not(largest: float, tp: int) -> str:
    if largest == 1:
        return "1 is right for each piece by itself. Put side by side, lengths grow."
    if largest == tp:
        return "Lengths do not add; their squares do."
    return "Run the next cells, and look at what comes out."


def check_gather(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The exercise: put the pieces of a tp group together, cut by columns or by rows, on real ranks."""

    judge = judge_on_ranks(
        lambda function: play_gather(function, dp, tp, backend),
        lambda run: next(filter(None, (judge_result(run, *each) for each in run.each())), None),
        lambda error: " ".join(say_trouble(error, dp, tp).split()),
    )

    hints = (
        "dist.all_gather(pieces, piece, group=group) fills the list, in the order of the group.",
        "torch.cat(pieces, dim=...) puts them side by side along the dimension that was cut.",
    )
    return Exercise(judge, hints, "Every rank holds the whole matrix, every number in its place, either way.")


def judge_result(run: GatherRun, rank: int, dim: int, result: Any) -> str | None:
    cut = f"Cut by {'columns' if dim else 'rows'}, rank {rank}"
    if not isinstance(result, Tensor):
        return f"{cut}: return a matrix, not {type(result).__name__}."
    if tuple(result.shape) != SHAPE:
        return f"{cut}: the shape is {tuple(result.shape)}, not {SHAPE}. {_why_shape(run, dim, result)}"
    wrong = first_wrong(result)
    if wrong is None:
        return None
    row, column, value = wrong
    if value is None:
        return f"{cut}: the place at row {row}, column {column} was never filled."
    there = f"row {value // SHAPE[1]}, column {value % SHAPE[1]}"
    return f"{cut}: the shape is right, but at row {row}, column {column} stands the number of {there}."


def _why_shape(run: GatherRun, dim: int, result: Tensor) -> str:
    piece = my_piece(probe(), dim, 0, run.tp)
    if result.shape == piece.shape:
        return "That is one piece; nothing was put together."
    if result.shape == torch.cat([piece] * run.dp * run.tp, dim).shape:
        return "Those are the pieces of all ranks; the tp line alone holds the matrix once."
    if result.shape == torch.cat([piece] * run.tp, 1 - dim).shape:
        return f"The pieces were put together along dim {1 - dim}, but tp cut along dim {dim}."
    return "" if result.ndim == 2 else "Put the pieces side by side, without a new dimension."


def quiz(tp: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    result = compare(pieces_alone(gradient(), 1, tp), gradient())
    received = SHAPE[0] * SHAPE[1] // tp * (tp - 1)
    expected = {"largest": result.values[0], "cosine": result.cosine, "received": received}
    why = {
        "largest": "Ask alone.values[0].",
        "cosine": "Ask alone.cosine.",
        "received": "A rank receives every piece but its own: (tp - 1) * pieces[0].numel().",
    }
    return numbers(expected, why, within=0.01)
