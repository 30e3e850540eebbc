"""Exercises of lesson 08: predictions, a gather on real ranks, an update from shards, and the quiz."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..exercises.judge import Diagnosis, Exercise, Par, first, numbers, why
from ..exercises.on_real_ranks import judge_on_ranks, say_failure
from .cuts import DIMS, SHAPE, Comparison, compare, gradient, matrices, my_piece, pieces_alone
from .directions import draw_update, is_harmless
from .factors import check_ratio, too_small
from .on_ranks import GatherRun, first_wrong, play_gather, probe, say_trouble
from .surviving import JUDGED, SurvivalRun, budget, run_survival

SPOILERS = {
    "largest": [r"singular values\s+2\.000", r"\blargest\W+\w*\W+2\.0"],
    "noise_too": [r"\bnoise_too\s+\S+\s+True\b"],
    "harmless": [r"\bharmless\b.*\('Gaussian', 'rows'\)", r"Gaussian, by rows: cosine"],
}
"""Patterns that would give a prediction away before the cells tagged ``answer``."""
NEAR = 0.05
"""The largest distance to UVᵀ that passes; float32 needs less than half of it, Newton–Schulz more."""


def outcomes(tp: int) -> dict[str, Any]:
    """The answers to the first two predictions."""
    noise = compare(pieces_alone(matrices()["Gaussian"], 1, tp), matrices()["Gaussian"])
    largest = compare(pieces_alone(gradient(), 1, tp), gradient()).values[0]
    return {"largest": round(largest, 2), "noise_too": noise.values[0] - noise.values[-1] < 1e-6}


def guess(tp: int) -> Exercise:
    """The guess: the largest singular value of the shards' update, and whether noise gets a flat spectrum."""
    right = outcomes(tp)

    def judge(largest: object, noise_too: object) -> str | None:
        if not isinstance(largest, (int, float)) or not isinstance(noise_too, bool):
            return "Give a number, and True or False."
        if abs(largest - right["largest"]) > 0.03:
            told = why(
                (largest == 1, "1 is right for each shard by itself. Side by side, lengths grow."),
                (largest == tp, "Lengths do not add; their squares do."),
                otherwise=f"A row of the whole is {tp} rows of length 1, one after the other.",
            )
            return f"largest: {largest:g} is not it. {told}"
        if noise_too != right["noise_too"]:
            return "noise_too: what did you use of the gradient to find `largest`?"
        return None

    hints = ("Take one row of length 1 from each shard, and put them side by side. How long is the result?",)
    return Exercise(judge, hints, "Squares of lengths add, whatever the entries are.")


def harmless(tp: int) -> tuple[str, str]:
    """The one matrix and cut for which shards alone are nearly right."""
    [found] = [(name, cut) for name in matrices() for cut in DIMS if is_harmless(name, cut, tp)]
    return found


def check_gather(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The exercise: join the shards of a tp group, cut by columns or by rows, on real ranks."""

    judge = judge_on_ranks(
        lambda function: play_gather(function, dp, tp, backend),
        lambda run: first(judge_result(run, *each) for each in run.each()),
        lambda error: " ".join(say_trouble(error, dp, tp).split()),
    )

    hints = (
        "dist.all_gather(shards, shard, group=group) fills the list, in the order of the group.",
        "torch.cat(shards, dim=...) puts them side by side along the dimension that was cut.",
    )
    praise = "Every rank holds the whole matrix, each entry in its place, either way."
    return Exercise(judge, hints, praise, keeps=("gather_whole",))


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
    return f"{cut}: the shape is right, but at row {row}, column {column} is the entry of {there}."


def _why_shape(run: GatherRun, dim: int, result: Tensor) -> str:
    piece = my_piece(probe(), dim, 0, run.tp)
    if result.shape == piece.shape:
        return "That is one shard; nothing was put together."
    if result.shape == torch.cat([piece] * run.dp * run.tp, dim).shape:
        return "Those are the shards of all ranks; those of one tp group make the matrix."
    if result.shape == torch.cat([piece] * run.tp, 1 - dim).shape:
        return f"The shards were put together along dim {1 - dim}, but tp cut along dim {dim}."
    return "" if result.ndim == 2 else "Put the shards side by side, without a new dimension."


def check_survival(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The exercise: a rank's columns of the whole update, for at most the bytes of an all_reduce of GGᵀ."""
    sent: list[float] = []

    def judge(run: SurvivalRun) -> str | Diagnosis | None:
        sent.append(run.sent)
        return judge_survival(run)

    play = partial(run_survival, dp=dp, tp=tp, backend=backend)
    play_it = judge_on_ranks(play, judge, lambda error: say_failure(error).partition("\nThe other")[0])
    praise = "The whole's update, from shards. If the long side is cut, a sum of GGᵀ is enough."
    return Exercise(play_it, HINTS, praise, Par("bytes", budget(tp), lambda _: sent[-1]))


HINTS = (
    "With G = U S Vᵀ, GGᵀ is U S² Uᵀ. What times G gives UVᵀ?",
    "UVᵀ = (GGᵀ)^(-1/2) G. A rank has its columns of G, so it lacks only GGᵀ. What does each rank add to it?",
    "gram = shard @ shard.T, summed over the group. torch.linalg.eigh(gram) gives S² and U.",
)


def judge_survival(run: SurvivalRun) -> str | Diagnosis | None:
    """What is wrong with a run's updates or bytes; None if nothing is."""
    mine = (SHAPE[0], SHAPE[1] // run.tp)
    for rank, found in enumerate(run.results):
        for result, _ in found.values():
            if not isinstance(result, Tensor):
                return f"Rank {rank}: return a matrix, not {type(result).__name__}."
            if tuple(result.shape) != mine:
                whole = (
                    " That is the whole update; keep only your own columns."
                    if tuple(result.shape) == SHAPE
                    else ""
                )
                return f"Rank {rank}: your columns are {mine}, and this is {tuple(result.shape)}.{whole}"
    for name in JUDGED:
        for begin in range(0, len(run.results), run.tp):
            pieces = [found[name][0] for found in run.results[begin : begin + run.tp]]
            wrong = _judge_update(torch.cat(pieces, dim=1).double(), name, run.sent)
            if wrong is not None:
                return wrong
    if run.sent > budget(run.tp):
        return _over_budget(run)
    return None


def _judge_update(update: Tensor, name: str, sent: float) -> Diagnosis | None:
    what = f"The {name} matrix:"
    if not bool(update.isfinite().all()):
        return Diagnosis(f"{what} not all entries are finite.", ("Is there a root of a number below zero?",))
    result = compare(update, matrices()[name])
    if result.distance <= NEAR:
        return None
    picture = draw_update(f"Your update of the {name} matrix", update, matrices()[name], "shards_alone-mine")
    said, hints = _say_wrong(update, result, name, sent)
    return Diagnosis(f"{what} {said}", hints, picture)


def _say_wrong(update: Tensor, result: Comparison, name: str, sent: float) -> tuple[str, tuple[str, ...]]:
    gradient = matrices()[name]
    if not sent:
        return "no rank has sent anything, so none can know of the others' columns.", HINTS
    if result.cosine > 0.99:
        size = sum(result.values) / len(result.values)
        hint = "Is it a mean instead of a sum? Or a sum over all ranks, because group=group is missing?"
        return f"it points the right way, and its singular values are near {size:.3g}, not 1.", (hint,)
    u, values, vt = torch.linalg.svd(gradient, full_matrices=False)
    for power in (-2, -1, 1, 2, 3):
        other = u @ torch.diag(values**power) @ vt
        if float((update * other).sum() / (update.norm() * other.norm())) > 0.99:
            hint = "eigh of GGᵀ gives S², the squares. Which power of S² makes S into 1?"
            return f"it is U S^{power} Vᵀ, where S^0 is wanted.", (hint,)
    return f"its distance to UVᵀ is {result.distance:.2f}, its cosine {result.cosine:.2f}.", HINTS


def _over_budget(run: SurvivalRun) -> Diagnosis:
    said = (
        f"The update is right, but a rank sends {run.sent:,.0f} bytes. The budget is {budget(run.tp):,.0f}."
    )
    if run.sent == 2 * budget(run.tp):
        return Diagnosis(said, ("Twice too many: is it float64, or the whole matrix?", *HINTS[:2]))
    return Diagnosis(said, ("GGᵀ is 64 × 64, much smaller than G.", *HINTS[:2]))


def all_exercises(dp: int, tp: int, backend: str = "gloo") -> tuple[Exercise, ...]:
    """The notebook's exercises in order: guess, ratio, gather, update from shards, quiz."""
    on_ranks = check_gather(dp, tp, backend), check_survival(dp, tp, backend)
    return guess(tp), check_ratio(), *on_ranks, quiz(tp)


def quiz(tp: int) -> Exercise:
    """Three numbers that the notebook measured."""
    result = compare(pieces_alone(gradient(), 1, tp), gradient())
    ring = "On a ring, a rank sends as many shards as it has neighbours: (tp - 1) * shards[0].numel()."
    both = "lesson.too_small((64, 256), 1, tp) gives both; the second is asked for."
    return numbers(
        ("cosine", result.cosine, "Ask alone.cosine."),
        ("factor", too_small(SHAPE, 1, tp)[1], both),
        ("sent", SHAPE[0] * SHAPE[1] // tp * (tp - 1), ring),
        within=0.01,
    )
