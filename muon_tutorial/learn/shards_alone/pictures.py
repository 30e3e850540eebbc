"""Pictures of lesson 08: both ways to cut a matrix, and the result of a gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...plan.layout import Shard, shard_box
from ..pictures.colours import CARD, QUIET, WRONG, rank_colour
from ..pictures.holdings import patches
from ..pictures.picture import Picture, Point, blank, finish, tile, write
from .cuts import DIMS, SHAPE
from .exercises import judge_result
from .on_ranks import GatherRun, first_wrong


def picture_of_cuts(tp: int) -> Picture:
    """Both ways in which the ranks of one tp group can hold the matrix."""
    figure, axes = blank(880, 184)
    said = []
    for number, (name, dim) in enumerate(DIMS.items()):
        kind = "row parallel" if dim else "column parallel"
        left = _write_title(axes, f"Cut by {name} (dim {dim})", f"of a Linear: {kind}", number)
        for place in range(tp):
            box = shard_box(SHAPE, Shard(dim), place, tp)
            _draw_run(axes, (*box.offset, *box.shape), place, 400 / SHAPE[1], (left, 66))
        holds = f"each of {tp} ranks holds {box.shape[dim]}"
        said.append(f"A {SHAPE[0]} × {SHAPE[1]} matrix cut by {name}: {holds}.")
    return finish(figure, "shards_alone-cuts", " ".join(said))


def _write_title(axes: Axes, title: str, what: str, number: int) -> float:
    """Title of the first or second half of a card; returns where that half begins."""
    left = 24 + 430 * number
    write(axes, left, 22, title, 12.5, weight="bold")
    write(axes, left, 47, what, 12, color=QUIET)
    return left


def picture_of_gathered(run: GatherRun) -> Picture:
    """The matrices that rank 0, or the first wrong rank, gathered for both cuts, coloured by rank."""
    shown = {dim: _shown(run, dim) for dim in (1, 0)}
    tall = any(isinstance(result, Tensor) and tuple(result.shape) != SHAPE for _, result in shown.values())
    figure, axes = blank(880, 250 if tall else 184)
    said = []
    for number, (dim, (rank, result)) in enumerate(shown.items()):
        title = f"Cut by {'columns' if dim else 'rows'}: what rank {rank} put together"
        what = _say_result(result)
        said.append(f"{title}: {what}.")
        left = _write_title(axes, title, what, number)
        _draw_result(axes, result, dim, run.tp, rank // run.tp * run.tp, (left, 66))
    return finish(figure, "shards_alone-gathered", " ".join(said))


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


def _draw_result(axes: Axes, result: Any, dim: int, tp: int, first: int, corner: Point) -> None:
    """A result's entries, coloured by source rank; ``first`` is the first rank of the tp group."""
    if not isinstance(result, Tensor) or result.ndim != 2:
        return
    rows, columns = result.shape
    scale = min(400 / columns, 170 / rows)
    # the tp position that each entry came from; −1 if it is not an entry of the matrix
    value = torch.nan_to_num(result.double(), nan=-1.0).clamp(-1, SHAPE[0] * SHAPE[1]).long()
    index = value % SHAPE[1] if dim == 1 else value // SHAPE[1]
    places = torch.where((value < 0) | (value >= SHAPE[0] * SHAPE[1]), -1, index // (SHAPE[dim] // tp))
    for place, *box in patches(places.tolist()):
        _draw_run(axes, box, first + int(place) if place >= 0 else None, scale, corner)
    if (rows, columns) == SHAPE and (wrong := first_wrong(result)) is not None:
        x, y = corner[0] + wrong[1] * scale, corner[1] + wrong[0] * scale
        axes.plot(x, y, "x", color=WRONG, markersize=11, markeredgewidth=3, clip_on=False, zorder=9)


def _draw_run(axes: Axes, box: Sequence[int], rank: int | None, scale: float, corner: Point) -> None:
    row, column, height, width = box
    x, y = corner[0] + column * scale, corner[1] + row * scale
    fill, text = (CARD, "?") if rank is None else (rank_colour(rank), f"rank {rank}")
    text = text if height * scale > 14 and width * scale > 46 else ""
    tile(axes, (x, y, width * scale, height * scale), fill, text, linewidth=0.8)
