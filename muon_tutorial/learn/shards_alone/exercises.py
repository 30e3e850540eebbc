"""Exercises of lesson 08: predictions, the size factor, a gather, an update from shards, and the quiz."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...adjusted_lr_and_decay import adjusted_lr
from ...plan.layout import Shard, shard_box
from ..exercises.judge import Diagnosis, Exercise, Par, first, guesses, numbers, why, written
from ..exercises.on_real_ranks import judge_on_ranks, say_failure
from . import cuts, on_ranks
from .cuts import DIMS, SHAPE, Comparison, compare, gradient, matrices, my_piece, nearness, pieces_alone
from .directions import HARMLESS, alone, draw_update
from .on_ranks import JUDGED, GatherRun, SurvivalRun, budget, play_gather, probe, run_survival, say_trouble

Shape = tuple[int, int]
FORMULAS = {"sqrt(max(1, m/n))": "original", "0.2·sqrt(max(m, n))": "match_rms_adamw"}
SHAPES: tuple[Shape, ...] = ((64, 256), (256, 64), (768, 768), (768, 3072))


def size_factors(shape: Shape) -> tuple[float, ...]:
    return tuple(float(adjusted_lr(1.0, name, shape)) for name in FORMULAS.values())


def shard_shape(shape: Shape, dim: int, tp: int) -> Shape:
    """The shape of a shard: ``shape`` cut along ``dim`` into equal parts."""
    rows, columns = shard_box(shape, Shard(dim), 0, tp).shape
    return rows, columns


def too_small(shape: Shape, dim: int, tp: int) -> tuple[float, ...]:
    """How many times too small each factor is if the shard's shape is used; below 1 means too large."""
    whole, shard = size_factors(shape), size_factors(shard_shape(shape, dim, tp))
    return tuple(one / other for one, other in zip(whole, shard, strict=True))


def say_factors(shape: Shape, dim: int, tp: int) -> str:
    """One example as a table: both factors for the whole and for a shard."""
    shard = shard_shape(shape, dim, tp)
    lines = [f"{'':<22}{f'whole {_say(shape)}':>16}{f'shard {_say(shard)}':>16}"]
    for name, whole, mine in zip(FORMULAS, size_factors(shape), size_factors(shard), strict=True):
        lines.append(f"{name:<22}{whole:>16.3f}{mine:>16.3f}   {whole / mine:.3f} times too small")
    return "\n".join(lines)


def say_ratios(function: Callable[[Shape, int, int], Any], tp: int) -> str:
    """A function's ratios for shapes of real models, with both cuts over tp."""
    lines = [f"{'whole':>12}  {'cut by':<9}" + "".join(f"{name:>22}" for name in FORMULAS)]
    for shape in SHAPES:
        for cut, dim in DIMS.items():
            ratios = "".join(f"{ratio:>22.2f}" for ratio in function(shape, dim, tp))
            lines.append(f"{_say(shape):>12}  {cut:<9}{ratios}")
    return "\n".join(lines)


def _say(shape: Shape) -> str:
    return f"{shape[0]} × {shape[1]}"


def check_ratio() -> Exercise:
    """The exercise: how many times too small each shard's factor is, for any shape, cut and tp."""
    cases = list(itertools.product(SHAPES, (1, 0), (2, 4, 8)))
    first_formula = f"The two have changed places: first {next(iter(FORMULAS))}."
    slips = (
        ("Divide the whole's factor by the shard's.", lambda *at: [1 / each for each in too_small(*at)]),
        (first_formula, lambda *given: too_small(*given)[::-1]),
        ("dim 1 is the columns, n; dim 0 the rows, m.", lambda shape, dim, tp: too_small(shape, 1 - dim, tp)),
    )
    hints = (
        "The shard's shape first: the side `dim` is tp times shorter, the other stays.",
        "Then the whole's factor divided by the shard's, for each of the two formulas.",
    )
    say = "{0[0]} × {0[1]}, dim {1}, tp = {2}"
    praise = "Right for every shape and cut. Where a ratio is below 1, the shard's factor is too large."
    return written(too_small, cases, *slips, say=say, hints=hints, praise=praise)


NEAR = 0.05
"""The largest distance to UVᵀ that passes. float32 stays below half of it, and Newton–Schulz exceeds it."""


def outcomes(tp: int) -> dict[str, Any]:
    """The answers to the first two predictions."""
    noise = compare(pieces_alone(matrices()["Gaussian"], 1, tp), matrices()["Gaussian"])
    largest = compare(pieces_alone(gradient(), 1, tp), gradient()).values[0]
    return {"largest": round(largest, 2), "noise_too": noise.values[0] - noise.values[-1] < 1e-6}


def guess(tp: int) -> Exercise:
    """The guess: the largest singular value of the shards' update, and whether noise gets a flat spectrum."""
    right = outcomes(tp)
    each = "That is right for each shard by itself. Side by side, lengths grow."
    hint = "Take one row of length 1 from each shard, and put them side by side. How long is the result?"
    along = f"A row of the whole is {tp} rows of length 1, one after the other."
    return guesses(
        ("largest", right["largest"], along, (1, each), (tp, "Lengths do not add; their squares do.")),
        ("noise_too", right["noise_too"], "What did you use of the gradient to find `largest`?"),
        hints=(hint, "Would that row be longer or shorter if its entries were random?"),
        praise="Squares of lengths add, whatever the entries are.",
        within=0.02,
    )


def _drawn(count: int, *shapes: Shape) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(count, *shape, generator=draw, dtype=torch.float64)) for shape in shapes]


def write_nearness() -> Exercise:
    def cosine(slip: Callable[..., Tensor]) -> Callable[..., list[Any]]:
        return lambda update, right: [slip(update, right), nearness(update, right)[1]]

    def distance(slip: Callable[..., Any]) -> Callable[..., list[Any]]:
        return lambda update, right: [nearness(update, right)[0], slip(update, right)]

    squared = "cosine: a norm is not squared here."
    norms = "distance: take the norm of the difference, not the difference of norms."
    slips = (
        ("cosine: divide by both norms.", cosine(lambda a, b: (a * b).sum())),
        (squared, cosine(lambda a, b: (a * b).sum() / (a.norm() * b.norm()) ** 2)),
        ("distance: divide it by the size of UVᵀ.", distance(lambda a, b: (a - b).norm())),
        ("distance: divide by the size of UVᵀ, not of the update.", distance(lambda a, b: nearness(b, a)[1])),
        (norms, distance(lambda a, b: (a.norm() - b.norm()).abs() / b.norm())),
        ("First the cosine, then the distance.", lambda *given: nearness(*given)[::-1]),
    )
    say = "two matrices of {0.shape[0]} × {0.shape[1]}"
    hints = ("X.norm() is a matrix's size: the root of the sum of its squared entries.",)
    praise = "Now see what a spectrum cannot show."
    return written(nearness, _drawn(2, (3, 5), (4, 4)), *slips, say=say, hints=hints, praise=praise)


def write_shares() -> Exercise:
    def parts(turned: Tensor, power: int) -> tuple[Tensor, Tensor, Tensor]:
        """The energy on the diagonal, in the square, and in the whole matrix."""
        sizes = turned.abs() ** power
        return sizes.diagonal().sum(), sizes[:, : len(turned)].sum(), sizes.sum()

    def of(share: Callable[..., list[Tensor]], power: int = 2) -> Callable[[Tensor], list[Tensor]]:
        return lambda turned: share(*parts(turned, power))

    slips = (
        ("Energy is the sum of *squared* entries.", of(lambda d, i, w: [d / w, (i - d) / w, (w - i) / w], 1)),
        ("Shares: divide by the whole energy.", of(lambda d, i, w: [d, i - d, w - i])),
        ("The square includes the diagonal: subtract it.", of(lambda d, i, w: [d / w, i / w, (w - i) / w])),
        ("Beside the diagonal means in the square.", of(lambda d, i, w: [d / w, (w - d) / w, (w - i) / w])),
    )
    say, cases = "a matrix of {0.shape[0]} × {0.shape[1]}", _drawn(1, (3, 8), (2, 3))
    praise = "The last share is wasted: there the gradient is zero."
    return written(lambda turned: list(cuts.energy_shares(turned)), cases, *slips, say=say, praise=praise)


def harmless(tp: int) -> tuple[str, str]:
    """The one matrix and cut for which shards alone are nearly right."""
    ways = [(name, cut) for name in matrices() for cut in DIMS]
    [found] = [each for each in ways if alone(*each, tp)[0].at_best < HARMLESS]
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
    praise = "For both cuts, every rank holds the whole matrix, with each entry in its place."
    return Exercise(judge, hints, praise, keeps=("gather_whole",))


def judge_result(run: GatherRun, rank: int, dim: int, result: Any) -> str | Diagnosis | None:
    cut = f"Cut by {'columns' if dim else 'rows'}, rank {rank}"
    if not isinstance(result, Tensor):
        return f"{cut}: return a matrix, not {type(result).__name__}."
    if tuple(result.shape) != SHAPE:
        piece = my_piece(probe(), dim, 0, run.tp)
        other = f"The shards were put together along dim {1 - dim}, but tp cut along dim {dim}."
        all_ranks = "Those are the shards of all ranks; those of one tp group make the matrix."
        told = why(
            (result.shape == piece.shape, "That is one shard; nothing was put together."),
            (result.shape == torch.cat([piece] * run.dp * run.tp, dim).shape, all_ranks),
            (result.shape == torch.cat([piece] * run.tp, 1 - dim).shape, other),
            (result.ndim != 2, "Put the shards side by side, without a new dimension."),
        )
        return f"{cut}: the shape is {tuple(result.shape)}, not {SHAPE}. {told}"
    if (wrong := on_ranks.first_wrong(result)) is None:
        return None
    row, column, value = wrong
    if value is None and rank >= run.tp:
        return f"{cut}: the entries are another tp group's. Pass group=group to each call."
    if value is None:
        return f"{cut}: the place at row {row}, column {column} was never filled."
    there = f"row {value // SHAPE[1]}, column {value % SHAPE[1]}"
    what = f"{cut}: the shape is right, but at row {row}, column {column} is the entry of {there}."
    shards = result.chunk(run.tp, dim)
    one = run.tp > 1 and all(shard.equal(shards[0]) for shard in shards)
    return Diagnosis(what, ("[empty] * n is one tensor, n times: make n tensors.",)) if one else what


def check_survival(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The exercise: a rank's columns of the whole update; it may send no more than an all_reduce of GGᵀ."""
    sent: list[float] = []

    def judge(run: SurvivalRun) -> str | Diagnosis | None:
        sent.append(run.sent)
        return judge_survival(run)

    play = partial(run_survival, dp=dp, tp=tp, backend=backend)
    play_it = judge_on_ranks(play, judge, lambda error: say_failure(error).partition("\nThe other")[0])
    praise = "You found the whole update from shards. If the long side is cut, a sum of GGᵀ is enough."
    return Exercise(play_it, HINTS, praise, Par("bytes", budget(tp), lambda _: sent[-1]))


HINTS = (
    "With G = U S Vᵀ, GGᵀ is U S² Uᵀ. Which matrix, times G, gives UVᵀ?",
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
                whole = " That is the whole update; keep only your own columns."
                said = f"Rank {rank}: your columns are {mine}, and this is {tuple(result.shape)}."
                return said + whole if tuple(result.shape) == SHAPE else said
    for name, begin in itertools.product(JUDGED, range(0, len(run.results), run.tp)):
        pieces = [found[name][0] for found in run.results[begin : begin + run.tp]]
        if wrong := _judge_update(torch.cat(pieces, dim=1).double(), name, run.sent):
            return wrong
    if run.sent <= (enough := budget(run.tp)):
        return None
    said = f"The update is right, but a rank sends {run.sent:,.0f} bytes. The budget is {enough:,.0f}."
    small = "GGᵀ is 64 × 64, much smaller than G."
    twice = "That is twice the budget: is it float64, or the whole matrix?"
    return Diagnosis(said, (twice if run.sent == 2 * enough else small, *HINTS[:2]))


def _judge_update(update: Tensor, name: str, sent: float) -> Diagnosis | None:
    what = f"The {name} matrix:"
    if not bool(update.isfinite().all()):
        return Diagnosis(f"{what} not all entries are finite.", ("Is there a root of a number below zero?",))
    if (result := compare(update, matrices()[name])).distance <= NEAR:
        return None
    turned = cuts.in_directions(update, matrices()[name])
    picture = draw_update(f"Your update of the {name} matrix", result, turned, "shards_alone-mine")
    said, hints = _say_wrong(update, result, name, sent)
    return Diagnosis(f"{what} {said}", hints, picture)


def _say_wrong(update: Tensor, result: Comparison, name: str, sent: float) -> tuple[str, tuple[str, ...]]:
    if not sent:
        return "no rank has sent anything, so none can know of the others' columns.", HINTS
    if result.cosine > 0.99:
        size = sum(result.values) / len(result.values)
        hint = "Is it a mean instead of a sum? Or a sum over all ranks, because group=group is missing?"
        return f"it points the right way, and its singular values are near {size:.3g}, not 1.", (hint,)
    u, values, vt = torch.linalg.svd(matrices()[name], full_matrices=False)
    for power in (-2, -1, 1, 2, 3):
        other = u @ torch.diag(values**power) @ vt
        if float((update * other).sum() / (update.norm() * other.norm())) > 0.99:
            hint = "eigh of GGᵀ gives S², the squares. Which power of S² makes S into 1?"
            return f"it is U S^{power} Vᵀ, where S^0 is wanted.", (hint,)
    return f"its distance to UVᵀ is {result.distance:.2f}, its cosine {result.cosine:.2f}.", HINTS


def all_exercises(dp: int, tp: int, backend: str = "gloo") -> tuple[Exercise, ...]:
    gathered, survived = check_gather(dp, tp, backend), check_survival(dp, tp, backend)
    return guess(tp), write_nearness(), write_shares(), check_ratio(), gathered, survived, quiz(tp)


def quiz(tp: int) -> Exercise:
    cosine = compare(pieces_alone(gradient(), 1, tp), gradient()).cosine
    ring = "On a ring, a rank sends tp − 1 shards. How many entries has a shard?"
    both = "It stands in the first line of your table of ratios, in the last column."
    return numbers(
        ("cosine", cosine, "Your function nearness has printed it above, before the distance."),
        ("factor", too_small(SHAPE, 1, tp)[1], both),
        ("sent", SHAPE[0] * SHAPE[1] // tp * (tp - 1), ring),
        within=0.01,
    )
