"""Lesson 09: you are the network, and answer the requests of a step in the order that you choose.

All ranks run in this process. A rank runs until it needs others, and a group can be answered once all its
members ask. The order changes no bit of the result.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ipywidgets
import torch
import traitlets
from matplotlib.axes import Axes

from ... import Grid, LocalWorld
from ..inputs import measure
from ..pictures.colours import CARD, DP_GROUP, EMPTY, INK, QUIET, TP_GROUP, rank_colour
from ..pictures.picture import Picture, blank, centred, finish, rectangle, write
from ..widgets.shell import Shell, show
from .on_ranks import NotedPhases, jobs_on, reference_step
from .recording import PHASES

Group = tuple[int, ...]
_WIDTH, _SHOWN = 900, 4
_OUTLINES = {"dp": DP_GROUP, "tp": TP_GROUP}


@dataclass(frozen=True, slots=True)
class Answer:
    """One collective that the network has answered or could answer: its group, axis, phase and matrix."""

    group: Group
    axis: str
    phase: int
    subject: str

    def __str__(self) -> str:
        of = f" of {self.subject}" if self.subject else ""
        return f"{self.phase} {PHASES[self.phase - 1]}{of}: ranks {', '.join(map(str, self.group))}"


@dataclass(slots=True, eq=False)
class Network:
    """A step of all ranks in this process, and the order of the answers so far."""

    dp: int
    tp: int
    seed: int
    order: list[Answer] = field(default_factory=list)
    ended: list[tuple[tuple[Answer, ...], str]] = field(default_factory=list)
    world: LocalWorld = field(init=False)
    jobs: list[NotedPhases] = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Put all ranks at the beginning of the step, with nothing answered."""
        self.world, self.order = LocalWorld(Grid.of(dp=self.dp, tp=self.tp)), []
        self.jobs = jobs_on(self.world.grid, self.seed)
        self.world.start([job.take(reference_step) for job in self.jobs])

    @property
    def ready(self) -> list[Answer]:
        """The collectives that could be answered next, because all members of their group ask."""
        with torch.no_grad(), measure.one_thread():
            groups = self.world.ready()
        asked = ((group, self.world.pending[group[0]]) for group in groups)
        phase = {name: number for number, name in enumerate(PHASES, 1)}
        return [Answer(group, one.axes[0], phase[one.label.phase], one.label.subject) for group, one in asked]

    @property
    def result(self) -> str:
        """A hash of all weights on all ranks; empty until every rank is done."""
        if self.ready:
            return ""
        raw = b"".join(each.data.numpy().tobytes() for job in self.jobs for each in job.step.parameters)
        return hashlib.sha256(raw).hexdigest()[:10]

    def answer(self, group: Group) -> None:
        """Answer a ready group's request; once all ranks are done, store the order and its result."""
        self.order.append(next(each for each in self.ready if each.group == group))
        with torch.no_grad(), measure.one_thread():
            self.world.advance(group)
        if result := self.result:
            self.ended.append((tuple(self.order), result))

    def finish(self, choose: Any, upto: int | None = None) -> None:
        """Answer the requests that ``choose`` picks, to the end or until ``upto`` are answered."""
        while (ready := self.ready) and (upto is None or len(self.order) < upto):
            self.answer(choose(ready).group)


class ReadyButtons(ipywidgets.VBox):
    """A button for each group that could be answered next. ``value`` is the number of answers so far."""

    value = traitlets.Int(0)
    description = "answered"

    def __init__(self, network: Network) -> None:
        self.network = network
        counted = Network(network.dp, network.tp, network.seed)
        counted.finish(lambda ready: ready[0])
        self.min, self.max = 0, len(counted.order)
        self.draw = random.Random(network.seed)
        self.groups: list[Any] = []
        self.row = ipywidgets.Box(layout=ipywidgets.Layout(flex_flow="row wrap", display="flex"))
        super().__init__([self.row, ipywidgets.HBox(self._tools())])
        self._refresh()
        self.observe(self._reach, names="value")

    def _tools(self) -> list[Any]:
        moves: dict[str, Callable[[], list[int]]] = {
            "one at random": lambda: [min(self.value + 1, self.max)],
            "all at random": lambda: [0, self.max] if self.value == self.max else [self.max],
            "undo": lambda: [max(0, self.value - 1)],
            "again": lambda: [0],
        }
        buttons = [ipywidgets.Button(description=name) for name in moves]
        for button, move in zip(buttons, moves.values(), strict=True):
            button.on_click(partial(self._go, move))
        return buttons

    def _go(self, move: Callable[[], list[int]], button: object) -> None:
        for stop in move():
            self.value = stop

    def _press(self, group: Group, button: object) -> None:
        self.network.answer(group)
        self.value = len(self.network.order)

    def _reach(self, change: Any) -> None:
        """Bring the network to the requested number of answers, then show the ready groups."""
        if self.value < len(self.network.order):
            done = self.network.order[: self.value]
            self.network.restart()
            for each in done:
                self.network.answer(each.group)
        self.network.finish(self.draw.choice, self.value)
        self._refresh()

    def _refresh(self) -> None:
        self.groups = []
        for each in self.network.ready:
            button = ipywidgets.Button(description=str(each), layout=ipywidgets.Layout(width="auto"))
            button.on_click(partial(self._press, each.group))
            self.groups.append(button)
        self.row.children = self.groups


def draw_network(network: Network) -> Picture:
    """Each rank's state, the ready groups, the order so far, and the results of earlier orders."""
    grid, ready = network.world.grid, network.ready
    wide = min(300, (_WIDTH - 40) // grid.size("tp"))
    strips = 68 + 72 * grid.size("dp")
    kept = network.ended[-_SHOWN:]
    figure, axes = blank(_WIDTH, strips + 56 * (len(kept) + 1) + 8)
    said = f"{len(network.order)} answered. Ready: {len(ready)} group{'' if len(ready) == 1 else 's'}."
    if result := network.result:
        said = f"Every rank is through. Hash of all weights: {result}"
    write(axes, 16, 22, said, 12)
    outline = {rank: each for each in ready for rank in each.group}
    for rank in grid.ranks:
        _draw_rank(axes, network, rank, outline.get(rank), wide)
    most = max(1, len(network.order) + len(ready), *(len(order) for order, _ in kept))
    _draw_order(axes, strips, "you", network.order, network.result, most)
    for number, (order, result) in enumerate(kept, 1):
        _draw_order(axes, strips + 56 * number, "ended", order, result, most)
    hashes = {result for _, result in network.ended}
    said += f" So far {len(network.order)} are answered: {_say_order(network.order)}."
    if network.ended:
        results = f"{len(hashes)} result: {', '.join(sorted(hashes))}"
        said += f" {len(network.ended)} runs have ended, in {results}."
    return finish(figure, f"network-{len(network.order)}", said)


def _say_order(order: Sequence[Answer]) -> str:
    said = (f"phase {each.phase} for ranks {', '.join(map(str, each.group))}" for each in order)
    return "; ".join(said) or "none"


def _draw_rank(axes: Axes, network: Network, rank: int, ready: Answer | None, wide: float) -> None:
    at, asked = network.world.grid.at(rank), network.world.pending.get(rank)
    x, y = 16 + at["tp"] * wide, 44 + at["dp"] * 72
    edge, width = (INK, 1.0) if ready is None else (_OUTLINES[ready.axis], 4.0)
    rectangle(axes, x, y, wide - 14, 56, rank_colour(rank), edgecolor=edge, linewidth=width)
    write(axes, x + 10, y + 17, f"rank {rank}", 12, weight="bold")
    if asked is None:
        write(axes, x + 10, y + 39, "is through")
        return
    phase = PHASES.index(asked.label.phase) + 1
    of = f" of {asked.label.subject}" if phase == 3 else ""
    write(axes, x + 10, y + 39, f"{'ready' if ready else 'waits'} in phase {phase}{of}")


def _draw_order(axes: Axes, y: float, title: str, order: Sequence[Answer], result: str, most: int) -> None:
    """One run as a strip: a box per message with its phase and ranks, and the hash at the end."""
    write(axes, 16, y + 22, title)
    wide = min(64.0, (_WIDTH - 76 - 150) / most)
    for number, each in enumerate(order):
        x = 76 + number * wide
        rectangle(axes, x, y, wide - 6, 44, CARD, edgecolor=_OUTLINES[each.axis], linewidth=2.0)
        centred(axes, x + wide / 2 - 3, y + (14 if wide > 30 else 22), str(each.phase), 12, weight="bold")
        if wide > 30:
            ranks = ",".join(map(str, each.group))
            centred(axes, x + wide / 2 - 3, y + 32, ranks if len(ranks) * 8 < wide else "…")
    if result:
        write(axes, 76 + len(order) * wide + 6, y + 22, f"→ {result}", 12, weight="bold")
    elif not order:
        rectangle(axes, 76, y, 200, 44, EMPTY, linewidth=0.0)
        write(axes, 90, y + 22, "nothing answered yet", color=QUIET)


def draw_orders(dp: int, tp: int, seed: int) -> Picture:
    """The still picture: runs whose messages are answered in different orders, and the results."""
    runs = 6
    network, draw = Network(dp, tp, seed), random.Random(seed)
    for _ in range(runs):
        network.restart()
        network.finish(draw.choice)
    if not network.order:  # a single rank sends no messages
        network.ended = [((), network.result)] * runs
    figure, axes = blank(_WIDTH, 92 + 56 * runs)
    write(axes, 16, 22, "Each box is an answered message: the phase, and the ranks of the group.", 12)
    for x, name, edge in ((16, "dp group", DP_GROUP), (130, "tp group", TP_GROUP)):
        rectangle(axes, x, 42, 18, 18, CARD, edgecolor=edge, linewidth=2.0)
        write(axes, x + 26, 51, name)
    for number, (order, result) in enumerate(network.ended):
        _draw_order(axes, 80 + 56 * number, f"run {number + 1}", order, result, max(1, len(order)))
    hashes = sorted({result for _, result in network.ended})
    orders = len({order for order, _ in network.ended})
    ends = "the hash" if len(hashes) == 1 else "different hashes:"
    said = (
        f"{runs} runs of the step, answered in {orders} different orders. The weights at the end have "
        f"{ends} {', '.join(hashes)}. The first run: {_say_order(network.ended[0][0])}."
    )
    return finish(figure, "network-orders", said)


def be_the_network(dp: int, tp: int, seed: int, live: bool = True) -> Shell | Picture:
    """A button for each ready group. Without a kernel, a still picture of several orders."""
    still = draw_orders(dp, tp, seed)
    if not live:
        return still
    network = Network(dp, tp, seed)
    return show(lambda answered: draw_network(network), still, live, answered=ReadyButtons(network))
