"""Pictures of lesson 09: the film, and a reader's step beside the package's."""

from __future__ import annotations

from collections.abc import Sequence

from ..pictures.colours import CARD, QUIET, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, blank, centred, finish, rectangle, tile, write
from . import replay
from .compare import StepDifference
from .recording import LAST, load

_WIDTH = 900


def hero() -> Picture:
    return replay.film(load())


def draw_difference(difference: StepDifference) -> Picture:
    """A reader's step compared with the reference: one row per rank, one column per phase."""
    ranks = difference.grid.ranks
    figure, axes = blank(_WIDTH, 76 + 40 * len(ranks))
    write(axes, 16, 20, f"Your step on {difference.grid}, beside the package's", 12)
    first, each, words = difference.first, (_WIDTH - 110) / LAST, []
    for phase in range(1, LAST + 1):
        centred(axes, 92 + (phase - 0.5) * each, 50, f"phase {phase}")
    for rank in ranks:
        y = 66 + 40 * rank
        tile(axes, (16, y, 66, 32), rank_colour(rank), f"rank {rank}", linewidth=0.8)
        row = [_state(difference, rank, phase) for phase in range(1, LAST + 1)]
        words.append(f"rank {rank}: {', '.join(row)}")
        for phase, word in enumerate(row, 1):
            is_first = first is not None and (first.rank, first.phase) == (rank, phase)
            fill = {"same": RIGHT_FILL, "wrong": WRONG_FILL, "missing": WRONG_FILL}.get(word, CARD)
            look = {"edgecolor": WRONG if is_first else QUIET, "linewidth": 3.0 if is_first else 0.6}
            rectangle(axes, 92 + (phase - 1) * each, y, each - 8, 32, fill, **look)
            centred(axes, 92 + (phase - 0.5) * each - 4, y + 16, "first wrong" if is_first else word)
    return finish(figure, "difference", f"Your step, phase by phase. {'. '.join(words)}.")


def _state(difference: StepDifference, rank: int, phase: int) -> str:
    """A rank's result in a phase; phases after its first mistake do not count."""
    own, first = [mark for mark in difference.marks if mark.rank == rank], difference.first
    broken = min((mark.phase for mark in own if mark.how != "same"), default=LAST + 1)
    broken = first.phase if first and first.rank == rank else broken
    if phase > broken:
        return "–"
    hows: Sequence[str] = [mark.how for mark in own if mark.phase == phase]
    order = ("wrong", "missing", "same") if phase == broken else ("same",)
    return next((how for how in order if how in hows), "–")
