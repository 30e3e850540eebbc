"""Pictures of lesson 08: both cuts, spectra and distances of their updates, and what a gather made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...plan.layout import Shard, shard_box
from ..inputs.recordings import real_gradient
from ..pictures.colours import ADAMW, INK, MUON, QUIET, SGD, WRONG, rank_colour
from ..pictures.picture import Picture, blank, finish, rectangle, write
from ..pictures.spectra import Curve, card, decades, legend, plot, style
from ..widgets.shell import Shell, choice, show
from .cuts import CUTS, DIMS, SHAPE, Comparison, compare, matrices, patches, pieces_alone
from .exercises import judge_result
from .on_ranks import GatherRun, first_wrong

COLOURS = {"columns": SGD, "rows": ADAMW}


def picture_of_cuts(tp: int) -> Picture:
    """Both ways in which tp can cut the matrix."""
    figure, axes = blank(880, 184)
    said = []
    for number, (name, dim) in enumerate(DIMS.items()):
        left = _write_title(axes, f"Cut by {name}", f"each place along tp holds a run of {name}", number)
        for place in range(tp):
            box = shard_box(SHAPE, Shard(dim), place, tp)
            _draw_run(axes, (*box.offset, *box.shape), place, 400 / SHAPE[1], (left, 62))
        said.append(
            f"A {SHAPE[0]} × {SHAPE[1]} matrix cut by {name}: each of {tp} places holds {box.shape[dim]}."
        )
    return finish(figure, "shards_alone-cuts", " ".join(said))


def _write_title(axes: Axes, title: str, what: str, number: int) -> float:
    """Title of the first or second half of a card; returns where that half begins."""
    left = 24 + 430 * number
    write(axes, left, 24, title, 11, weight="bold")
    write(axes, left, 46, what, 9, color=QUIET)
    return left


def picture_of_panels(matrix: Tensor, tp: int, name: str = "shards_alone-panels") -> Picture:
    """Spectrum of the whole and of the pieces; cosine and distance, by number of pieces and by cut."""
    found = {cut: {n: _compare_cut(matrix, cut, n) for n in CUTS} for cut in DIMS}
    here = {cut: _compare_cut(matrix, cut, tp) for cut in DIMS}
    figure = card(880, 620)
    panels = [figure.add_subplot(2, 2, number) for number in (1, 2, 3, 4)]
    _draw_whole(panels[0], matrix)
    _draw_pieces(panels[1], here, f"2 · {tp} pieces, each alone, put together")
    for panel, name_of in ((panels[2], "cosine"), (panels[3], "distance")):
        lines = {c: [getattr(f, name_of) for f in by.values()] for c, by in found.items()}
        _draw_lines(panel, lines, f"{panels.index(panel) + 1} · {name_of} to UVᵀ")
    figure.tight_layout(h_pad=2.0, w_pad=2.0)
    said = [_say_cut(cut, n, result) for cut, by in found.items() for n, result in by.items() if n > 1]
    alt = f"Of {real_gradient('down')}: whole, all singular values become 1. {' '.join(said)}"
    return finish(figure, name, alt)


def _compare_cut(matrix: Tensor, cut: str, pieces: int) -> Comparison:
    return compare(pieces_alone(matrix, DIMS[cut], pieces), matrix)


def _say_cut(cut: str, count: int, result: Comparison) -> str:
    low, high = result.values[-1], result.values[0]
    return (
        f"Cut by {cut} into {count}: singular values {low:.2f} to {high:.2f}, "
        f"cosine {result.cosine:.2f}, distance {result.distance:.2f}."
    )


def _draw_whole(axes: Axes, matrix: Tensor) -> None:
    style(axes, "1 · the whole matrix", "direction, the loudest first", "singular value")
    decades(axes, high=3.0)
    before = Curve.relative("the gradient (loudest = 1)", torch.linalg.svdvals(matrix), ADAMW, "--")
    plot(axes, [before, Curve.of("orthogonalized: UVᵀ", torch.ones(min(matrix.shape)), MUON)])
    legend(axes, "lower left")


def _draw_pieces(axes: Axes, results: dict[str, Comparison], title: str) -> None:
    style(axes, title, "direction, the loudest first", "singular value")
    axes.axhline(1, color=MUON, linewidth=1.4, label="UVᵀ")
    for cut, result in results.items():
        steps, label = range(1, len(result.values) + 1), f"cut by {cut}: cosine {result.cosine:.2f}"
        axes.plot(steps, result.values, color=COLOURS[cut], linewidth=2, label=label)
    axes.set_ylim(0, 3.4)
    legend(axes, "upper right")


def _draw_lines(axes: Axes, lines: dict[str, list[float]], title: str) -> None:
    style(axes, title, "number of pieces (tp)", "")
    for cut, values in lines.items():
        axes.plot(range(len(CUTS)), values, "o-", color=COLOURS[cut], linewidth=2, label=f"cut by {cut}")
    axes.set_xticks(range(len(CUTS)), [str(count) for count in CUTS])
    axes.set_ylim(0, 1.08 if "cosine" in title else 1.7)
    legend(axes, "lower left" if "cosine" in title else "upper left")


def picture_of_choice(matrix: str, cut: str, pieces: int) -> Picture:
    """One matrix, one cut: the spectrum of the pieces' update, and how far it is from UVᵀ."""
    result = _compare_cut(matrices()[matrix], cut, pieces)
    figure = card(820, 330)
    axes = figure.add_axes((0.08, 0.16, 0.5, 0.72))
    _draw_pieces(axes, {cut: result}, f"{matrix}, cut by {cut} into {pieces}")
    verdict = "the same update" if result.at_best < 1e-3 else _verdict(result)
    lines = (
        f"cosine to UVᵀ   {result.cosine:.3f}\ndistance        {result.distance:.3f}\n"
        f"  rescaled      {result.at_best:.3f}\n\n{verdict}"
    )
    figure.text(0.63, 0.8, lines, size=10.5, family="DejaVu Sans Mono", va="top", color=INK, linespacing=1.6)
    alt = f"{matrix}: {_say_cut(cut, pieces, result)} {verdict}.".replace("\n", " ")
    return finish(figure, "shards_alone-choice", alt)


def _verdict(result: Comparison) -> str:
    flat = result.values[0] - result.values[-1] < 1e-6
    near = result.at_best < 0.25
    return ("flat, and " if flat else "not flat, ") + ("nearly right" if near else "wrong")


def picture_of_choices(tp: int) -> Picture:
    """Every matrix and both cuts at once: what the widget shows without a kernel."""
    kinds = matrices()
    figure = card(900, 300)
    said = []
    for number, (kind, matrix) in enumerate(kinds.items()):
        results = {cut: _compare_cut(matrix, cut, tp) for cut in DIMS}
        axes = figure.add_subplot(1, len(kinds), number + 1)
        _draw_pieces(axes, results, f"{kind}, {tp} pieces")
        said += [f"{kind}: {_say_cut(cut, tp, result)}" for cut, result in results.items()]
    figure.tight_layout()
    return finish(figure, "shards_alone-choices", " ".join(said))


def explore(tp: int, live: bool = True) -> Shell | Picture:
    """Buttons for the matrix, the cut and the number of pieces, over what comes out."""
    kinds = {name: name for name in ("real", "Gaussian", "power law")}
    return show(
        picture_of_choice,
        picture_of_choices(tp),
        live,
        matrix=choice("matrix", kinds),
        cut=choice("cut by", {name: name for name in DIMS}),
        pieces=choice("pieces", {str(count): count for count in CUTS[1:]}),
    )


def picture_of_gathered(run: GatherRun, name: str = "shards_alone-gathered") -> Picture:
    """What rank 0 put together, either way, coloured by the tp position that each number came from.

    Where a rank went wrong, the first such rank stands in for rank 0, and its first wrong number is marked.
    """
    shown = {dim: _shown(run, dim) for dim in (1, 0)}
    tall = any(isinstance(result, Tensor) and tuple(result.shape) != SHAPE for _, result in shown.values())
    figure, axes = blank(880, 250 if tall else 184)
    said = []
    for number, (dim, (rank, result)) in enumerate(shown.items()):
        title = f"Cut by {'columns' if dim else 'rows'}: what rank {rank} put together"
        what = _say_result(result)
        said.append(f"{title}: {what}.")
        left = _write_title(axes, title, what, number)
        _draw_result(axes, result, dim, run.tp, (left, 62))
    return finish(figure, name, " ".join(said))


def _shown(run: GatherRun, dim: int) -> tuple[int, Any]:
    wrong = (rank for rank, at, result in run.each() if at == dim and judge_result(run, rank, dim, result))
    rank = next(wrong, 0)
    return rank, run.results[rank][dim]


def _say_result(result: Any) -> str:
    if not isinstance(result, Tensor) or result.ndim != 2:
        return "no matrix"
    shape = f"{result.shape[0]} × {result.shape[1]}"
    if tuple(result.shape) != SHAPE:
        return f"{shape}, a wrong shape"
    wrong = first_wrong(result)
    return f"{shape}, wrong from row {wrong[0]}, column {wrong[1]}" if wrong else f"{shape}, all in place"


def _draw_result(axes: Axes, result: Any, dim: int, tp: int, corner: tuple[float, float]) -> None:
    if not isinstance(result, Tensor) or result.ndim != 2:
        return
    rows, columns = result.shape
    scale = min(400 / columns, 170 / rows)
    for place, *box in patches(_places(result, dim, tp)):
        _draw_run(axes, box, int(place), scale, corner)
    wrong = first_wrong(result) if (rows, columns) == SHAPE else None
    if wrong is not None:
        x, y = corner[0] + wrong[1] * scale, corner[1] + wrong[0] * scale
        axes.plot(x, y, "x", color=WRONG, markersize=11, markeredgewidth=3, clip_on=False, zorder=9)


def _places(result: Tensor, dim: int, tp: int) -> list[list[int]]:
    """The tp position that each number came from; −1 where it is no number of the matrix."""
    value = torch.nan_to_num(result.double(), nan=-1.0).clamp(-1, SHAPE[0] * SHAPE[1]).long()
    index = value % SHAPE[1] if dim == 1 else value // SHAPE[1]
    place = index // (SHAPE[dim] // tp)
    return torch.where((value < 0) | (value >= SHAPE[0] * SHAPE[1]), -1, place).tolist()


def _draw_run(axes: Axes, box: Sequence[int], place: int, scale: float, corner: tuple[float, float]) -> None:
    row, column, height, width = box
    x, y = corner[0] + column * scale, corner[1] + row * scale
    fill = "#ffffff" if place < 0 else rank_colour(place)
    rectangle(axes, x, y, width * scale, height * scale, fill, linewidth=0.8)
    if height * scale > 14 and width * scale > 34:
        label = f"tp {place}" if place >= 0 else "?"
        write(axes, x + width * scale / 2, y + height * scale / 2, label, 9, ha="center")
