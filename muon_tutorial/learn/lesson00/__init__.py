"""What notebook 00 imports: one matrix, its gradients, the picture of its holders, and the guess about them.

The gradients are small multiples of 1/64, so that their sum over dp has no rounding: any order gives the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import Coordinate, Grid, Matrix, Muon, Plan, Shard, build_mesh, zero1
from ...plan.layout import shard_box
from ..checks.exercise import Exercise, numbers
from ..inputs import measure
from ..pictures import figures
from ..pictures.holdings import (
    Held,
    Moment,
    compute_holdings,
    holders_of,
    momentum_holdings,
    name_contents,
    weight_holdings,
)
from ..pictures.picture import Picture
from ..widgets.shell import Shell, choice, show, slider

SHAPE = (48, 64)
TP_DIM = 1


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank sends back from a step: its weight before and after, and the momentum it keeps."""

    before: Tensor
    momentum: Tensor
    after: Tensor


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the lesson: one matrix, cut by columns over tp, its momentum cut over dp."""
    return zero1([Matrix(0, "W", SHAPE, (("tp", Shard(TP_DIM)),))], Grid.of(dp=dp, tp=tp))


def weight(seed: int) -> Tensor:
    """The whole matrix, the same on every rank."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) / 8


def local_gradient(seed: int, dp_position: int) -> Tensor:
    """The whole gradient of the data that one dp position has seen."""
    generator = torch.Generator().manual_seed(1000 * (seed + 1) + dp_position)
    return torch.randint(-64, 65, SHAPE, generator=generator) / 64


def mean_gradient(seed: int, dp: int) -> Tensor:
    """The gradient of all data: the mean over dp positions."""
    return torch.stack([local_gradient(seed, position) for position in range(dp)]).sum(0) / dp


def my_columns(matrix: Tensor, rank: int, tp: int) -> Tensor:
    """A copy of the columns of ``matrix`` that a rank holds when tp cuts it."""
    box = shard_box(tuple(matrix.shape), Shard(TP_DIM), rank % tp, tp)
    return matrix[box.slices].clone()


def join_columns(pieces: Sequence[Tensor]) -> Tensor:
    """The whole matrix from the pieces of one dp position, in the order of tp."""
    return torch.cat(list(pieces), dim=TP_DIM)


def picture_before(plan: Plan) -> Picture:
    """The weight, before anything has run: who holds which columns."""
    moment = Moment("Before: the weight", "tp cuts it, dp copies it", weight_holdings(plan))
    return figures.draw_holdings([moment], SHAPE, "lesson00-before")


def picture_of_run(plan: Plan, reports: Sequence[RankReport]) -> Picture:
    """The weight before, the momentum, and the weight after, with a letter for each distinct content."""
    letters = name_contents(
        [r.before for r in reports] + [r.momentum for r in reports] + [r.after for r in reports]
    )
    count = len(reports)
    moments = [
        Moment(
            "Before: the weight", "tp cuts it, dp copies it", _named(weight_holdings(plan), letters[:count])
        ),
        Moment(
            "Inside: the momentum",
            "tp cuts it, dp cuts it again",
            _named(momentum_holdings(plan), letters[count : 2 * count]),
        ),
        Moment(
            "After: the weight",
            "held as before, new numbers",
            _named(weight_holdings(plan), letters[2 * count :]),
        ),
    ]
    return figures.draw_holdings(moments, SHAPE, "lesson00-run")


def _named(held: Sequence[Held], letters: Sequence[str]) -> tuple[Held, ...]:
    return tuple(Held(item.rank, item.boxes, letter) for item, letter in zip(held, letters, strict=True))


def moments_of(plan: Plan) -> list[Moment]:
    """The step, moment by moment: what each rank holds of the matrix."""
    return [
        Moment("1 · its weight", "before the step", weight_holdings(plan)),
        Moment("2 · its gradient", "of its own data, for its columns", weight_holdings(plan)),
        Moment("3 · its momentum", "gradients averaged, shared out over dp", momentum_holdings(plan)),
        Moment("4 · the whole matrix", "gathered, to be orthogonalized", compute_holdings(plan)),
        Moment("5 · its part of the update", "cut like the momentum", momentum_holdings(plan)),
        Moment("6 · its weight", "after the step, gathered over dp", weight_holdings(plan)),
    ]


def picture_of_moment(plan: Plan, moment: int, rank: int) -> Picture:
    """What one rank holds at one moment of the step (counted from 1)."""
    return figures.draw_one_holder(
        moments_of(plan)[moment - 1], rank, SHAPE, f"lesson00-moment{moment}-{rank}"
    )


def picture_of_all_moments(plan: Plan, rank: int = 0) -> Picture:
    """What one rank holds through the whole step: the film behind ``picture_of_moment``."""
    return figures.draw_strip(moments_of(plan), rank, SHAPE, "lesson00-moments")


def explore(plan: Plan, live: bool = True) -> Shell | Picture:
    """A slider through the step and a button for each rank, over what that rank holds at that moment."""

    def draw(moment: int, rank: int) -> Picture:
        return picture_of_moment(plan, moment, rank)

    moment = slider("moment", first=1, last=len(moments_of(plan)))
    rank = choice("rank", {f"rank {number}": number for number in plan.grid.ranks})
    return show(draw, picture_of_all_moments(plan), live, moment=moment, rank=rank)


def say_report(reports: Sequence[RankReport]) -> str:
    """How many different contents the ranks hold, in words."""
    before, momentum, after = (
        len(set(name_contents([getattr(report, name) for report in reports])))
        for name in ("before", "momentum", "after")
    )
    return (
        f"{len(reports)} ranks sent back {before} different pieces of the weight before the step,\n"
        f"{momentum} different pieces of the momentum, and {after} different pieces of the weight after it."
    )


def guess_holders(plan: Plan) -> Exercise:
    """The exercise: who holds the last row's last number, of the weight and of the momentum?"""
    row, column = SHAPE[0] - 1, SHAPE[1] - 1
    held = {"weight": weight_holdings(plan), "momentum": momentum_holdings(plan)}

    def judge(weight_holders: Sequence[int], momentum_holders: Sequence[int]) -> str | None:
        for what, said in (("weight", weight_holders), ("momentum", momentum_holders)):
            wrong = _judge_ranks(plan.grid, what, said, held[what], (row, column))
            if wrong:
                return wrong
        return None

    hints = (
        "tp is the place in the row of the grid, dp the row itself: rank = dp × (size of tp) + tp.",
        "Of the weight, a whole column of the grid holds it. Of the momentum, one rank does.",
    )
    return Exercise(judge, hints, "dp copies the weight but cuts the momentum.")


def _judge_ranks(
    grid: Grid, what: str, said: object, held: Sequence[Held], element: tuple[int, int]
) -> str | None:
    if not isinstance(said, (list, tuple, set)) or not all(isinstance(rank, int) for rank in said):
        return f"{what}: give a list of ranks, such as [0, 1]."
    strangers = [rank for rank in said if rank not in grid.ranks]
    if strangers:
        return f"{what}: there is no rank {strangers[0]}; ranks go from 0 to {grid.world_size - 1}."
    right = holders_of(held, *element)
    if extra := sorted(set(said) - set(right)):
        return f"{what}: {grid.at(extra[0])} keeps {figures.say_held(held[extra[0]], SHAPE)} only."
    if missing := sorted(set(right) - set(said)):
        return f"{what}: {len(said)} named, but {grid.at(missing[0])} holds it, too."
    return None


def quiz(plan: Plan) -> Exercise:
    """Three numbers that the notebook has measured."""
    at: Coordinate = plan.grid.at(0)
    kept = plan.buckets[0].stored_shards(at)[0].numel
    expected = {"copies": at.size("dp"), "kept": kept, "difference": 0}
    why = {
        "copies": "Count the ranks whose weight has the same letter as rank 0's.",
        "kept": "Ask reports[0].momentum.numel().",
        "difference": "Look at what torch.equal said, or take (together - alone.detach()).abs().max().",
    }
    return numbers(expected, why)


@dataclass(frozen=True, slots=True)
class RankCost:
    """What a rank measured: seconds of one step, and bytes of memory that are its own."""

    seconds: float
    memory: int


def cost_alone(rank: int, seed: int, steps: int) -> float:
    """Median seconds of one step of ``torch.optim.Muon`` on the whole matrix, in this process."""
    parameter = torch.nn.Parameter(weight(seed))
    parameter.grad = local_gradient(seed, 0)
    return measure.median_seconds(torch.optim.Muon([parameter]).step, steps)


def cost_of_steps(rank: int, dp: int, tp: int, seed: int, steps: int) -> RankCost:
    """Time ``steps`` steps on this rank. Must be called by all ranks."""
    parameter = torch.nn.Parameter(my_columns(weight(seed), rank, tp))
    muon = Muon([parameter], strategy="zero1", mesh=build_mesh({"dp": dp, "tp": tp}), tp_dim=TP_DIM)
    parameter.grad = my_columns(local_gradient(seed, rank // tp), rank, tp)
    return RankCost(measure.median_seconds(muon.step, steps), measure.private_bytes())


def say_cost(costs: Sequence[RankCost], alone: float, first_start: float, next_start: float) -> str:
    """The measurements of this machine, in words."""
    slowest = max(cost.seconds for cost in costs)
    memory = max(cost.memory for cost in costs)
    return (
        f"cores this notebook may use   {measure.cores()}\n"
        f"ranks                         {len(costs)}\n"
        f"start of the ranks, first     {first_start:.2f} s\n"
        f"start of the ranks, later     {next_start:.2f} s\n"
        f"private memory of a rank      {memory / 1e6:.0f} MB\n"
        f"one Muon step on the ranks    {slowest * 1e3:.1f} ms\n"
        f"one Muon step in one process  {alone * 1e3:.1f} ms"
    )
