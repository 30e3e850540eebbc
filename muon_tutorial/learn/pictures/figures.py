"""Pictures of plans and runs: pure functions from data to one ``Picture``. They start nothing."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ...plan.layout import Box
from .colours import EMPTY, INK, QUIET, rank_colour
from .holdings import RankBoxes, StepMoment, layers
from .picture import Picture, blank, finish, rectangle, write

_MARGIN, _GAP, _HEADER = 28, 56, 92


def draw_holdings(moments: Sequence[StepMoment], shape: tuple[int, int], name: str = "holdings") -> Picture:
    """One matrix, coloured by holder, at each moment: what is held twice shows as copies, a cut as edges."""
    stacks = [layers(moment.held) for moment in moments]
    width, height = _tile_size(shape, len(moments), most=max(map(len, stacks)))
    rows = max(map(len, stacks)) * (height + 26)
    across = 2 * _MARGIN + len(moments) * (width + _GAP) - _GAP
    figure, axes = blank(round(across), round(_HEADER + rows + 14))
    for column, (moment, stack) in enumerate(zip(moments, stacks, strict=True)):
        left = _MARGIN + column * (width + _GAP)
        _write_header(axes, moment, left)
        top = _HEADER + (rows - len(stack) * (height + 26)) / 2
        for number, layer in enumerate(stack):
            _draw_layer(axes, layer, shape, (left, top + number * (height + 26), width, height))
            if len(stack) > 1:
                bottom = top + number * (height + 26) + height
                write(axes, left, bottom + 11, f"copy {number + 1} of {len(stack)}", 8, color=QUIET)
        if column:
            ends = [(x, _HEADER + rows / 2 - 13) for x in (left - _GAP + 12, left - 12)]
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color=INK))
    return finish(figure, name, " ".join(_describe(moment, shape) for moment in moments))


def _tile_size(shape: tuple[int, int], columns: int, most: int) -> tuple[float, float]:
    """Pixels for one matrix: as wide as fits beside the others, in a card that fits a screen."""
    width = min(260.0, (900 - 2 * _MARGIN - (columns - 1) * _GAP) / columns)
    height = min(width * shape[0] / shape[1], 360 / most - 26)
    return width, max(height, 48.0)


def _write_header(axes: Axes, moment: StepMoment, left: float, top: float = 0.0) -> None:
    write(axes, left, top + 24, moment.title, 11.5, weight="bold")
    axes.text(left, top + 44, moment.what, size=9, va="top", color=QUIET, linespacing=1.35)


def _draw_layer(
    axes: Axes, layer: Sequence[RankBoxes], shape: tuple[int, int], frame: tuple[float, float, float, float]
) -> None:
    left, top, width, height = frame
    rectangle(axes, left, top, width, height, EMPTY, linewidth=1.6, zorder=3)
    for item, box in ((held, box) for held in layer for box in held.boxes if box.numel):
        x, y = left + width * box.offset[1] / shape[1], top + height * box.offset[0] / shape[0]
        across, down = width * box.shape[1] / shape[1], height * box.shape[0] / shape[0]
        rectangle(axes, x, y, across, down, rank_colour(item.rank), linewidth=1.2, zorder=4)
        if box == max(item.boxes, key=lambda other: other.numel) and min(across / 4, down) > 9:
            label = f"rank {item.rank}" + (f"\nbytes {item.content}" if item.content and down > 30 else "")
            size = min(9.5, across / 6, down / (3.0 if "\n" in label else 1.6))
            write(axes, x + across / 2, y + down / 2, label, size, ha="center", zorder=5)


def _describe(moment: StepMoment, shape: tuple[int, int]) -> str:
    said = [f"rank {held.rank} holds {say_held(held, shape)}" for held in moment.held]
    return f"{moment.title}: {moment.what.replace(chr(10), ' ')}. {'; '.join(said)}."


def say_held(held: RankBoxes, shape: tuple[int, int]) -> str:
    """What a rank holds, in words: rows and columns, and the name of the contents."""
    boxes = [_say_box(box, shape) for box in held.boxes if box.numel]
    content = f" (bytes {held.content})" if held.content and boxes else ""
    return (" and ".join(boxes) or "nothing") + content


def _say_box(box: Box, shape: tuple[int, int]) -> str:
    if box.shape == shape:
        return "the whole matrix"
    edges = zip(("row", "column"), box.offset, box.shape, shape, strict=True)
    return ", ".join(_say_run(*edge) for edge in edges)


def _say_run(word: str, start: int, length: int, whole: int) -> str:
    if length == whole:
        return f"all {word}s"
    return f"{word}s {start} to {start + length - 1}" if length > 1 else f"{word} {start}"
