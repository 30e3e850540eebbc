"""Lesson 16: the way from a notebook to a cluster, as lanes, and which of them this project has run.

The lanes' text is defined here once; tests compare it with the commands that the lesson runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, RIGHT_FILL, WRONG, WRONG_FILL
from ..pictures.picture import Picture, blank, finish, rectangle, write
from .lives import BitsReport
from .trials import PlainReport

COLUMNS = ("it starts with", "ranks meet", "messages go by")
LOOP = "prepare, update, save, load"


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run the same functions; ``ran`` says whether this project has run it."""

    name: str
    cells: tuple[str, ...]
    ran: bool


_CLUSTER = ("torchrun --nnodes …\n--rdzv-endpoint …", "in a store on one\nof the machines")
LANES = (
    Lane("a notebook cell", ("a call", "with nobody", "–"), True),
    Lane("launch()", ("launch(train, ranks)", "in a file", "Gloo, loopback"), True),
    Lane(
        "torchrun,\none machine",
        ("torchrun --standalone\n… join_torchrun()", "in torchrun's store", "Gloo, loopback"),
        True,
    ),
    Lane("torchrun,\nmany machines", (*_CLUSTER, "Gloo, the network"), False),
    Lane("the same,\nwith GPUs", (*_CLUSTER, "NCCL,\none GPU a rank"), False),
)
_LEFT, _TOP, _ACROSS, _DOWN = 174, 70, 204, 54


def hero() -> Picture:
    """The lanes from a laptop to a cluster; differences from the lane above are marked."""
    right = _LEFT + len(COLUMNS) * _ACROSS
    width, height = right + 94, _TOP + len(LANES) * (_DOWN + 8) + 74
    figure, axes = blank(width, height)
    write(axes, 14, 22, "The same four functions of yours, from a laptop to a cluster", 14, weight="bold")
    for number, title in enumerate((*COLUMNS, "run by us")):
        write(axes, _LEFT + number * _ACROSS + 6, 52, title, 12, color=QUIET)
    for number, lane in enumerate(LANES):
        _draw_lane(axes, lane, LANES[number - 1] if number else lane, _TOP + number * (_DOWN + 8))
    write(axes, 14, height - 56, f"in every lane the same: {LOOP}", 12.5, weight="bold")
    rectangle(axes, 14, height - 30, 22, 16, MARKED)
    write(axes, 44, height - 22, "differs from the lane above", 12)
    rectangle(axes, 320, height - 30, 22, 16, EMPTY, hatch="////", edgecolor=QUIET)
    write(axes, 350, height - 22, "never run by this project", 12)
    return finish(figure, "my_loop-hero", say_lanes())


def _draw_lane(axes: Axes, lane: Lane, above: Lane, top: float) -> None:
    write(axes, 14, top + _DOWN / 2, lane.name, 12, weight="bold", linespacing=1.3)
    for number, (text, before) in enumerate(zip(lane.cells, above.cells, strict=True)):
        left = _LEFT + number * _ACROSS
        fill = MARKED if text != before else CARD
        rectangle(axes, left, top, _ACROSS - 6, _DOWN, fill, linewidth=1.0)
        write(axes, left + 8, top + _DOWN / 2, text, 12, linespacing=1.3)
    left = _LEFT + len(COLUMNS) * _ACROSS
    if lane.ran:
        write(axes, left + 8, top + _DOWN / 2, "yes", 12)
    else:
        rectangle(axes, left, top, 80, _DOWN, EMPTY, hatch="////", edgecolor=QUIET, linewidth=0)
        write(axes, left + 10, top + _DOWN / 2, "never", 12, color=WRONG, weight="bold",
              bbox={"facecolor": CARD, "edgecolor": INK, "pad": 2.5, "linewidth": 0.6})  # fmt: skip


def say_lanes() -> str:
    """The lanes in words."""
    said = []
    for number, lane in enumerate(LANES):
        above = LANES[number - 1] if number else lane
        changed = [
            f"{title} {text}"
            for title, text, before in zip(COLUMNS, lane.cells, above.cells, strict=True)
            if number == 0 or text != before
        ]
        ran = "run by this project" if lane.ran else "never run by this project"
        said.append(f"{lane.name}: {'; '.join(changed)}; {ran}.".replace("\n", " "))
    same = f"In every lane the same: {LOOP}."
    return (
        f"From a laptop to a cluster, each lane with what differs from the one above. {' '.join(said)} {same}"
    )


def draw_too_early(report: PlainReport) -> Picture:
    """The parameters that an optimizer steps if it was made before the model was cut."""
    figure, axes = blank(860, 214)
    write(axes, 14, 20, "Made too early: two sets of parameters", 12.5, weight="bold")
    rows = {
        "the model's, cut": ("gradient", MARKED, 54),
        "the optimizer's, old": ("no gradient", EMPTY, 122),
    }
    for text, (mark, fill, top) in rows.items():
        write(axes, 14, top + 20, text, 12)
        for number in range(report.parameters):
            left = 200 + number * 108
            rectangle(axes, left, top, 102, 40, fill, linewidth=1.0)
            write(axes, left + 51, top + 20, mark, 11, ha="center")
    said = f"a step moves {report.moved} of the model's parameters, and raises no error"
    write(axes, 14, 188, said, 12, weight="bold", color=WRONG)
    alt = (
        f"The model has {report.parameters} new parameters with gradients; the optimizer has as many old "
        f"ones without. {said[0].upper()}{said[1:]}."
    )
    return finish(figure, "my_loop-too-early", alt)


def draw_bits(report: BitsReport) -> Picture:
    """For each comparison of bits, the number of equal tensors as a bar."""
    figure, axes = blank(880, 60 + 44 * len(report.rows))
    write(axes, 14, 20, "The same bits on both grids?", 12.5, weight="bold")
    said = []
    for number, row in enumerate(report.rows):
        top = 44 + number * 44
        write(axes, 14, top + 14, f"{row.name}: {row.what}", 12)
        rectangle(axes, 440, top, 120, 28, EMPTY, linewidth=1.0)
        rectangle(
            axes,
            440,
            top,
            120 * row.alike / row.tensors,
            28,
            RIGHT_FILL if row.is_same else WRONG_FILL,
            linewidth=1.0,
        )
        count = f"{row.alike} of {row.tensors} tensors"
        write(axes, 572, top + 14, count + ("" if row.is_same else f", off by {row.furthest:.0e}"), 12)
        said.append(f"{row.name}, {row.what}: the same bits in {count}.")
    return finish(figure, "my_loop-bits", " ".join(said))
