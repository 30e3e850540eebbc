"""Pictures of lesson 15: which ranks wait for which, and a run compared with its oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ...plan.grid import Grid
from .. import inputs
from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, RIGHT_FILL, WRONG, WRONG_FILL
from ..pictures.picture import GridFrame, Picture, arrow, blank, centred, finish, rectangle, write
from .evidence import Wait, hash_of, rungs, waits
from .on_ranks import TrainingRun

SHIPPED = "hang_dp2_tp2.json"


def hero() -> Picture:
    """The first picture of the lesson: a recorded run that hangs, and the rank that causes it."""
    found = json.loads((resources.files(inputs) / "recorded" / SHIPPED).read_text(encoding="utf-8"))
    edges, grid = [Wait(*each) for each in found["waits"]], Grid.of(dp=found["dp"], tp=found["tp"])
    source = f"Recorded on {grid.world_size} real processes"
    return draw_edges(edges, grid, found["guilty"], source, "broken_runs-hero")


def draw_waits(run: TrainingRun, guilty: int = -1) -> Picture:
    """Which ranks wait for which in a run that hangs; edges to ``guilty`` are red."""
    title = f"{run.name[0].upper()}{run.name[1:]}, just now, on {run.grid.world_size} real processes"
    return draw_edges(waits(run), run.grid, guilty, title, f"broken_runs-waits-{run.name.replace(' ', '-')}")


def draw_edges(edges: Sequence[Wait], grid: Grid, guilty: int, title: str, name: str) -> Picture:
    """Ranks on their grid, and an arrow from each waiting rank to the rank that has not made the call."""
    across, down = 280, 176
    width, height = max(540, 150 + across * (grid.size("tp") - 1)), 116 + down * (grid.size("dp") - 1)
    figure, axes = blank(width, height)
    write(axes, 16, 20, title, 11)
    middles = GridFrame(grid, (width - across * (grid.size("tp") - 1)) / 2, 72, across, down)
    place = {rank: middles.cell(rank) for rank in grid.ranks}
    for edge in edges:
        start, stop = place[edge.waiter], place[edge.awaited]
        marked = edge.awaited == guilty
        colour, shrink = WRONG if marked else INK, 20 if start[0] == stop[0] else 42
        ends: dict[str, Any] = {"shrinkA": shrink, "shrinkB": shrink, "connectionstyle": "arc3,rad=0.16"}
        thick = 3.2 if marked else 1.5
        arrow(axes, start, stop, color=colour, linewidth=thick, mutation_scale=20, zorder=4, **ends)
        along, aside = 0.42, 0.075  # the arrow bends here: fractions of its length
        bend_x = start[0] + along * (stop[0] - start[0]) - aside * (stop[1] - start[1])
        bend_y = start[1] + along * (stop[1] - start[1]) + aside * (stop[0] - start[0])
        box = {"facecolor": CARD, "edgecolor": "none", "pad": 1.0}
        centred(axes, bend_x, bend_y, f"{edge.phase}, step {edge.step}", color=colour, zorder=5, bbox=box)
    stuck = {edge.waiter for edge in edges}
    for rank, (x, y) in place.items():
        fill = WRONG_FILL if rank == guilty else MARKED if rank in stuck else EMPTY
        rectangle(axes, x - 52, y - 21, 104, 42, fill, linewidth=2.4 if rank == guilty else 1.0, zorder=6)
        centred(axes, x, y - 7, f"rank {rank}", 11.5, weight="bold", zorder=7)
        centred(axes, x, y + 10, "waits" if rank in stuck else "is gone", zorder=7)
    blame = f" Marked: the edges to rank {guilty}, which should be in those calls." if guilty >= 0 else ""
    waiting = "; ".join(map(str, edges)) or "no rank waits"
    return finish(figure, name, f"{title}. Which rank waits for which: {waiting}.{blame}")


def draw_ladder(run: TrainingRun) -> Picture:
    """Every rung of every rank: green if it equals the oracle's, red if not, grey if not reached."""
    found = rungs(run)
    wide, high, left, top = 104, 24, 132, 72
    ranks = run.grid.world_size
    figure, axes = blank(left + wide * ranks + 20, top + high * (len(found) // ranks) + 14)
    name = f"{run.name[0].upper()}{run.name[1:]}"
    write(axes, 16, 18, f"{name}, rung by rung, beside one process", 12.5, weight="bold")
    write(axes, 16, 38, "green: the oracle's bits · red: others · grey: not reached", 11, color=QUIET)
    for rank in range(ranks):
        centred(axes, left + wide * (rank + 0.5), 60, f"rank {rank}")
    said = []
    for number, rung in enumerate(found):
        row, x = number // ranks, left + wide * rung.rank
        y = top + row * high
        if rung.rank == 0:
            write(axes, 16, y + high / 2, f"{rung.step}  {rung.name}", 11)
        fill = EMPTY if not rung.reached else WRONG_FILL if rung.wrong else RIGHT_FILL
        rectangle(axes, x, y, wide - 4, high - 3, fill, linewidth=1.6 if rung.wrong else 0.4)
        if rung.reached:
            found_there = hash_of(run.reports[rung.rank].notes.rungs[rung.step, rung.name])
            centred(axes, x + wide / 2 - 2, y + high / 2 - 1, found_there, family="monospace")
        if rung.wrong:
            said.append(f"step {rung.step} {rung.name} on rank {rung.rank}")
    differ = f"the first rungs that differ: {'; '.join(said[:ranks])}"
    words = differ if said else "no rung that was reached differs"
    reached = sum(rung.reached for rung in found)
    alt = f"The ladder of {run.name}: of {len(found)} rungs {reached} were reached; {words}."
    return finish(figure, f"broken_runs-ladder-{run.name.replace(' ', '-')}", alt)
