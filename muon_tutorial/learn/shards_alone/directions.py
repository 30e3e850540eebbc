"""Heat maps of lesson 08: where an update acts, in the gradient's own directions, and its spectrum."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Bbox, BboxTransformTo
from torch import Tensor

from ..pictures.colours import CARD, INK, MUON, OTHER, QUIET, RIGHT, WRONG
from ..pictures.holdings import patches
from ..pictures.picture import Picture, Point, blank, finish, rectangle, write
from ..widgets.shell import Shell, choice, play
from . import cuts
from .cuts import CUTS, DIMS, SHAPE, Comparison, energy_shares, in_directions, matrices, pieces_alone

POOL, SQUARE, SHADES = 4, 8.0, 16
"""Entries along a square's side, pixels along it, and the number of greys."""
HARMLESS = 0.25
"""The distance, after the best rescaling, below which an update counts as nearly right."""


@functools.cache
def alone(matrix: str, cut: str, tp: int) -> tuple[Comparison, Tensor]:
    """The update of shards alone, compared with UVᵀ; and that update in the whole matrix's directions."""
    whole = matrices()[matrix]
    update = pieces_alone(whole, DIMS[cut], tp)
    return cuts.compare(update, whole), in_directions(update, whole)


def hero() -> Picture:
    """The first picture: the gradient uncut and cut by columns, which smears the diagonal."""
    shown = (1, 2, 4)
    figure, axes = blank(880, 74 + 166 * len(shown) + 40, "Where does the update act?", 20, 22, 14)
    write(axes, 20, 48, "down: output directions of the gradient · across: input directions", 12, color=QUIET)
    write(axes, 580, 48, "singular values of the update", 12, color=QUIET)
    said = []
    for row, tp in enumerate(shown):
        result, turned = alone("real", "columns", tp)
        who = f"cut into {tp}, each shard alone" if tp > 1 else "the whole matrix"
        words = f"{who}: {_say_astray(turned)}"
        top = 74 + 166 * row
        write(axes, 20, top + 12, words, 12.5, weight="bold", color=WRONG if tp > 1 else RIGHT)
        _draw_heat(axes, turned, 20, top + 28)
        flat = [value / result.values[0] for value in result.values]
        _draw_values(axes, flat, 1.25, (580, top + 28), OTHER if tp > 1 else MUON)
        write(axes, 592, top + 136, "flat", 12.5)
        said.append(words)
    _draw_sides(axes, 20, 74 + 166 * len(shown) + 4)
    alt = "Uᵀ · update · V of a real gradient, 64 × 256, cut by columns."
    return finish(figure, "shards_alone-hero", f"{alt} {'; '.join(said)}. Every spectrum is flat.")


def _say_astray(turned: Tensor) -> str:
    astray = 1 - energy_shares(turned)[0]
    return "nothing off the diagonal" if astray < 1e-9 else f"{astray:.0%} off the diagonal"


def _draw_sides(axes: Axes, left: float, y: float) -> None:
    """Name a heat map's columns below it."""
    middle, right = (left + SQUARE * side / POOL for side in SHAPE)
    sides = ((left, middle, "inputs it reads"), (middle, right, "inputs that the gradient ignores"))
    for start, stop, words in sides:
        axes.plot([start + 3, stop - 3], [y, y], color=INK, linewidth=1.4)
        write(axes, start + 4, y + 16, words, 12)


def _draw_heat(axes: Axes, turned: Tensor, left: float, top: float, square: float = SQUARE) -> None:
    """Draw the squares: all squares of a shade make one shape, and white ones are left out."""
    shades = shades_of(turned)
    runs: dict[int, list[Path]] = {}
    for shade, row, column, down, across in patches(shades.tolist()):
        corner = left + column * square, top + row * square
        box = Bbox.from_bounds(*corner, across * square, down * square)
        runs.setdefault(int(shade), []).append(Path.unit_rectangle().transformed(BboxTransformTo(box)))
    for shade, boxes in sorted(runs.items()):
        if shade:
            shape = Path.make_compound_path(*boxes)
            axes.add_patch(PathPatch(shape, facecolor=INK, alpha=shade / SHADES, linewidth=0, zorder=3))
    height, width = (side * square for side in shades.shape)
    rectangle(axes, left, top, width, height, "none", linewidth=1.2, edgecolor=QUIET, zorder=4)


def shades_of(turned: Tensor) -> Tensor:
    """Each square's shade, 0 to ``SHADES``: the root of its magnitude, which keeps faint squares visible."""
    rows, columns = (side // POOL for side in turned.shape)
    sizes = (turned**2).view(rows, POOL, columns, POOL).sum((1, 3)).sqrt() / POOL**0.5
    return ((sizes / 2).clamp(max=1).sqrt() * SHADES).round().int()


def _draw_values(axes: Axes, values: Sequence[float], most: float, corner: Point, colour: str) -> None:
    """A spectrum in a frame, the largest value first, from 0 to ``most``."""
    (left, top), width, height = corner, 280, SQUARE * SHAPE[0] / POOL
    rectangle(axes, left, top, width, height, CARD, linewidth=1.2, edgecolor=QUIET)
    across = [left + (place + 0.5) * width / len(values) for place in range(len(values))]
    down = [top + height * (1 - value / most) for value in values]
    axes.plot(across, down, color=colour, linewidth=3, zorder=3)


def draw_alone(halvings: int, cut: str, matrix: str) -> Picture:
    """One frame of the film: a matrix cut into 2 ** ``halvings`` shards, each orthogonalized alone."""
    tp = 2**halvings
    how = f"cut by {cut} into {tp}" if halvings else f"before it is cut by {cut}"
    return draw_update(f"{matrix} matrix, {how}", *alone(matrix, cut, tp), "shards_alone-film")


def draw_update(title: str, result: Comparison, turned: Tensor, name: str) -> Picture:
    """Where an update of a matrix acts, in the matrix's own directions, and its spectrum."""
    on, beside, outside = (f"{share:.0%}" for share in energy_shares(turned))
    most = max(3.0, 1.05 * result.values[0])
    said = f"{title}: cosine {result.cosine:.2f}"
    figure, axes = blank(880, 294, said, 20, 24, 14)
    _draw_heat(axes, turned, 20, 48)
    _draw_sides(axes, 20, 184)
    _draw_values(axes, result.values, most, (580, 48), OTHER)
    level = 48 + SQUARE * SHAPE[0] / POOL * (1 - 1 / most)
    axes.plot([580, 860], [level, level], color=MUON, linewidth=1.4)
    write(axes, 572, level, "1", 12, ha="right", color=QUIET)
    write(axes, 580, 200, _say_values(result), 12)
    best = f"after the best rescaling {result.at_best:.2f}"
    energy = f"energy: {on} on the diagonal, {beside} elsewhere in the square, {outside} on ignored inputs"
    lines = (energy, f"distance to UVᵀ {result.distance:.2f}; {best}")
    for number, line in enumerate(lines):
        write(axes, 20, 238 + 28 * number, line, 12.5)
    return finish(figure, name, f"{said}. {_say_values(result)}; {'; '.join(lines)}.")


def _say_values(result: Comparison) -> str:
    low, high = result.values[-1], result.values[0]
    said = f"all {high:.2f}" if high - low < 1e-6 else f"{high:.2f} to {low:.2f}"
    return f"singular values {said}"


def explore(tp: int, live: bool = True) -> Shell | Picture:
    """The film: the matrix is halved again and again, with buttons for the cut and the matrix."""
    buttons = {"cut": choice("cut by", list(DIMS)), "matrix": choice("matrix", list(matrices()))}
    last, still = len(CUTS) - 1, draw_all(tp)
    return play(draw_alone, last, still, live, label="halvings", interval=1200, **buttons)


def draw_all(tp: int) -> Picture:
    """Every matrix with both cuts in one picture, for a notebook without a kernel."""
    figure, axes = blank(880, 56 + 150 * len(matrices()), f"Cut into {tp}, each shard alone", 20, 24, 14)
    said = []
    for row, matrix in enumerate(matrices()):
        for column, cut in enumerate(DIMS):
            result, turned = alone(matrix, cut, tp)
            left, top = 20 + 432 * column, 44 + 150 * row
            words = f"{matrix}, by {cut}: cosine {result.cosine:.2f}"
            write(axes, left, top + 14, words, 12.5, weight="bold")
            _draw_heat(axes, turned, left, top + 30, 6.4)
            said.append(f"{words}, {_say_values(result)}, {_say_astray(turned)}")
    return finish(figure, "shards_alone-all", f"Cut into {tp}, each shard alone. {'; '.join(said)}.")
