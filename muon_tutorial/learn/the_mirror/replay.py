"""Pictures of lesson 09: a recorded step as a film and moment by moment, and a reader's step by phase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes

from ...evidence.ring_bytes import ring_bytes
from ..pictures.colours import CARD, EMPTY, INK, QUIET, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Frame, Picture, Point, arrow, blank, centred, finish, rectangle, tile, write
from ..widgets.shell import Shell, choice, show, slider
from .compare import StepDifference
from .on_ranks import SteppedRun
from .recording import AXIS, LAST, MOMENTS, PHASES, RankDiary, StepRecording, load

_WIDTH, _TOP, _MARGIN = 900, 216, 22
TERMS = (
    ("reduce_scatter", "g[B]{U_dp} → g[B_dp]"),
    ("dp gather", "x[B_dp] → x[B]"),
    ("tp gather", "X[I, J_tp] → X[I, J]"),
    ("Newton–Schulz", "X[I, J] → Y[I, J]"),
    ("tp slice", "Y[I, J] → Y[I, J_tp]"),
    ("dp slice", "y[B] → y[B_dp]"),
    ("all_gather", "w[B_dp] → w[B]"),
)
"""Each phase's short name, and its layouts as the lesson writes them."""


def hero() -> Picture:
    return film(load())


def render(recording: StepRecording, moment: int, matrix: str = "") -> Picture:
    """What every rank holds of a matrix after ``moment`` phases, and at the moment that mirrors it."""
    matrix = matrix or recording.busiest()
    high = max(30.0, min(84.0, 300 / recording.dp))
    bottom, half = _TOP + recording.dp * (high + 26), _WIDTH / 2
    figure, axes = blank(_WIDTH, round(bottom + 8))
    step = (_WIDTH - 2 * 60) / LAST
    places = [(60 + step * number, 62 - 14 * min(number, LAST - number)) for number in range(LAST + 1)]
    for number, (start, stop) in enumerate(pairwise(places), 1):
        arrow(axes, start, stop, mutation_scale=11, linewidth=2.6 if number == moment else 1.0)
        at_x, at_y = (start[0] + stop[0]) / 2, max(start[1], stop[1]) + 12
        centred(axes, at_x, at_y, _phase_name(number), va="top", linespacing=1.15)
    for number, spot in enumerate(places):
        colour = INK if number == moment else CARD
        size = 11 if number in (moment, LAST - moment) else 5
        axes.plot(*spot, "o", markersize=size, markerfacecolor=colour, color=INK)
    for place, shown in enumerate(sorted((moment, LAST - moment))):
        left = _MARGIN + place * half
        title = ("now: " if shown == moment else "its mirror: ") + MOMENTS[shown]
        write(axes, left, 134, title, 12, weight="bold")
        after = f"after phase {shown}" if shown else "before phase 1"
        before = f", before phase {shown + 1}" if 0 < shown < LAST else ""
        hatched = "; hatched: updates" if AXIS <= shown < LAST else ""
        write(axes, left, 154, after + before + hatched, color=QUIET)
        ranks = recording.diaries
        held = [diary.contents[matrix][shown] for diary in ranks if diary.tiles[matrix][shown]]
        # between packing and unpacking, ranks note no contents
        different = f"; different contents: {len(set(held))}" if all(held) else ""
        write(axes, left, 172, f"{len(held)} of {len(ranks)} ranks hold a part{different}", color=QUIET)
        each = (half - 2 * _MARGIN) / recording.tp
        for diary in recording.diaries:
            at = recording.grid.at(diary.rank)
            x, y = left + at["tp"] * each, _TOP + at["dp"] * (high + 26)
            write(axes, x, y - 11, f"rank {diary.rank}")
            _draw_tiles(axes, recording.shapes[matrix], diary, matrix, shown, (x, y, each - 14, high))
    axes.plot([half, half], [120, bottom], color=INK, linewidth=1.4, dashes=(4, 3))
    said = [_source(recording, matrix), "Now,", _say_moment(recording, matrix, moment)]
    said += ["Its mirror,", _say_moment(recording, matrix, LAST - moment)]
    return finish(figure, f"replay-{matrix}-{moment}", " ".join(said))


def _phase_name(number: int) -> str:
    return f"{number} " + re.sub(r"([_–])| ", r"\1\n", TERMS[number - 1][0])


def _draw_tiles(axes: Axes, shape: Point, diary: RankDiary, matrix: str, moment: int, frame: Frame) -> None:
    (left, top, width, high), (rows, columns) = frame, shape
    rectangle(axes, *frame, EMPTY, linewidth=1.0)
    hatch = "////" if AXIS <= moment < LAST else None
    for name, row, column, down, across in diary.tiles[matrix][moment]:
        x, y = left + width * column / columns, top + high * row / rows
        size, fill = (width * across / columns, high * down / rows), rank_colour(name)
        rectangle(axes, x, y, *size, fill, edgecolor=CARD, hatch=hatch, linewidth=0.0)
        rectangle(axes, x, y, *size, "none", linewidth=0.8)
        if size[0] > 12 and size[1] > 15:
            box = {"facecolor": fill, "edgecolor": "none", "pad": 0.6} if hatch else None
            middle = x + size[0] / 2, y + size[1] / 2
            centred(axes, *middle, str(name), bbox=box)


def film(recording: StepRecording) -> Picture:
    """All moments of the step side by side, one row per rank, with the mirror's axis in the middle."""
    matrix, ranks = recording.busiest(), len(recording.diaries)
    high = max(22.0, min(58.0, 380 / ranks))
    each, left, top = (_WIDTH - 74) / (LAST + 1), 72.0, 110.0
    bottom, axis = top + ranks * (high + 10), left + AXIS * each - 6
    figure, axes = blank(_WIDTH, round(bottom + 30))
    for moment, title in enumerate(MOMENTS):
        middle = left + (moment + 0.5) * each - 6
        centred(axes, middle, top - 8, "\n".join(title.rsplit(" ", 1)), va="bottom")
    for diary in recording.diaries:
        row = top + diary.rank * (high + 10)
        write(axes, 8, row + high / 2, f"rank {diary.rank}")
        for moment in range(LAST + 1):
            frame = (left + moment * each, row, each - 12, high)
            _draw_tiles(axes, recording.shapes[matrix], diary, matrix, moment, frame)
    for number in range(1, LAST + 1):
        middle = left + number * each - 6
        centred(axes, middle, 22, _phase_name(number), weight="bold", linespacing=1.1)
        arrow(axes, (middle - 28, 52), (middle + 28, 52), mutation_scale=10)
    axes.plot([axis, axis], [58, bottom], color=INK, linewidth=1.4, dashes=(4, 3))
    centred(axes, axis, bottom + 14, "the mirror: Newton–Schulz")
    said = [_source(recording, matrix), *(_say_moment(recording, matrix, m) for m in range(LAST + 1))]
    return finish(figure, f"film-{matrix}", " ".join(said))


def _source(recording: StepRecording, matrix: str) -> str:
    rows, columns = recording.shapes[matrix]
    return f"{recording.source}: matrix {matrix}, {rows} × {columns}."


def _say_moment(recording: StepRecording, matrix: str, moment: int) -> str:
    told = []
    for diary in recording.diaries:
        tiles = diary.tiles[matrix][moment]
        pieces = ", ".join(f"{rows}×{columns} from {name}" for name, _, _, rows, columns in tiles)
        told.append(f"rank {diary.rank} {pieces or 'nothing'}")
    when = f"after phase {moment}, {PHASES[moment - 1]}" if moment else "before the step"
    return f"{when} ({MOMENTS[moment]}): {'; '.join(told)}."


def explore(recording: StepRecording, live: bool = True, moment: int | None = None) -> Shell | Picture:
    """What all ranks hold, with a slider for the phase, beginning at ``moment``, and a button per matrix."""
    names = dict.fromkeys([recording.busiest(), *recording.shapes])  # the busiest first
    still = film(recording) if moment is None else render(recording, moment)
    controls = {"phase": slider("phase", last=LAST, start=moment), "matrix": choice("matrix", list(names))}
    return show(lambda phase, matrix: render(recording, phase, matrix), still, live, **controls)


def draw_step(run: SteppedRun) -> Picture:
    """A right step, one row per phase: its layouts, and the bytes that each rank sends, as on a ring."""
    grid, sent = run.jobs[0].step.plan.grid, Counter[tuple[int, int]]()
    for rank, request in run.asked:
        if request.label.phase in PHASES:
            sent[PHASES.index(request.label.phase), rank] += ring_bytes(request, grid.at(rank))
    each, left, most = max(72, 320 / grid.world_size), 196, max([1, *sent.values()])
    title, words = "Your step, and the bytes that each rank sends", [f"Your step on {grid}"]
    figure, axes = blank(round(left + each * grid.world_size + 8), 416, title, 16, 22, 12.5)
    for rank in grid.ranks:
        tile(axes, (left + each * rank, 44, each - 8, 26), rank_colour(rank), f"rank {rank}", linewidth=0.8)
    for phase, (name, term) in enumerate(TERMS):
        y, row = 92 + 48 * phase, [sent[phase, rank] for rank in grid.ranks]
        write(axes, 16, y, f"{phase + 1} {name}", weight="bold")
        write(axes, 16, y + 19, term, color=QUIET)
        for rank, size in enumerate(row):
            x, full = left + each * rank, (each - 8) * size / most
            write(axes, x, y, f"{size:,}" if size else "–")
            rectangle(axes, x, y + 12, full, 12, rank_colour(rank), linewidth=0.8 if size else 0)
        words.append(f"{phase + 1} {name}, {term}: bytes sent {', '.join(f'{size:,}' for size in row)}")
    return finish(figure, "your-step", f"{'. '.join(words)}.")


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
    how = next((how for how in order if how in hows), "–")
    # Once one rank's mistake has stopped the run, others come no further.
    return "not reached" if how == "missing" and difference.broke and first and first.rank != rank else how
