"""Pictures of lesson 00: who holds what of the matrix, before, within and after a step."""

from __future__ import annotations

from collections.abc import Sequence

from ... import Plan
from ..pictures import figures
from ..pictures.holdings import (
    StepMoment,
    compute_holdings,
    momentum_holdings,
    name_contents,
    weight_holdings,
    with_letters,
)
from ..pictures.picture import Picture
from ..widgets.shell import Shell, choice, show, slider
from .on_ranks import SHAPE, WeightReport


def picture_before(plan: Plan) -> Picture:
    """The weight, before anything has run: who holds which columns."""
    moment = StepMoment("Before: the weight", "tp cuts it, dp copies it", weight_holdings(plan))
    return figures.draw_holdings([moment], SHAPE, "first_look-before")


def picture_of_run(plan: Plan, reports: Sequence[WeightReport]) -> Picture:
    """The weight before, the momentum, and the weight after, with a letter for each distinct content."""
    weights, momentum, count = weight_holdings(plan), momentum_holdings(plan), len(reports)
    letters = name_contents(
        [r.before for r in reports] + [r.momentum for r in reports] + [r.after for r in reports]
    )
    told = (
        ("Before: the weight", "tp cuts it, dp copies it", weights),
        ("Inside: the momentum", "tp cuts it, dp cuts it again", momentum),
        ("After: the weight", "held as before, new numbers", weights),
    )
    moments = [
        StepMoment(title, what, with_letters(held, letters[number * count : (number + 1) * count]))
        for number, (title, what, held) in enumerate(told)
    ]
    return figures.draw_holdings(moments, SHAPE, "first_look-run")


def explore(plan: Plan, live: bool = True) -> Shell | Picture:
    """A slider through the step and a button for each rank, over what that rank holds at that moment."""
    kept, momentum = weight_holdings(plan), momentum_holdings(plan)
    moments = [
        StepMoment("1 · its weight", "before the step", kept),
        StepMoment("2 · its gradient", "of its own data, for its columns", kept),
        StepMoment("3 · its momentum", "gradients averaged, shared out over dp", momentum),
        StepMoment("4 · the whole matrix", "gathered, to be orthogonalized", compute_holdings(plan)),
        StepMoment("5 · its part of the update", "cut like the momentum", momentum),
        StepMoment("6 · its weight", "after the step, gathered over dp", kept),
    ]

    def draw(moment: int, rank: int) -> Picture:
        return figures.draw_one_holder(moments[moment - 1], rank, SHAPE, f"first_look-moment{moment}-{rank}")

    film = figures.draw_strip(moments, 0, SHAPE, "first_look-moments")
    moment = slider("moment", first=1, last=len(moments))
    rank = choice("rank", {f"rank {number}": number for number in plan.grid.ranks})
    return show(draw, film, live, moment=moment, rank=rank)
