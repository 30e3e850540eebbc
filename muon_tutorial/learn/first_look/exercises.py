"""Exercises of lesson 00: who holds what of the matrix, and the quiz."""

from __future__ import annotations

from collections.abc import Sequence

from ... import Coordinate, Grid, Plan
from ..exercises.judge import Exercise, numbers
from ..pictures import figures
from ..pictures.holdings import RankBoxes, holders_of, momentum_holdings, weight_holdings
from .on_ranks import SHAPE


def guess_holders(plan: Plan) -> Exercise:
    """The exercise: who holds the last row's last number, of the weight and of the momentum?"""

    def judge(weight_holders: Sequence[int], momentum_holders: Sequence[int]) -> str | None:
        weight = _judge_ranks(plan.grid, "weight", weight_holders, weight_holdings(plan))
        return weight or _judge_ranks(plan.grid, "momentum", momentum_holders, momentum_holdings(plan))

    hints = (
        "tp is the place in the row of the grid, dp the row itself: rank = dp × (size of tp) + tp.",
        "Of the weight, a whole column of the grid holds it. Of the momentum, one rank does.",
    )
    return Exercise(judge, hints, "dp copies the weight but cuts the momentum.")


def _judge_ranks(grid: Grid, what: str, said: object, held: Sequence[RankBoxes]) -> str | None:
    if not isinstance(said, (list, tuple, set)) or not all(isinstance(rank, int) for rank in said):
        return f"{what}: give a list of ranks, such as [0, 1]."
    strangers = [rank for rank in said if rank not in grid.ranks]
    if strangers:
        return f"{what}: there is no rank {strangers[0]}; ranks go from 0 to {grid.world_size - 1}."
    right = holders_of(held, SHAPE[0] - 1, SHAPE[1] - 1)
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
