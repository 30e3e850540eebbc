"""Pictures of lesson 15: which ranks wait, a run compared with its oracle, and a fault that spreads."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from ...engine.collective import Collective, Label, Walk
from ...errors import RequestError
from ...plan.grid import Grid
from ...worlds.local import LocalWorld
from .. import inputs
from ..pictures.colours import CARD, EMPTY, INK, MARKED, QUIET, RIGHT_FILL, WRONG, WRONG_FILL
from ..pictures.picture import Picture, arrow, blank, centred, finish, rectangle, write
from ..widgets.shell import Shell, choice, play, rank_choice
from .evidence import Wait, hash_of, rungs, waits
from .on_ranks import TrainingRun
from .training_rank import CALLS

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
    place = {}
    for rank in grid.ranks:
        at = grid.at(rank)
        place[rank] = (width / 2 + across * (at["tp"] - (grid.size("tp") - 1) / 2), 72 + down * at["dp"])
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


def draw_spread(dp: int, tp: int, rank: int, phase: str, fault: str, moment: int) -> Picture:
    """One moment of a step with a fault: what each rank has done, what is wrong, and which ranks wait."""
    film = film_of(dp, tp, rank, phase, fault)
    now = film[min(moment, len(film) - 1)]
    ranks, wide, left, top, high = dp * tp, 124, 96, 78, 44
    figure, axes = blank(left + wide * ranks + 16, top + high * len(CALLS) + 60)
    what = "skips" if fault == "skips" else "brings a wrong number to"
    write(axes, 16, 20, f"Rank {rank} {what} {phase}. After {moment} calls:", 12.5, weight="bold")
    for each in range(ranks):
        weight = "bold" if each == rank else "normal"
        centred(axes, left + wide * (each + 0.5), 52, f"rank {each}", weight=weight)
    for row, name in enumerate(CALLS):
        y = top + row * high
        write(axes, 16, y + high / 2 - 4, name, 11)
        for group in (group for link, group in now.links if link == name):  # ranks that have just called
            ends = [left + wide * (each + 0.5) for each in (group[0], group[-1])]
            axes.plot(ends, [y + high / 2 - 4] * 2, color=INK, linewidth=3, zorder=3)
        for each in range(ranks):
            fill, word = _state(now, (name, each))
            rectangle(axes, left + wide * each + 12, y, wide - 24, high - 12, fill, zorder=5)
            centred(axes, left + wide * (each + 0.5), y + high / 2 - 5, word, zorder=6)
    end = now.end or ("the step has ended" if moment >= len(film) - 1 else "")
    below = textwrap.fill(end, (left + wide * ranks) // 9)
    write(axes, 16, top + high * len(CALLS) + 24, below, 11, color=WRONG if now.end else QUIET)
    words = ([f"{name} {_state(now, (name, each))[1]}" for name in CALLS] for each in range(ranks))
    said = "; ".join(f"rank {each}: {', '.join(told)}" for each, told in enumerate(words))
    alt = f"Moment {moment}: rank {rank} {what} {phase}. {said}. {end}"
    return finish(figure, f"broken_runs-spread-{rank}-{phase}-{fault}-{moment}", alt)


def _state(now: Moment, cell: tuple[str, int]) -> tuple[str, str]:
    if cell in now.wrong:
        return WRONG_FILL, "wrong"
    if cell in now.done:
        return RIGHT_FILL, "right"
    return (MARKED, "waits") if cell in now.waiting else (EMPTY, "–")


def explore_spread(dp: int, tp: int, live: bool = True) -> Shell | Picture:
    last, draw = moments_of(dp, tp), functools.partial(draw_spread, dp, tp)
    still = draw_spread(dp, tp, 2, "average", "wrong", last)
    ranks, phases = rank_choice(dp * tp), choice("phase", list(CALLS))
    ranks.value, phases.value = 2, "average"
    faults = choice("fault", {"a wrong number": "wrong", "a skipped call": "skips"})
    return play(draw, last, still, live, rank=ranks, phase=phases, fault=faults)


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after some calls: which (phase, rank) are done, wrong, or waiting."""

    done: frozenset[tuple[str, int]]
    wrong: frozenset[tuple[str, int]]
    waiting: frozenset[tuple[str, int]]
    links: tuple[tuple[str, tuple[int, ...]], ...]
    end: str = ""


@functools.cache
def film_of(dp: int, tp: int, rank: int, phase: str, fault: str) -> tuple[Moment, ...]:
    """All moments of one step with this fault. In the first moment, no call has been answered."""
    world = LocalWorld(Grid.of(dp=dp, tp=tp))
    world.start([_program(each, rank, phase, fault) for each in world.grid.ranks])
    moments = [Moment(frozenset(), frozenset(), frozenset(), ())]
    while True:
        try:
            event = world.advance()
        except RequestError:
            end = "No rank can go on: each waits for one that is elsewhere."
            return (*moments, replace(moments[-1], waiting=_waiting(world), links=(), end=end))
        if event is None:
            return tuple(moments)
        last, name, ranks = moments[-1], event.request.label.phase, event.ranks
        told = [answer for answer in event.answers.values() if answer is not None]
        reached = {(name, each) for each in ranks}
        wrong = reached if any(bool(answer.any()) for answer in told) else set()
        links = ((name, ranks),)
        moments.append(Moment(last.done | reached, last.wrong | wrong, _waiting(world), links))


def _waiting(world: LocalWorld) -> frozenset[tuple[str, int]]:
    return frozenset((request.label.phase, rank) for rank, request in world.pending.items())


def _program(mine: int, rank: int, phase: str, fault: str) -> Walk:
    wrong = 0.0
    for name in CALLS:
        if mine == rank and name == phase:
            if fault == "skips":
                continue
            wrong = 1.0
        numbers = torch.tensor([wrong])
        told = yield Collective("all_reduce", CALLS[name], numbers.dtype, numbers, 1, Label(name))
        wrong = float(told.any())


def moments_of(dp: int, tp: int) -> int:
    """The number of calls in a step in which no rank skips a call; the last moment has this number, too."""
    return len(film_of(dp, tp, 0, "log", "wrong")) - 1
