"""What notebook 07 imports: one real gradient, cut and orthogonalized in pieces, and what that does to it.

All but the timings is exact UVᵀ in float64, so that what is seen comes from the cut, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from ...errors import RankFailedError
from ...launching.launch import launch
from ...newton_schulz import zeropower_via_newtonschulz
from ...plan.layout import Shard, shard_box
from ...worlds.live import build_mesh, gather_objects
from ..checks.exercise import Exercise, MistakeError, OpenAnswerError, numbers
from ..inputs import measure
from ..inputs.recordings import real_gradient
from ..lesson03 import fastest, say_failure
from ..pictures.picture import INK, QUIET, Picture, blank, finish, holder_colour
from ..pictures.spectra import BLUE, GREEN, ORANGE, Curve, card, decades, plot, style
from ..widgets.shell import Shell, choice, show

SHAPE = (64, 256)
CUTS = (1, 2, 4, 8)
DIMS = {"columns": 1, "rows": 0}
COLOURS = {"columns": ORANGE, "rows": BLUE}
ALARM = "#b00020"

Gather = Callable[[Tensor, int, Any], Any]


def orthogonal(matrix: Tensor) -> Tensor:
    """The exact orthogonal factor UVᵀ: the same directions, every singular value 1."""
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vt


def my_piece(matrix: Tensor, dim: int, place: int, tp: int) -> Tensor:
    """A copy of what one place along tp holds of a matrix that is cut along ``dim``."""
    return matrix[shard_box(tuple(matrix.shape), Shard(dim), place, tp).slices].clone()


def pieces_alone(matrix: Tensor, dim: int, tp: int) -> Tensor:
    """Every piece orthogonalized by itself, and the results put together again."""
    pieces = [orthogonal(my_piece(matrix, dim, place, tp)) for place in range(tp)]
    return torch.cat(pieces, dim=dim)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An update beside the UVᵀ it should be.

    ``cosine`` is 1 where it points the same way; ``distance`` is the size of the difference over the size of
    UVᵀ, and ``at_best`` what is left of it after the best rescaling. ``values`` are singular values.
    """

    cosine: float
    distance: float
    at_best: float
    values: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"singular values    {self.values[-1]:.3f} to {self.values[0]:.3f}\n"
            f"cosine to UVᵀ      {self.cosine:.3f}\n"
            f"distance to UVᵀ    {self.distance:.3f}   (after the best rescaling {self.at_best:.3f})"
        )


def compare(update: Tensor, matrix: Tensor) -> Comparison:
    """An update beside the UVᵀ of the whole matrix."""
    ideal = orthogonal(matrix)
    cosine = ((update * ideal).sum() / (update.norm() * ideal.norm())).item()
    distance = ((update - ideal).norm() / ideal.norm()).item()
    values = torch.linalg.svdvals(update).tolist()
    return Comparison(cosine, distance, max(0.0, 1 - cosine**2) ** 0.5, tuple(values))


def gradient() -> Tensor:
    """A real gradient, 64 × 256, recorded in training."""
    return real_gradient("down").matrix


def matrices() -> dict[str, Tensor]:
    """The real gradient, and two made up: independent numbers, and few loud directions among many quiet."""
    numbers = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(numbers, full_matrices=False)
    loud = torch.arange(1, SHAPE[0] + 1, dtype=torch.float64) ** -1.5
    return {"real": gradient(), "Gaussian": numbers, "power law": u @ torch.diag(loud) @ vt}


def picture_of_cuts(tp: int) -> Picture:
    """Both ways in which tp can cut the matrix."""
    figure, axes = blank(880, 184)
    said = []
    for number, (name, dim) in enumerate(DIMS.items()):
        left = _write_title(axes, f"Cut by {name}", f"each place along tp holds a run of {name}", number)
        for place in range(tp):
            box = shard_box(SHAPE, Shard(dim), place, tp)
            (row, column), (height, width) = box.offset, box.shape
            _draw_run(axes, (row, column, height, width), place, 400 / SHAPE[1], (left, 62))
        said.append(
            f"A {SHAPE[0]} × {SHAPE[1]} matrix cut by {name}: each of {tp} places holds {box.shape[dim]}."
        )
    return finish(figure, "lesson07-cuts", " ".join(said))


def _write_title(axes: Axes, title: str, what: str, number: int) -> float:
    """Title of the first or second half of a card; returns where that half begins."""
    left = 24 + 430 * number
    axes.text(left, 24, title, size=11, weight="bold", va="center", color=INK)
    axes.text(left, 46, what, size=9, va="center", color=QUIET)
    return left


def picture_of_panels(matrix: Tensor, tp: int, name: str = "lesson07-panels") -> Picture:
    """Spectrum of the whole and of the pieces; cosine and distance, by number of pieces and by cut."""
    found = {
        cut: {n: compare(pieces_alone(matrix, dim, n), matrix) for n in CUTS} for cut, dim in DIMS.items()
    }
    here = {cut: compare(pieces_alone(matrix, dim, tp), matrix) for cut, dim in DIMS.items()}
    figure = card(880, 620)
    panels = [figure.add_subplot(2, 2, number) for number in (1, 2, 3, 4)]
    _draw_whole(panels[0], matrix)
    _draw_pieces(panels[1], here, f"2 · {tp} pieces, each alone, put together")
    _draw_lines(
        panels[2], {c: [f.cosine for f in by.values()] for c, by in found.items()}, "3 · cosine to UVᵀ"
    )
    _draw_lines(
        panels[3], {c: [f.distance for f in by.values()] for c, by in found.items()}, "4 · distance to UVᵀ"
    )
    figure.tight_layout(h_pad=2.0, w_pad=2.0)
    said = [_say_cut(cut, n, result) for cut, by in found.items() for n, result in by.items() if n > 1]
    return finish(
        figure, name, f"Of {real_gradient('down')}: whole, all singular values become 1. {' '.join(said)}"
    )


def _say_cut(cut: str, count: int, result: Comparison) -> str:
    low, high = result.values[-1], result.values[0]
    return (
        f"Cut by {cut} into {count}: singular values {low:.2f} to {high:.2f}, "
        f"cosine {result.cosine:.2f}, distance {result.distance:.2f}."
    )


def _draw_whole(axes: Axes, matrix: Tensor) -> None:
    style(axes, "1 · the whole matrix", "direction, the loudest first", "singular value")
    decades(axes, high=3.0)
    before = Curve.relative("the gradient (loudest = 1)", torch.linalg.svdvals(matrix), BLUE, "--")
    plot(axes, [before, Curve.of("orthogonalized: UVᵀ", torch.ones(min(matrix.shape)), GREEN)])
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="lower left")


def _draw_pieces(axes: Axes, results: dict[str, Comparison], title: str) -> None:
    style(axes, title, "direction, the loudest first", "singular value")
    axes.axhline(1, color=GREEN, linewidth=1.4, label="UVᵀ")
    for cut, result in results.items():
        steps = range(1, len(result.values) + 1)
        axes.plot(steps, result.values, color=COLOURS[cut], linewidth=2, label=_label(cut, result))
    axes.set_ylim(0, 3.4)
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="upper right")


def _label(cut: str, result: Comparison) -> str:
    return f"cut by {cut}: cosine {result.cosine:.2f}"


def _draw_lines(axes: Axes, lines: dict[str, list[float]], title: str) -> None:
    style(axes, title, "number of pieces (tp)", "")
    for cut, values in lines.items():
        axes.plot(range(len(CUTS)), values, "o-", color=COLOURS[cut], linewidth=2, label=f"cut by {cut}")
    axes.set_xticks(range(len(CUTS)), [str(count) for count in CUTS])
    axes.set_ylim(0, 1.08 if "cosine" in title else 1.7)
    axes.legend(
        fontsize=8.5, frameon=False, labelcolor=INK, loc="lower left" if "cosine" in title else "upper left"
    )


def picture_of_choice(matrix: str, cut: str, pieces: int) -> Picture:
    """One matrix, one cut: the spectrum of the pieces' update, and how far it is from UVᵀ."""
    whole = matrices()[matrix]
    result = compare(pieces_alone(whole, DIMS[cut], pieces), whole)
    figure = card(820, 330)
    axes = style(figure.add_axes((0.08, 0.16, 0.5, 0.72)), f"{matrix}, cut by {cut} into {pieces}",
                 "direction, the loudest first", "singular value")  # fmt: skip
    _draw_pieces(axes, {cut: result}, f"{matrix}, cut by {cut} into {pieces}")
    verdict = "the same update" if result.at_best < 1e-3 else _verdict(result)
    lines = (
        f"cosine to UVᵀ   {result.cosine:.3f}\ndistance        {result.distance:.3f}\n"
        f"  rescaled      {result.at_best:.3f}\n\n{verdict}"
    )
    figure.text(0.63, 0.8, lines, size=10.5, family="DejaVu Sans Mono", va="top", color=INK, linespacing=1.6)
    return finish(
        figure, "lesson07-choice", f"{matrix}: {_say_cut(cut, pieces, result)} {verdict}.".replace("\n", " ")
    )


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
        results = {cut: compare(pieces_alone(matrix, dim, tp), matrix) for cut, dim in DIMS.items()}
        axes = figure.add_subplot(1, len(kinds), number + 1)
        _draw_pieces(axes, results, f"{kind}, {tp} pieces")
        said += [f"{kind}: {_say_cut(cut, tp, result)}" for cut, result in results.items()]
    figure.tight_layout()
    return finish(figure, "lesson07-choices", " ".join(said))


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


def predict(tp: int) -> Exercise:
    """The guess: the largest singular value of the pieces' update, and whether it is UVᵀ."""
    result = compare(pieces_alone(gradient(), 1, tp), gradient())

    def judge(largest: object, is_uvt: object) -> str | None:
        if not isinstance(largest, (int, float)) or not isinstance(is_uvt, bool):
            return "Give a number, and True or False."
        if abs(largest - result.values[0]) > 0.03:
            return f"largest: {largest:g} is not it. {_why_not(largest, tp)}"
        if is_uvt != (result.distance < 1e-6):
            return "is_uvt: a UVᵀ has no singular value but 1."
        return None

    hints = ("Take one row of length 1 from each piece, and put them side by side. How long is the result?",)
    return Exercise(judge, hints, "The whole has more length than any piece, in every direction.")


def _why_not(largest: float, tp: int) -> str:
    if largest == 1:
        return "1 is right for each piece by itself. Put side by side, lengths grow."
    if largest == tp:
        return "Lengths do not add; their squares do."
    return "Run the next cells, and look at what comes out."


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the ranks sent back from a gather: by rank, and by the dimension that was cut."""

    dp: int
    tp: int
    results: tuple[dict[int, Any], ...]

    @property
    def is_open(self) -> bool:
        """Whether the function was a stub still."""
        return all(result is ... for mine in self.results for result in mine.values())

    def each(self) -> Iterator[tuple[int, int, Any]]:
        """(rank, dim, result), cut by columns first."""
        return ((rank, dim, mine[dim]) for dim in (1, 0) for rank, mine in enumerate(self.results))


def gather_whole(piece: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The whole matrix from the pieces of a group's ranks. All of them must call."""
    return torch.cat(gather_objects(piece, group), dim=dim)


def probe() -> Tensor:
    """A matrix in which every number says where it belongs: row × 256 + column."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def run_gather(function: Gather, dp: int, tp: int, backend: str = "gloo") -> Gathered:
    """Play ``function(piece, dim, tp group)`` on real ranks, both cuts; the reference, where it is a stub.

    Where a rank fails, says why, and returns results that are no matrices.
    """
    try:
        run = _run(function, dp, tp, backend)
    except RankFailedError as error:
        print(_say_trouble(error, dp, tp))
        return Gathered(dp, tp, ({1: None, 0: None},) * (dp * tp))
    if not run.is_open:
        return run
    print("No answer yet: this is the reference.")
    return _run(gather_whole, dp, tp, backend)


def _run(function: Gather, dp: int, tp: int, backend: str) -> Gathered:
    results = launch(play, dp * tp, args=(function, dp, tp), backend=backend, timeout=10.0)
    return Gathered(dp, tp, tuple(results))


def play(rank: int, function: Gather, dp: int, tp: int) -> dict[int, Any]:
    """One rank's part: gather the probe, cut either way."""
    group = tp_group(dp, tp)
    return {dim: function(my_piece(probe(), dim, rank % tp, tp), dim, group) for dim in (1, 0)}


def tp_group(dp: int, tp: int) -> dist.ProcessGroup:
    """The group of this rank's tp line. All ranks must call."""
    return build_mesh({"dp": dp, "tp": tp}).get_group("tp")


def check_gather(dp: int, tp: int, backend: str = "gloo") -> Exercise:
    """The exercise: put the pieces of a tp line together, cut by columns or by rows, on real ranks."""

    def judge(function: Gather) -> str | None:
        try:
            run = _run(function, dp, tp, backend)
        except RankFailedError as error:
            raise MistakeError(" ".join(_say_trouble(error, dp, tp).split())) from None
        if run.is_open:
            raise OpenAnswerError
        return next(filter(None, (_judge_result(run, *each) for each in run.each())), None)

    hints = (
        "dist.all_gather(pieces, piece, group=group) fills the list, in the order of the group.",
        "torch.cat(pieces, dim=...) puts them side by side along the dimension that was cut.",
    )
    return Exercise(judge, hints, "Every rank holds the whole matrix, every number in its place, either way.")


def _say_trouble(error: RankFailedError, dp: int, tp: int) -> str:
    """The first rank's failure and the reader's own line, and the reason where the group was left out."""
    told = say_failure(error).split("\nThe other ranks:")[0]
    if dp == 1 or f"expected length {dp * tp}, got {tp}" not in str(error):
        return told
    who = f"all {dp * tp} ranks of the grid answer, not the {tp} of your line along tp"
    return f"{told}\nWithout group=group {who}."


def _judge_result(run: Gathered, rank: int, dim: int, result: Any) -> str | None:
    cut = f"Cut by {'columns' if dim else 'rows'}, rank {rank}"
    if not isinstance(result, Tensor):
        return f"{cut}: return a matrix, not {type(result).__name__}."
    if tuple(result.shape) != SHAPE:
        return f"{cut}: the shape is {tuple(result.shape)}, not {SHAPE}. {_why_shape(run, dim, result)}"
    wrong = first_wrong(result)
    if wrong is None:
        return None
    row, column, value = wrong
    if value is None:
        return f"{cut}: the place at row {row}, column {column} was never filled."
    there = f"row {value // SHAPE[1]}, column {value % SHAPE[1]}"
    return f"{cut}: the shape is right, but at row {row}, column {column} stands the number of {there}."


def _why_shape(run: Gathered, dim: int, result: Tensor) -> str:
    piece = my_piece(probe(), dim, 0, run.tp)
    along = list(piece.shape)
    along[dim] *= run.dp * run.tp
    stacked = list(piece.shape)
    stacked[1 - dim] *= run.tp
    if list(result.shape) == list(piece.shape):
        return "That is one piece; nothing was put together."
    if list(result.shape) == along:
        return "Those are the pieces of all ranks; the tp line alone holds the matrix once."
    if list(result.shape) == stacked:
        return f"The pieces were put together along dim {1 - dim}, but tp cut along dim {dim}."
    return "" if result.ndim == 2 else "Put the pieces side by side, without a new dimension."


def first_wrong(result: Tensor) -> tuple[int, int, int | None] | None:
    """Row, column, and the number that stands at the first wrong place; None if all are right."""
    wrong = (result != probe()).flatten()
    if not bool(wrong.any()):
        return None
    place = int(wrong.int().argmax())
    value = float(result.flatten()[place])
    inside = value.is_integer() and 0 <= value < probe().numel()
    return place // SHAPE[1], place % SHAPE[1], int(value) if inside else None


def picture_of_gathered(run: Gathered, name: str = "lesson07-gathered") -> Picture:
    """What rank 0 put together, either way, coloured by the tp place that each number came from.

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


def _shown(run: Gathered, dim: int) -> tuple[int, Any]:
    wrong = (rank for rank, at, result in run.each() if at == dim and _judge_result(run, rank, dim, result))
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
    for box, place in _runs(_places(result, dim, tp)):
        _draw_run(axes, box, place, scale, corner)
    wrong = first_wrong(result) if (rows, columns) == SHAPE else None
    if wrong is not None:
        x, y = corner[0] + wrong[1] * scale, corner[1] + wrong[0] * scale
        axes.plot(x, y, "x", color=ALARM, markersize=11, markeredgewidth=3, clip_on=False, zorder=9)


Run = tuple[int, int, int, int]


def _places(result: Tensor, dim: int, tp: int) -> list[list[int]]:
    """The tp place that each number came from; −1 where it is no number of the matrix."""
    value = torch.nan_to_num(result.double(), nan=-1.0).clamp(-1, SHAPE[0] * SHAPE[1]).long()
    index = value % SHAPE[1] if dim == 1 else value // SHAPE[1]
    place = index // (SHAPE[dim] // tp)
    return torch.where((value < 0) | (value >= SHAPE[0] * SHAPE[1]), -1, place).tolist()


def _runs(places: Sequence[Sequence[int]]) -> Iterator[tuple[Run, int]]:
    """Rectangles (row, column, height, width) of one place each; rows that are alike are taken together."""
    start = 0
    for row in range(1, len(places) + 1):
        if row == len(places) or places[row] != places[start]:
            column = 0
            for end in range(1, len(places[start]) + 1):
                if end == len(places[start]) or places[start][end] != places[start][column]:
                    yield (start, column, row - start, end - column), places[start][column]
                    column = end
            start = row


def _draw_run(axes: Axes, box: Run, place: int, scale: float, corner: tuple[float, float]) -> None:
    row, column, height, width = box
    x, y = corner[0] + column * scale, corner[1] + row * scale
    fill = "#ffffff" if place < 0 else holder_colour(place)
    axes.add_patch(
        Rectangle((x, y), width * scale, height * scale, facecolor=fill, edgecolor=INK, linewidth=0.8)
    )
    if height * scale > 14 and width * scale > 34:
        label = f"tp {place}" if place >= 0 else "?"
        middle = (x + width * scale / 2, y + height * scale / 2)
        axes.text(*middle, label, size=9, ha="center", va="center", color=INK)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one orthogonalization on a rank: of its piece alone, and of the gathered whole."""

    alone: float
    gathered: float
    gather_only: float


def cost_of_both(rank: int, gather: Gather, dp: int, tp: int, steps: int) -> Cost:
    """Time Newton–Schulz on this rank's piece, a gather, and both for the whole. All ranks must call."""
    piece, group = my_piece(gradient().float(), 1, rank % tp, tp), tp_group(dp, tp)
    dist.barrier()
    return Cost(
        fastest(steps, zeropower_via_newtonschulz, piece),
        fastest(steps, lambda: zeropower_via_newtonschulz(gather(piece, 1, group))),
        fastest(steps, gather, piece, 1, group),
    )


def say_cost(costs: Sequence[Cost], tp: int) -> str:
    """What a rank receives, and what the slowest rank took, in words."""
    piece = SHAPE[0] * SHAPE[1] // tp
    received = (tp - 1) * piece
    alone, gathered, only = (max(getattr(cost, name) for cost in costs) * 1e3 for name in Cost.__slots__)
    return (
        f"numbers a rank holds                 {piece:10,}\n"
        f"numbers it receives in the gather    {received:10,}   ({received * 4:,} bytes in float32)\n"
        f"cores for the {len(costs)} ranks                {measure.cores():10}\n"
        f"Newton–Schulz, its piece alone       {alone:10.2f} ms\n"
        f"gather, then the whole               {gathered:10.2f} ms\n"
        f"of which the gather                  {only:10.2f} ms"
    )


def quiz(tp: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    result = compare(pieces_alone(gradient(), 1, tp), gradient())
    received = SHAPE[0] * SHAPE[1] // tp * (tp - 1)
    expected = {"largest": result.values[0], "cosine": result.cosine, "received": received}
    why = {
        "largest": "Ask alone.values[0].",
        "cosine": "Ask alone.cosine.",
        "received": "A rank receives every piece but its own: (tp - 1) * pieces[0].numel().",
    }
    return numbers(expected, why, within=0.01)
