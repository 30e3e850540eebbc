"""Pictures of lesson 16: lanes from a notebook to a cluster, comparisons, and a run's life."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, RIGHT_FILL, WRONG, WRONG_FILL, rank_colour
from ..pictures.picture import Picture, blank, centred, finish, rectangle, tile, write
from .lives import Attempt, BitsReport, RunLife
from .trials import PlainReport

COLUMNS = ("it starts with", "ranks meet", "messages go by")
LOOP = "prepare, update, save, load"


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run the same functions; ``ran`` says whether this project has run it."""

    name: str
    cells: tuple[str, ...]
    ran: bool


_ONE_MACHINE = ("torchrun --standalone\n… join_torchrun()", "in torchrun's store", "Gloo, loopback")
_CLUSTER = ("torchrun --nnodes …\n--rdzv-endpoint …", "in a store on one\nof the machines")
LANES = (
    Lane("a notebook cell", ("a call", "nowhere", "none"), True),
    Lane("launch()", ("launch(train, ranks)", "in a file", "Gloo, loopback"), True),
    Lane("torchrun,\none machine", _ONE_MACHINE, True),
    Lane("torchrun,\nmany machines", (*_CLUSTER, "Gloo, the network"), False),
    Lane("the same,\nwith GPUs", (*_CLUSTER, "NCCL,\none GPU a rank"), False),
)
_LEFT, _TOP, _ACROSS, _DOWN = 174, 70, 204, 54


def hero() -> Picture:
    """The lanes from a laptop to a cluster; differences from the lane above are marked."""
    right = _LEFT + len(COLUMNS) * _ACROSS
    width, height = right + 94, _TOP + len(LANES) * (_DOWN + 8) + 74
    title = "The same four functions of yours, from a laptop to a cluster"
    figure, axes = blank(width, height, title, 14, 22, 14)
    for number, name in enumerate((*COLUMNS, "run by us")):
        write(axes, _LEFT + number * _ACROSS + 6, 52, name, 12, color=QUIET)
    said = ["From a laptop to a cluster, each lane with what differs from the one above."]
    for number, lane in enumerate(LANES):
        top, above = _TOP + number * (_DOWN + 8), LANES[number - 1] if number else lane
        write(axes, 14, top + _DOWN / 2, lane.name, 12, weight="bold", linespacing=1.3)
        changed = []
        for column, (text, before) in enumerate(zip(lane.cells, above.cells, strict=True)):
            left, fill = _LEFT + column * _ACROSS, MARKED if text != before else CARD
            rectangle(axes, left, top, _ACROSS - 6, _DOWN, fill, linewidth=1.0)
            write(axes, left + 8, top + _DOWN / 2, text, 12, linespacing=1.3)
            changed += [f"{COLUMNS[column]} {text}"] if number == 0 or text != before else []
        ran = "run by this project" if lane.ran else "never run by this project"
        said.append(f"{lane.name}: {'; '.join(changed)}; {ran}.".replace("\n", " "))
        if lane.ran:
            write(axes, right + 8, top + _DOWN / 2, "yes", 12)
        else:
            box = {"facecolor": CARD, "edgecolor": INK, "pad": 2.5, "linewidth": 0.6}
            rectangle(axes, right, top, 80, _DOWN, EMPTY, hatch="////", edgecolor=QUIET, linewidth=0)
            write(axes, right + 10, top + _DOWN / 2, "never", 12, color=WRONG, weight="bold", bbox=box)
    write(axes, 14, height - 56, f"in every lane the same: {LOOP}", 12.5, weight="bold")
    rectangle(axes, 14, height - 30, 22, 16, MARKED)
    write(axes, 44, height - 22, "differs from the lane above", 12)
    rectangle(axes, 320, height - 30, 22, 16, EMPTY, hatch="////", edgecolor=QUIET)
    write(axes, 350, height - 22, "never run by this project", 12)
    return finish(figure, "my_loop-hero", " ".join([*said, f"In every lane the same: {LOOP}."]))


def draw_too_early(report: PlainReport) -> Picture:
    """The parameters that an optimizer steps if it was made before the model was cut."""
    figure, axes = blank(860, 214, "Made too early: two sets of parameters", 14, 20, 12.5)
    rows = {"the model's, cut": ("gradient", MARKED, 54)}
    rows["the optimizer's, old"] = ("no gradient", EMPTY, 122)
    for text, (mark, fill, top) in rows.items():
        write(axes, 14, top + 20, text, 12)
        for number in range(report.parameters):
            tile(axes, (200 + number * 108, top, 102, 40), fill, mark, linewidth=1.0)
    said = f"a step moves {report.moved} of the model's parameters, and raises no error"
    write(axes, 14, 188, said, 12, weight="bold", color=WRONG)
    new = f"The model has {report.parameters} new parameters with gradients"
    alt = f"{new}; the optimizer has as many old ones, without gradients. {said[0].upper()}{said[1:]}."
    return finish(figure, "my_loop-too-early", alt)


def draw_bits(report: BitsReport) -> Picture:
    """For each comparison, a bar that shows how many tensors have equal bits."""
    figure, axes = blank(880, 60 + 44 * len(report.rows), "The same bits on both grids?", 14, 20, 12.5)
    said = []
    for number, row in enumerate(report.rows):
        top = 44 + number * 44
        write(axes, 14, top + 14, f"{row.name}: {row.what}", 12)
        rectangle(axes, 440, top, 120, 28, EMPTY, linewidth=1.0)
        fill, off = (RIGHT_FILL, "") if row.is_same else (WRONG_FILL, f", off by {row.furthest:.0e}")
        rectangle(axes, 440, top, 120 * row.alike / row.tensors, 28, fill, linewidth=1.0)
        count = f"{row.alike} of {row.tensors} tensors"
        write(axes, 572, top + 14, count + off, 12)
        said.append(f"{row.name}, {row.what}: the same bits in {count}.")
    return finish(figure, "my_loop-bits", " ".join(said))


_LIFE_LEFT, _LIFE_TOP, _LANE, _GAP, _CURVE = 190, 60, 24, 46, 150


def draw_life(life: RunLife, undisturbed: RunLife) -> Picture:
    """What the ranks did from the first start to the end, and the losses, beside the undisturbed run's."""
    top, tick = _LIFE_TOP, min(48.0, 590 / life.job.steps)
    lanes = sum(attempt.ranks * _LANE + _GAP for attempt in life.attempts)
    figure, axes = blank(round(_LIFE_LEFT + life.job.steps * tick + 110), top + lanes + _CURVE + 36)
    title = f"{life.job.steps} steps on {' and then on '.join(dict.fromkeys(map(_grid, life.attempts)))}"
    write(axes, 14, 20, title, 12.5, weight="bold")
    for attempt in life.attempts:
        _draw_attempt(axes, attempt, top, tick)
        top += attempt.ranks * _LANE + _GAP
    _draw_losses(axes, life, undisturbed, top - 6, tick)
    mine, other = (run.last.losses[max(run.last.losses)] for run in (life, undisturbed))
    ends = f"The last loss is {mine:.2f}; undisturbed it was {other:.2f}."
    return finish(figure, "my_loop-life", " ".join([*map(_say_attempt, life.attempts), ends]))


def _grid(attempt: Attempt) -> str:
    return f"{attempt.grid[0]} × {attempt.grid[1]}"


def _say_attempt(attempt: Attempt) -> str:
    saved = f"after step {', '.join(map(str, attempt.saved))}" if attempt.saved else "nothing"
    killed = f", and rank {attempt.killed[0]} is killed" if attempt.killed else ""
    did = f"begins at step {attempt.begin}, saves {saved} and ends after step {attempt.end}"
    return f"dp × tp = {_grid(attempt)} {did}{killed}."


def _draw_attempt(axes: Axes, attempt: Attempt, top: float, tick: float) -> None:
    tp = attempt.grid[1]
    write(axes, 14, top - 12, f"dp × tp = {_grid(attempt)}", 11, color=QUIET)
    for rank in range(attempt.ranks):
        y = top + rank * _LANE
        write(axes, 14, y + _LANE / 2, f"rank {rank}  (dp {rank // tp}, tp {rank % tp})", 11)
        for step in attempt.losses:
            x = _LIFE_LEFT + step * tick
            rectangle(axes, x, y + 2, tick - 3, _LANE - 4, rank_colour(rank), linewidth=0.7)
        if attempt.killed is not None:
            x, is_victim = _LIFE_LEFT + attempt.killed[1] * tick + 9, rank == attempt.killed[0]
            mark, colour, weight = ("killed", WRONG, "bold") if is_victim else ("ended", QUIET, "normal")
            write(axes, x, y + _LANE / 2, f"✕ {mark}", color=colour, weight=weight)
    bottom = top + attempt.ranks * _LANE + 11
    begun_at = _LIFE_LEFT + attempt.begin * tick - 3
    axes.plot([begun_at, begun_at], [top - 4, bottom], color=INK, linewidth=1.4)
    if attempt.begin:
        axes.plot(begun_at, top - 8, marker="D", markersize=6, color=INK)
        write(axes, begun_at + 8, top - 9, f"loads step {attempt.begin}", 11)
    for step in attempt.saved:
        x = _LIFE_LEFT + step * tick - 3
        axes.plot(x, bottom, marker="D", markersize=7, color=INK)
        write(axes, x + 8, bottom, f"{step}", 11, color=QUIET)


def _draw_losses(axes: Axes, life: RunLife, undisturbed: RunLife, top: float, tick: float) -> None:
    reference = undisturbed.last.losses
    every = [*reference.values(), *(loss for each in life.attempts for loss in each.losses.values())]
    low, high = min(every), max(every)

    def at(step: int, loss: float) -> tuple[float, float]:
        share = (round(loss, 3) - low) / ((high - low) or 1.0)
        return _LIFE_LEFT + (step + 0.5) * tick, top + 14 + (1 - share) * (_CURVE - 30)

    rectangle(axes, _LIFE_LEFT - 3, top, life.job.steps * tick, _CURVE, CARD, linewidth=0.6, edgecolor=EMPTY)
    write(axes, 14, top + 18, "loss", 12, weight="bold")
    write(axes, 14, top + 40, "line: undisturbed", 11, color=QUIET)
    write(axes, 14, top + 60, "○ lost with the kill", 11, color=QUIET)
    write(axes, 14, top + 80, "● what counts", 11, color=QUIET)
    line = zip(*(at(step, loss) for step, loss in reference.items()), strict=True)
    axes.plot(*line, color=QUIET, linewidth=1)
    for attempt in life.attempts:
        for step, loss in attempt.losses.items():
            is_lost = attempt is not life.last and life.last.begin <= step
            size, fill = (9, "none") if is_lost else (5, INK)
            axes.plot(*at(step, loss), "o", markersize=size, markerfacecolor=fill, color=INK)
    for step in range(life.job.steps):
        centred(axes, _LIFE_LEFT + (step + 0.5) * tick, top + _CURVE + 12, str(step), color=QUIET)
    write(axes, 14, top + _CURVE + 12, "step", 11, color=QUIET)
