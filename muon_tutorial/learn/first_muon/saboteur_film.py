"""The film of lesson 04's saboteur: red spreads, phase by phase, while all ranks agree."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from ..pictures.colours import EMPTY, INK, QUIET, RIGHT, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..widgets.play import play
from ..widgets.shell import Shell, choice
from .on_ranks import PLACES, SHAPES
from .saboteur import FAULTS, PHASES, STEPS, SabotagedRun, sabotaged

MOMENTS = STEPS * len(PHASES)
_LEFT, _TOP, _WIDE, _ROW, _HIGH = 152.0, 92.0, 61.0, 31.0, 25.0
_SAID = {"lost": "loses its gradient of", "sign": "turns the sign of one row of its gradient of"}


def draw_sabotage(run: SabotagedRun, moment: int) -> Picture:
    """What every rank holds after each phase up to a moment: red where a sound training differs."""
    bottom = _TOP + MOMENTS * _ROW + 8 * (STEPS - 1)
    figure, axes = blank(900, round(bottom + 58))
    title = f"In step 1, rank {run.rank} {_SAID[run.fault]} {run.matrix}"
    write(axes, 12, 22, title, 12, weight="bold")
    write(
        axes,
        12,
        46,
        f"each box: ranks 0 to {run.ranks - 1} from left to right · stripe: the owner",
        11,
        color=QUIET,
    )
    for column, place in enumerate(PLACES):
        x = _LEFT + column * _WIDE
        write(axes, x + _WIDE / 2 - 2, _TOP - 22, place.name, 11, ha="center")
        rectangle(axes, x, _TOP - 11, _WIDE - 4, 6, rank_colour(place.owner(run.ranks)), linewidth=0.6)
    for row in range(MOMENTS):
        top = _TOP + row * _ROW + 8 * (row // len(PHASES))
        write(axes, 12, top + _HIGH / 2, f"{row // 3 + 1} · {PHASES[row % 3]}", 11)
        _draw_row(axes, run, row, top, is_past=row < moment)
    _draw_verdicts(axes, run, moment, bottom + 6)
    name = f"first_muon-saboteur-{run.ranks}-{run.rank}-{run.matrix}-{run.fault}-{moment}"
    return finish(figure, name, say_sabotage(run, moment))


def _draw_row(axes: Axes, run: SabotagedRun, row: int, top: float, *, is_past: bool) -> None:
    """A phase: a box for each matrix, in it a slot for each rank."""
    slot = (_WIDE - 4) / run.ranks
    slots, fills, crosses = [], [], []
    for column, name in enumerate(SHAPES):
        for rank in range(run.ranks):
            x = _LEFT + column * _WIDE + rank * slot
            is_wrong = is_past and (row, rank, name) in run.wrong
            slots.append(Rectangle((x, top), slot, _HIGH))
            fills.append(WRONG_FILL if is_wrong else RIGHT_FILL if is_past else EMPTY)
            crosses += [(x + slot / 2, top + _HIGH / 2)] if is_wrong else []
    edge = WRONG if crosses else INK if is_past else QUIET
    axes.add_collection(PatchCollection(slots, facecolors=fills, edgecolors=QUIET, linewidths=0.5))
    if crosses:
        xs, ys = zip(*crosses, strict=True)
        size = min(9.0, slot * 0.55)
        axes.plot(xs, ys, "x", color=edge, markersize=size, markeredgewidth=2.2, zorder=6)


def _draw_verdicts(axes: Axes, run: SabotagedRun, moment: int, top: float) -> None:
    agrees, wrong = _state(run, moment)
    same = "yes" if agrees else "no"
    verdicts = (
        (f"all ranks hold the same weights: {same}", agrees, 12),
        (f"weights as without the saboteur: {12 - len(wrong)} of 12", not wrong, 452),
    )
    for said, is_good, left in verdicts:
        edge, fill, mark = (RIGHT, RIGHT_FILL, "✓") if is_good else (WRONG, WRONG_FILL, "✗")
        rectangle(axes, left, top, 432, 34, fill, edgecolor=edge, linewidth=1.8)
        write(axes, left + 12, top + 17, f"{mark}  {said}", 12, weight="bold")


def _state(run: SabotagedRun, moment: int) -> tuple[bool, list[str]]:
    """Whether ranks agree on the weights after ``moment`` phases, and which weights are wrong."""
    if not moment:
        return True, []
    last = moment // 3 * 3 - 1
    return run.agree[moment - 1], run.wrong_at(last) if last > 0 else []


def say_sabotage(run: SabotagedRun, moment: int) -> str:
    """The film up to a moment, in words."""
    agrees, wrong = _state(run, moment)
    said = [f"In step 1, rank {run.rank} of {run.ranks} {_SAID[run.fault]} {run.matrix}."]
    for row in range(moment):
        names = run.wrong_at(row)
        found = "everything" if len(names) == len(SHAPES) else ", ".join(names) or "nothing"
        said.append(f"Step {row // 3 + 1}, {PHASES[row % 3]}: {found} not as in a sound training.")
    same = "the same weights" if agrees else "different weights"
    said.append(f"After {moment} phases all ranks hold {same}; wrong weights: {', '.join(wrong) or 'none'}.")
    return " ".join(said)


def explore_sabotage(dp: int, live: bool = True) -> Shell | Picture:
    """Choose a rank, a matrix and a fault, and play the steps that follow."""

    def draw(rank: int, matrix: str, fault: str, moment: int) -> Picture:
        return draw_sabotage(sabotaged(dp, rank, matrix, fault), moment)

    ranks = choice("rank", {f"rank {rank}": rank for rank in range(dp)})
    matrices = choice("matrix", {name: name for name in SHAPES})
    faults = choice("fault", FAULTS)
    faults.style.button_width = "120px"
    ranks.value, matrices.value, matrices.style.button_width = 1 % dp, "k1", "52px"
    still = draw(1 % dp, "k1", "lost", MOMENTS)
    return play(draw, MOMENTS, still, live, rank=ranks, matrix=matrices, fault=faults)
