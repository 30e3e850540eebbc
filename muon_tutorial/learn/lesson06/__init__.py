"""What notebook 06 imports: a grid of ranks, two weights that tp cuts, and the exercises about both.

The weights have sizes that most tp do not divide. Each place along dp has data of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ... import Grid, Matrix, Plan, Shard, zero1
from ..checks.exercise import Exercise, numbers
from ..lesson03 import say_failure
from ..pictures import figures
from ..pictures.holdings import Held, Moment, momentum_holdings, name_contents, weight_holdings
from ..pictures.picture import Picture
from ..widgets.rank_buttons import RankButtons
from ..widgets.shell import Shell, choice, show
from .grid_checks import Groups, groups_exercise, predict, read_groups, shapes_exercise
from .grid_pictures import draw_buffers, draw_groups, draw_overview, draw_place
from .grid_work import DIM, DOWN, KINDS, UP, Kept, Kind, groups, local_shape

__all__ = ["say_failure"]

HEADS = 12


def explore(dp: int, tp: int, live: bool = True) -> Shell | Picture:
    """A button for each rank and one for each cut, over the rank's groups and what it holds of a Linear."""
    grid = Grid.of(dp=dp, tp=tp)

    def draw(rank: int, cut: Kind) -> Picture:
        return draw_place(grid, UP, rank, cut)

    cut = choice("cut", {f"{kind} parallel": kind for kind in KINDS})
    cut.style.button_width = "130px"
    return show(draw, draw_overview(grid, UP), live, rank=RankButtons(dp, tp), cut=cut)


def picture_of_groups(function: Groups, dp: int, tp: int) -> Picture:
    """The groups that the reader's function returns, right or wrong; the reference's, where it is a stub."""
    said = function(dp, tp)
    if said is ...:
        print("No answer yet: this is the reference.")
        said = groups(dp, tp)
    parts = said if isinstance(said, (tuple, list)) and len(said) == 2 else ((), ())
    made = {axis: read_groups(part) or [] for axis, part in zip(("dp", "tp"), parts, strict=True)}
    return draw_groups(made, Grid.of(dp=dp, tp=tp))


def say_answers(answers: Sequence[Sequence[Sequence[int]]]) -> str:
    """Who answered in the groups of each rank, a line a rank."""
    lines = ["rank   who answered in its dp group, and in its tp group"]
    return "\n".join([*lines, *(f"{rank:4}   {mine[0]} and {mine[1]}" for rank, mine in enumerate(answers))])


def say_outputs(kind: str, outputs: Sequence[Tensor], alone: Sequence[Tensor], tp: int) -> str:
    """The output of every rank beside that of one process, for the data of its place along dp."""
    pairs = [(output, alone[rank // tp]) for rank, output in enumerate(outputs)]
    close = all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)
    same = all(torch.equal(one, other) for one, other in pairs)
    return f"{kind + ' numbers':17} the same output: {close!s:6} the same bits: {same}"


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the two weights, in one bucket."""
    matrices = [
        Matrix(0, "up", UP, (("tp", Shard(DIM["column"])),)),
        Matrix(1, "down", DOWN, (("tp", Shard(DIM["row"])),)),
    ]
    return zero1(matrices, Grid.of(dp=dp, tp=tp))


def picture_of_kept(plan: Plan, kept: Sequence[Kept]) -> Picture:
    """The first weight and its momentum, by holder, with a letter for each distinct content of a real run."""
    up, _, momentum = _letters(kept)
    held = _named(weight_holdings(plan), up), _named(momentum_holdings(plan), momentum)
    moments = [
        Moment("up: the weight", "tp cuts it, dp copies it", held[0]),
        Moment("up: its momentum", "tp cuts it, dp cuts the buffer", held[1]),
    ]
    return figures.draw_holdings(moments, UP, "lesson06-kept")


def _letters(kept: Sequence[Kept]) -> tuple[list[str], list[str], list[str]]:
    """A letter for each rank's piece of the first weight, of the second, and of the first one's momentum."""
    pieces = [mine.weights[number] for number in (0, 1) for mine in kept]
    letters, ranks = name_contents([*pieces, *(mine.momentum[0] for mine in kept)]), len(kept)
    return letters[:ranks], letters[ranks : 2 * ranks], letters[2 * ranks :]


def _named(held: Sequence[Held], letters: Sequence[str]) -> tuple[Held, ...]:
    return tuple(Held(item.rank, item.boxes, letter) for item, letter in zip(held, letters, strict=True))


def say_kept(kept: Sequence[Kept], tp: int) -> str:
    """What each rank keeps, a line a rank: the same letter means the same bytes."""
    up, down, _ = _letters(kept)
    lines = ["rank   dp  tp   up  down   numbers of momentum: of up, of down"]
    for rank, mine in enumerate(kept):
        counts = [part.numel() for part in mine.momentum]
        place = f"{rank:4}   {rank // tp:2}  {rank % tp:2}"
        lines.append(f"{place}   {up[rank]:>2}  {down[rank]:>4}   {counts[0]:27}  {counts[1]:7}")
    return "\n".join(lines)


def say_fused(tp: int) -> str:
    """How many rows of q, k and v each place gets of a fused weight that is cut as one."""
    lines = [f"q, k and v of {HEADS} rows each, in one weight of {3 * HEADS} rows, column parallel:"]
    for place, (start, length) in enumerate(_runs(3 * HEADS, tp)):
        counts = [max(0, min(start + length, (n + 1) * HEADS) - max(start, n * HEADS)) for n in range(3)]
        lines.append(f"  place {place}: {counts[0]:2} rows of q, {counts[1]:2} of k, {counts[2]:2} of v")
    return "\n".join(lines)


def _runs(length: int, tp: int) -> Iterator[tuple[int, int]]:
    return (Shard(0).run(length, place, tp) for place in range(tp))


def picture_of_buffers(dp: int, tp: int) -> Picture:
    """For each place along tp the flat buffer of both weights, and how dp cuts it."""
    return draw_buffers(plan_of(dp, tp))


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


def exercises(dp: int, tp: int) -> tuple[Exercise, Exercise, Exercise, Exercise]:
    """The notebook's exercises in order: predict, groups, shapes, quiz."""
    return predict(dp, tp), groups_exercise(dp, tp), shapes_exercise(), quiz(dp, tp)
