"""Pictures of lesson 04: flat buffers with their owners, zeros in grey, and the work of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ..pictures.colours import CARD, EMPTY, INK, QUIET, WRONG, rank_colour
from ..pictures.holdings import patches
from ..pictures.picture import Picture, blank, centred, finish, rectangle, write
from ..pictures.spectra import card, style
from ..widgets.shell import Shell, show, slider
from . import exercises
from .exercises import COSTS, MOST, TOY, TOY_BEST, WAYS, WORST, loads_of, plan_of, ranks_of, say_ranks
from .on_ranks import LENGTH, PLACES, SharingRun, imitate, is_buffer, place_of

When = Literal["before", "after"]
"""Before the sum, or after it."""
_WIDTH, _LEFT, _RIGHT = 900, 96.0, 20.0
_SCALE = (_WIDTH - _LEFT - _RIGHT) / LENGTH
_RULER, _HIGH, _STEP = 52.0, 30.0, 38.0


def hero() -> Picture:
    return draw_run(imitate(4), "first_muon-hero")


def draw_run(run: SharingRun, name: str = "first_muon-run") -> Picture:
    """The whole step: owners, what each rank brings, and what comes back. Wrong places are framed."""
    shown = [0] if run.agree() else list(range(run.ranks))
    second = _RULER + 62 + run.ranks * _STEP
    figure, axes = blank(_WIDTH, round(second + 34 + len(shown) * _STEP))
    _draw_ruler(axes, run)
    said = "what each rank hands to the all_reduce: its own updates, and zeros (grey)"
    write(axes, _LEFT, _RULER + 50, said)
    for rank in range(run.ranks):
        _draw_row(axes, run, rank, "before", _RULER + 62 + rank * _STEP, f"rank {rank}")
    wrong = run.wrong()
    wrongs = f"wrong, in red: {', '.join(wrong)} · hatched: several updates added up"
    verdict = wrongs if wrong else "all places right"
    write(axes, _LEFT, second + 14, f"after the all_reduce · {verdict}")
    for row, rank in enumerate(shown):
        label = "every rank" if run.agree() else f"rank {rank}"
        _draw_row(axes, run, rank, "after", second + 26 + row * _STEP, label)
    return finish(figure, name, say_run(run))


def _draw_ruler(axes: Axes, run: SharingRun) -> None:
    write(axes, 12, 22, "each matrix has an owner", 12, weight="bold")
    for rank in range(run.ranks):
        left = _LEFT + 200 + rank * min(84, 580 / run.ranks)
        rectangle(axes, left, 15, 14, 14, rank_colour(rank), linewidth=0.8)
        if run.ranks <= 8:
            write(axes, left + 19, 22, f"rank {rank}")
    write(axes, 12, _RULER + _HIGH / 2, "matrices", weight="bold")
    for place in PLACES:
        _block(axes, place.start, place.stop, _RULER, rank_colour(place.owner(run.ranks)))
        _write_name(axes, place.start, place.stop, _RULER, place.name)


def _draw_row(axes: Axes, run: SharingRun, rank: int, when: When, top: float, label: str) -> None:
    write(axes, 12, top + _HIGH / 2, label)
    _block(axes, 0, LENGTH, top, EMPTY)
    for code, _, start, _, length in patches([_codes(run, rank, when).tolist()]):
        if code & (code - 1):  # several ranks' bits
            _block(axes, start, start + length, top, CARD, edgecolor=WRONG, linewidth=0.6, hatch="/////")
        elif code:
            _block(axes, start, start + length, top, rank_colour(code.bit_length() - 1))
    for place in PLACES[1:]:
        x = _LEFT + place.start * _SCALE
        axes.plot([x, x], [top, top + _HIGH], color=QUIET, lw=0.7, dashes=(2, 2), zorder=5)
    for start, stop, name in _names(run, rank, when):
        _write_name(axes, start, stop, top, name, zorder=8)
    for place in run.wrong_places(rank) if when == "after" else ():
        _block(axes, place.start, place.stop, top, "none", edgecolor=WRONG, linewidth=2.2, zorder=9)


def _block(axes: Axes, start: int, stop: int, top: float, fill: str, **look: Any) -> None:
    x, width = _LEFT + start * _SCALE, (stop - start) * _SCALE
    rectangle(axes, x, top, width, _HIGH, fill, **{"linewidth": 0.9, **look})


def _write_name(axes: Axes, start: int, stop: int, top: float, name: str, **look: Any) -> None:
    centred(axes, _LEFT + (start + stop) / 2 * _SCALE, top + _HIGH / 2, name, **look)


def _codes(run: SharingRun, rank: int, when: When) -> Tensor:
    """For each entry of a rank's buffer, which ranks wrote it, one bit per rank. Zeros have 0."""
    if when == "before":
        return (run.filled(rank) != 0).long() << rank
    after = run.after(rank)
    return torch.where((after == 0) | after.isnan(), 0, run.writers())


def _names(run: SharingRun, rank: int, when: When) -> Iterator[tuple[int, int, str]]:
    """Updates that are complete in a rank's buffer: (start, stop, name)."""
    if when == "before":
        yield from ((start, start + place_of(name).size, name) for name, start in run.found(rank).items())
    else:
        right, wrong = run.expected(), run.wrong_places(rank)
        there = (place for place in PLACES if place not in wrong and bool(right[place.slice].any()))
        yield from ((place.start, place.stop, place.name) for place in there)


def say_run(run: SharingRun) -> str:
    """A run in words: what each rank owns, what it brings and where, and what is wrong at the end."""
    owned: dict[int, list[str]] = {}
    for place in PLACES:
        owned.setdefault(place.owner(run.ranks), []).append(place.name)
    said = [f"Rank {rank} owns {', '.join(names)}." for rank, names in owned.items()]
    for rank in range(run.ranks):
        begins = ", ".join(f"{name} at {start:,}" for name, start in run.found(rank).items()) or "no update"
        said.append(f"Rank {rank} brings {begins}, and {run.zeros(rank):,} zeros of {LENGTH:,} entries.")
    end = "All ranks end with the same bits" if run.agree() else "The ranks end with different bits"
    if lost := [rank for rank, report in enumerate(run.reports) if not is_buffer(report.returned)]:
        end = f"No such buffer comes back from {say_ranks(lost)}"
    return " ".join([*said, f"{end}; {_say_wrong(run, run.wrong())}."])


def _say_wrong(run: SharingRun, wrong: Sequence[str]) -> str:
    if not wrong:
        return "every place is right"
    flags = run.writers()
    mixed = []
    for place in PLACES:
        together = [ranks_of(flag, run.ranks) for flag in flags[place.slice].unique().tolist()]
        if len(writers := max(together, key=len)) > 1:
            mixed.append(f"{place.name} ({say_ranks(writers)})")
    sums = f"; sums of several ranks' updates in {', '.join(mixed)}" if mixed else ""
    return f"wrong places: {', '.join(wrong)}{sums}"


def draw_loads(ranks: int) -> Picture:
    """The work of each rank, with owners chosen by index and with the costliest first."""
    panels = []
    for way in WAYS:
        plan = plan_of(ranks, way)
        owners = [plan.workers(index)[0] for index in range(len(COSTS))]
        panels.append((f"{way}: {exercises.fair_shares(ranks, way):.2f} fair shares", owners))
    name, alt = f"first_muon-loads-{ranks}", f"{ranks} ranks."
    return _draw_packings(panels, [cost / 1e9 for cost in COSTS], ranks, "GFLOP of Newton–Schulz", name, alt)


def draw_toy() -> Picture:
    dealt = {"longest first": exercises.TOY_LONGEST_FIRST, "the best": TOY_BEST}
    panels = [(f"{way}: makespan {max(loads_of(TOY, each, 2)):.0f}", each) for way, each in dealt.items()]
    return _draw_packings(panels, TOY, 2, "work", "first_muon-toy", f"Costs {', '.join(map(str, TOY))}.", 34)


def _draw_packings(
    panels: Sequence[Any], costs: Sequence[float], ranks: int, unit: str, name: str, alt: str, bar: int = 20
) -> Picture:
    """Ways to divide work, side by side, each with its title and owners: a bar a rank, a piece a matrix."""
    figure, said = card(900, 110 + bar * ranks), [alt]
    fair = sum(costs) / ranks
    most = max(max(loads_of(costs, owners, ranks)) for _, owners in panels)
    for number, (title, owners) in enumerate(panels):
        plot = figure.add_subplot(1, len(panels), number + 1)
        axes = style(plot, title, f"{unit} · dashed: a fair share", "")
        for rank in range(ranks):
            mine = [cost for cost, each in zip(costs, owners, strict=True) if each == rank]
            mine.sort(reverse=True)
            spans = [(sum(mine[:number]), cost) for number, cost in enumerate(mine)]
            look: dict[str, Any] = {"facecolors": rank_colour(rank), "edgecolors": INK, "linewidth": 0.6}
            axes.broken_barh(spans, (rank - 0.4, 0.8), **look)
        axes.set(xlim=(0, most * 1.05), ylim=(ranks - 0.4, -0.6))
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.axvline(fair, color=INK, linewidth=1.6, linestyle="--")
        loads = ", ".join(f"{load:.4g}" for load in loads_of(costs, owners, ranks))
        said.append(f"{title}; by rank {loads} {unit}.")
    figure.tight_layout()
    return finish(figure, name, " ".join(said))


def explore_loads(live: bool = True) -> Shell | Picture:
    ranks = slider("ranks", first=1, last=MOST, start=WORST)
    return show(draw_loads, draw_loads(WORST), live, ranks=ranks)
