"""Predicted pictures of lesson 14: a step over ranks, idle owners, and which gradients backward can hide."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ...timing.machine import find_machine
from ...timing.recommend import say_seconds
from ..pictures.colours import EMPTY, FAINT, INK, MARKED, MUON, OTHER, QUIET
from ..pictures.picture import Picture, card, finish
from ..widgets.shell import Shell, choice, play
from .scaling import LINKS, MACHINE, MODEL, RANKS, TP, UNSEEN, Averaging, StepAtScale, averaging, steps

_SIZE = 11


def hero() -> Picture:
    """The first picture: the seconds of a 70B model's step on 32 to 16,384 ranks."""
    figure = card(900, 430)
    axes = figure.add_axes((0.085, 0.19, 0.71, 0.71))
    found = steps()
    _draw_curves(axes, found)
    rows, columns = found[-1].largest
    floor = found[-1].floor
    said = f"floor: the largest matrix,\n{rows:,} × {columns:,}, takes {say_seconds(floor)}"
    axes.axhline(floor, color=INK, linewidth=1, linestyle=":")
    axes.text(150, 0.0095, said, size=_SIZE, va="center", linespacing=1.3)
    axes.text(10500, 0.028, "idle", size=12, ha="center", va="center", weight="bold")
    axes.set_title(f"A Muon step of {MODEL}, tp=8: seconds, predicted", size=12, loc="left", weight="bold")
    _say_machine(figure)
    told = "; ".join(
        f"{step.ranks:,} ranks: {say_seconds(step.seconds())}, busiest owner {say_seconds(step.busiest)}, "
        f"latency {say_seconds(step.estimate.latency)}"
        for step in found
    )
    last, file = found[-1], f"the file of {find_machine(MACHINE).name}"
    alt = (
        f"Seconds of a Muon step of {MODEL} with tp=8, predicted by {file}, over ranks. {told}. The floor is "
        f"the largest matrix: {say_seconds(floor)}. At {last.ranks:,} ranks owners are idle for "
        f"{last.idle:.0%} of the busiest one's time."
    )
    return finish(figure, "many_ranks-hero", alt)


def _draw_curves(axes: Axes, found: Sequence[StepAtScale], links: float = 1.0) -> None:
    """Step, transfer, busiest owner, fair share and latency over ranks; both axes are logarithmic."""
    ranks = [step.ranks for step in found]
    busiest, fair = [step.busiest for step in found], [step.fair for step in found]
    axes.fill_between(ranks, fair, busiest, facecolor=EMPTY, linewidth=0)
    curves = (
        ("the whole step", [step.seconds(links) for step in found], INK, "-", 2.4),
        ("bytes in transit", [step.transfer(links) for step in found], QUIET, "-", 1.4),
        ("latency", [step.estimate.latency for step in found], OTHER, "-", 1.8),
        ("busiest owner", busiest, MUON, "-", 2.4),
        ("a fair share", fair, MUON, "--", 1.4),
    )
    for _, seconds, colour, dashes, width in curves:
        axes.plot(ranks, seconds, color=colour, linestyle=dashes, linewidth=width, marker="o", markersize=3)
    axes.set(xscale="log", yscale="log", xlim=(27, 19000), ylim=(0.004, 40))
    axes.set_xticks(RANKS, [f"{rank:,}" for rank in RANKS], size=_SIZE)
    axes.set_yticks([0.01, 0.1, 1, 10], ["10 ms", "100 ms", "1 s", "10 s"], size=_SIZE)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ranks", size=_SIZE)
    least = 0.0  # names to the right of the curves' ends, moved apart if they would touch
    for name, seconds, colour, _, _ in sorted(curves, key=lambda curve: curve[1][-1]):
        least = max(seconds[-1], least)
        axes.text(20500, least, name, size=_SIZE, color=colour, va="center", clip_on=False)
        least *= 1.62


def _say_machine(figure: Figure) -> None:
    said = f"Predicted by the planner from the file of {find_machine(MACHINE).name}: no clock has run."
    figure.text(0.015, 0.025, said, size=_SIZE, color=QUIET)


def draw_scale(doubling: int, links: str) -> Picture:
    """The step's time over the number of ranks, and each owner's work for one number, which is marked."""
    found = steps()
    step, factor = found[doubling], LINKS[links]
    figure = card(900, 430)
    left = figure.add_axes((0.085, 0.19, 0.43, 0.67))
    _draw_curves(left, found, factor)
    left.set_xticks(RANKS[::3], [f"{rank:,}" for rank in RANKS[::3]], size=_SIZE)
    left.axvline(step.ranks, color=INK, linewidth=1.2)
    left.plot([step.ranks], [step.seconds(factor)], marker="o", markersize=9, color=INK)
    title = f"{step.ranks:,} ranks: {say_seconds(step.seconds(factor))} a step"
    left.set_title(title, size=12, loc="left", weight="bold")
    axes = figure.add_axes((0.735, 0.19, 0.225, 0.67))
    most = max(step.work)
    shares = sorted((work / most for work in step.work), reverse=True)
    edges = [number / step.owners for number in range(step.owners + 1)]
    axes.set_facecolor(EMPTY)
    axes.stairs(shares, edges, fill=True, facecolor=MARKED, edgecolor=MUON, linewidth=1.6)
    busy = 1 - max(0.0, step.idle)
    told = f"{step.owners - step.idle_owners:,} of {step.owners:,} owners\nown a matrix; {busy:.0%} busy"
    axes.set_title(told, size=12, loc="left", weight="bold")
    axes.set(xlim=(0, 1), ylim=(0, 1.03))
    axes.set_xticks([0, 1], ["1", f"{step.owners:,}"], size=_SIZE)
    axes.set_yticks([0, 0.5, 1], ["0", "½", "busiest"], size=_SIZE)
    axes.set_xlabel("owner, busiest first", size=_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    _say_machine(figure)
    links_said = "as built" if factor == 1 else f"{factor:g} times as fast"
    said = (
        f"{title}, predicted, with links {links_said}. {step.owners:,} owners share {step.matrices} "
        f"matrices; {step.idle_owners:,} have none. The busiest works {say_seconds(step.busiest)}, a fair "
        f"share is {say_seconds(step.fair)}: owners are idle for {max(0.0, step.idle):.0%} of that time."
    )
    return finish(figure, f"many_ranks-{doubling}-{links.replace(' ', '-')}", said)


def explore_scale(live: bool = True) -> Shell | Picture:
    last, links = len(RANKS) - 1, choice("all links", list(LINKS))
    return play(draw_scale, last, draw_scale(last - 1, "as built"), live, label="doubling", links=links)


def draw_hidden(most: int) -> Picture:
    """Seconds of backward and of the all_reduces over ranks along dp, for both models; ``most`` is marked."""
    figure = card(900, 400)
    told = []
    for place, model in enumerate((UNSEEN, MODEL)):
        found = [averaging(model, 64 * 2**doubling) for doubling in range(6)]
        _draw_hidden(figure.add_axes((0.085 + 0.485 * place, 0.24, 0.41, 0.64)), model, found, most)
        at = averaging(model, most)
        told.append(
            f"{model}: backward takes {say_seconds(at.backward)} there, the all_reduces "
            f"{say_seconds(at.all_reduce)}, of which {say_seconds(at.latency)} are latency."
        )
    _say_machine(figure)
    marked = f"Backward falls with dp, the all_reduces hardly change, and dp={most:,} is marked."
    return finish(figure, "many_ranks-hidden", " ".join([marked, *told]))


def _draw_hidden(axes: Axes, model: str, found: Sequence[Averaging], most: int) -> None:
    dp = [each.dp for each in found]
    curves = (
        ("backward", [each.backward for each in found], MUON, "-"),
        ("all_reduces", [each.all_reduce for each in found], INK, "-"),
        ("their bytes alone", [each.transfer for each in found], QUIET, "--"),
    )
    for name, seconds, colour, dashes in curves:
        axes.plot(dp, seconds, color=colour, linestyle=dashes, linewidth=2, label=name)
    axes.axvline(most, color=INK, linewidth=1, linestyle=":")
    axes.text(1.04 * most, found[0].backward, f"dp={most:,}", size=_SIZE, va="center")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(dp, [f"{each:,}" for each in dp], size=_SIZE)
    least = min(each.backward for each in found)
    ticks = [number for number in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if least < number < 32 * least]
    axes.set_yticks(ticks, [say_seconds(number) for number in ticks], size=_SIZE)
    axes.minorticks_off()
    axes.grid(color=FAINT, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{model}, tp={TP}, predicted", size=12, loc="left", weight="bold")
    axes.set_xlabel("ranks along dp", size=_SIZE)
    axes.legend(frameon=False, fontsize=_SIZE)
