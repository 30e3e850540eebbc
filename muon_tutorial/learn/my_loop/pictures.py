"""Lesson 13: the way from a notebook to a cluster, as lanes, and what of it this project has run.

What stands in the lanes is said here, once; the tests hold it to the commands that the lesson runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, RANKS, WRONG
from ..pictures.picture import Picture, blank, finish, rectangle, write
from .lives import BitsReport
from .trials import PlainReport

COLUMNS = ("it starts with", "ranks meet", "messages go by", "tensors lie on", "the loop")
_LOOP = "prepare, update,\nsave, load"


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run the same functions. ``ran`` says whether this project has."""

    name: str
    cells: tuple[str, ...]
    ran: bool


LANES = (
    Lane("notebook cell", ("a call", "with nobody", "–", "the CPU", _LOOP), True),
    Lane("launch()", ("launch(train, ranks)", "in a file", "Gloo, loopback", "the CPU", _LOOP), True),
    Lane(
        "torchrun,\none machine",
        (
            "torchrun --standalone\n… join_torchrun()",
            "in torchrun's store",
            "Gloo, loopback",
            "the CPU",
            _LOOP,
        ),
        True,
    ),
    Lane(
        "torchrun,\nseveral machines",
        (
            "torchrun --nnodes …\n--rdzv-endpoint …",
            "in a store on one\nof the machines",
            "Gloo, the network",
            "the CPU",
            _LOOP,
        ),
        False,
    ),
    Lane(
        "the same,\nwith GPUs",
        (
            "torchrun --nnodes …\n--rdzv-endpoint …",
            "in a store on one\nof the machines",
            "NCCL",
            "one GPU a rank",
            _LOOP,
        ),
        False,
    ),
)
_LEFT, _TOP, _ACROSS, _DOWN = 150, 58, 142, 54


def hero() -> Picture:
    """The lanes from a laptop to a cluster; what differs from the lane above is marked."""
    width, height = _LEFT + len(COLUMNS) * _ACROSS + 86, _TOP + len(LANES) * (_DOWN + 8) + 34
    figure, axes = blank(width, height)
    for number, title in enumerate(COLUMNS):
        write(axes, _LEFT + number * _ACROSS + 6, 40, title, 9, color=QUIET)
    write(axes, 14, 18, "The same four functions of yours, from a laptop to a cluster", 11.5, weight="bold")
    write(axes, _LEFT + len(COLUMNS) * _ACROSS + 6, 40, "run by us", 9, color=QUIET)
    for number, lane in enumerate(LANES):
        _draw_lane(axes, lane, LANES[number - 1] if number else lane, _TOP + number * (_DOWN + 8))
    rectangle(axes, _LEFT, height - 26, 22, 14, MARKED)
    write(axes, _LEFT + 30, height - 19, "differs from the lane above", 9)
    rectangle(axes, _LEFT + 220, height - 26, 22, 14, EMPTY, hatch="////", edgecolor=QUIET)
    write(axes, _LEFT + 250, height - 19, "never run by this project", 9)
    return finish(figure, "my_loop-hero", say_lanes())


def _draw_lane(axes: Axes, lane: Lane, above: Lane, top: float) -> None:
    write(axes, 14, top + _DOWN / 2, lane.name, 9.5, weight="bold")
    for number, (text, before) in enumerate(zip(lane.cells, above.cells, strict=True)):
        left = _LEFT + number * _ACROSS
        fill = MARKED if text != before else CARD
        rectangle(axes, left, top, _ACROSS - 6, _DOWN, fill, linewidth=1.0)
        write(axes, left + 7, top + _DOWN / 2, text, 8.2, linespacing=1.3)
    left = _LEFT + len(COLUMNS) * _ACROSS
    if lane.ran:
        write(axes, left + 8, top + _DOWN / 2, "yes", 9.5)
    else:
        rectangle(axes, left, top, 78, _DOWN, EMPTY, hatch="////", edgecolor=QUIET, linewidth=0)
        write(axes, left + 10, top + _DOWN / 2, "never", 10, color=WRONG, weight="bold",
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
    return "From a laptop to a cluster, each lane with what differs from the one above. " + " ".join(said)


def draw_too_early(report: PlainReport) -> Picture:
    """Whose parameters an optimizer steps that was made before the model was cut."""
    figure, axes = blank(720, 214)
    write(axes, 14, 20, "Made too early: two sets of parameters", 11, weight="bold")
    rows = {
        "the model's, cut": ("gradient", MARKED, 54),
        "the optimizer's, old": ("no gradient", EMPTY, 122),
    }
    for text, (mark, fill, top) in rows.items():
        write(axes, 14, top + 20, text, 9.5)
        for number in range(report.parameters):
            left = 176 + number * 86
            rectangle(axes, left, top, 78, 40, fill, linewidth=1.0)
            write(axes, left + 39, top + 20, mark, 8.5, ha="center")
    said = f"a step moves {report.moved} of the model's parameters, and raises no error"
    write(axes, 14, 188, said, 9.5, weight="bold", color=WRONG)
    alt = (
        f"The model has {report.parameters} new parameters with gradients; the optimizer has as many old "
        f"ones without. {said[0].upper()}{said[1:]}."
    )
    return finish(figure, "my_loop-too-early", alt)


def draw_bits(report: BitsReport) -> Picture:
    """For each question on bits, how many tensors have the same ones, as a bar."""
    figure, axes = blank(720, 60 + 44 * len(report.rows))
    write(axes, 14, 20, "The same bits on both grids?", 11, weight="bold")
    said = []
    for number, row in enumerate(report.rows):
        top = 44 + number * 44
        write(axes, 14, top + 14, f"{row.name}: {row.what}", 9)
        rectangle(axes, 400, top, 120, 28, EMPTY, linewidth=1.0)
        rectangle(axes, 400, top, 120 * row.alike / row.tensors, 28, RANKS[2], linewidth=1.0)
        count = f"{row.alike} of {row.tensors} tensors"
        write(axes, 532, top + 14, count + ("" if row.is_same else f", off by {row.furthest:.0e}"), 9)
        said.append(f"{row.name}, {row.what}: the same bits in {count}.")
    return finish(figure, "my_loop-bits", " ".join(said))
