"""A clock for every rank of a grid, over the rounds of a step: who computes, and who waits for whom.

What each kind of rank does is known turn by turn. Here all positions go through the same turns together, in
the order in which a window admits rounds: a collective begins when the last of its group has asked, its
group is through with the one before, and its links are free. What differs from ``TimedWorld``: collectives
of two groups on one link go one after the other, not side by side; ranks that share cores with others share
them all the time; and Gloo's exchanges begin when all have asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .rank_walks import Round, Trace, WalkedBucket, WalkedTurn

Leaves = Callable[[WalkedTurn], bool]


@dataclass(slots=True, eq=False)
class Clocks:
    """When each position is through, and what it did until then. Seconds, by position; ``peak`` in bytes.

    ``others`` is waiting for ranks that come later, ``exposed`` waiting for bytes, ``latency`` the part of
    the collectives that no bandwidth shortens.
    """

    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    now: np.ndarray = field(init=False)
    product: np.ndarray = field(init=False)
    copy: np.ndarray = field(init=False)
    others: np.ndarray = field(init=False)
    exposed: np.ndarray = field(init=False)
    latency: np.ndarray = field(init=False)
    peak: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        positions = int(np.prod(self.sizes, dtype=int))
        for name in ("now", "product", "copy", "others", "exposed", "latency", "peak"):
            setattr(self, name, np.zeros(positions))

    @property
    def seconds(self) -> float:
        """When the last is through."""
        return float(self.now.max())

    def most(self, each: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
        """The largest of each group over some axes, at each of its positions."""
        along = tuple(i for i, axis in enumerate(self.axes) if axis in axes and self.sizes[i] > 1)
        if len(along) == sum(size > 1 for size in self.sizes):
            return np.full_like(each, each.max())
        if not along:
            return each
        found = each.reshape(self.sizes).max(axis=along, keepdims=True)
        return np.broadcast_to(found, self.sizes).reshape(-1)

    def place(self, axes: tuple[str, ...]) -> np.ndarray:
        """Each position's place in its group over some axes."""
        at = np.indices(self.sizes).reshape(len(self.sizes), -1)
        found = np.zeros(at.shape[-1], dtype=int)
        for axis in axes:
            if axis in self.axes:
                found = found * self.sizes[self.axes.index(axis)] + at[self.axes.index(axis)]
        return found


@dataclass(slots=True, eq=False)
class _Task:
    """A round in flight: its turns, and what was asked for last: when all had asked, and when it is done."""

    turns: Iterator[_Turn]
    asked: np.ndarray | None = None
    done: np.ndarray | None = None
    held: Any = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """One turn of a round on all positions. ``asks`` are the positions that ask for something, or None."""

    product: np.ndarray
    copy: np.ndarray
    held: np.ndarray
    peak: np.ndarray
    moving: np.ndarray
    latency: np.ndarray
    asks: np.ndarray | None
    asked: WalkedTurn | None
    root: int | None
    meets: bool


def run_clocks(
    rounds: Sequence[Round],
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    window: int = 1,
    factor: float = 1.0,
    without: tuple[str, ...] = (),
) -> Clocks:
    """All positions over all rounds, were all links ``factor`` times as fast.

    Collectives whose phase begins as one of ``without`` take no time.
    """
    clocks, waiting = Clocks(sizes, axes), iter(rounds)
    free: dict[Any, np.ndarray] = {}
    flight: list[_Task] = []
    while True:
        if len(flight) < window and (admitted := next(waiting, None)) is not None:
            flight.insert(0, _Task(_abreast([_turns(it, factor, without) for it in admitted])))
        if not flight:
            return clocks
        for task in list(flight):
            _wait(clocks, task)
            turn = next(task.turns)
            clocks.product += turn.product
            clocks.copy += turn.copy
            clocks.now += turn.product + turn.copy
            beside = sum((other.held for other in flight if other is not task), 0.0)
            np.maximum(clocks.peak, beside + turn.peak, out=clocks.peak)
            task.held = turn.held
            if turn.asked is not None:
                _ask(clocks, task, turn, free)
            elif turn.asks is None:
                flight.remove(task)


def _wait(clocks: Clocks, task: _Task) -> None:
    if task.done is None or task.asked is None:
        return
    waits = np.maximum(task.done - clocks.now, 0.0)
    others = np.minimum(np.maximum(task.asked - clocks.now, 0.0), waits)
    clocks.others += others
    clocks.exposed += waits - others
    clocks.now += waits
    task.done = task.asked = None


def _ask(clocks: Clocks, task: _Task, turn: _Turn, free: dict[Any, np.ndarray]) -> None:
    """A collective of every group in which positions ask: when it begins, and when it is done."""
    assert turn.asked is not None
    assert turn.asked.flight is not None
    assert turn.asks is not None
    axes, link = turn.asked.axes, turn.asked.flight.link
    if turn.root is not None and turn.asked.root_copy:
        copies = np.where((clocks.place(axes) == turn.root) & turn.asks, turn.asked.root_copy, 0.0)
        clocks.copy += copies
        clocks.now += copies
    asked = clocks.most(np.where(turn.asks, clocks.now, -np.inf), axes)
    before = [free[key] for key in (axes, link) if key in free]
    begin = asked
    for each in before:
        begin = np.maximum(begin, clocks.most(each, axes))
    done = begin + clocks.most(turn.latency, axes) + clocks.most(turn.moving, axes)
    clocks.latency += np.where(turn.asks, turn.latency, 0.0)
    task.asked = np.where(turn.asks, asked, -np.inf)
    task.done = np.where(turn.asks, done, -np.inf)
    for key in (axes, link):
        free[key] = np.maximum(free.get(key, -np.inf), task.done)


def _abreast(buckets: list[Iterator[_Turn]]) -> Iterator[_Turn]:
    """The turns of a round's buckets: of each to where they meet, one after the other, and on from there."""
    held: list[Any] = [0.0] * len(buckets)
    total: Any = 0.0  # of held: whole bytes, so adding and taking away loses nothing
    going = dict(enumerate(buckets))
    while going:
        for number, turns in list(going.items()):
            for turn in turns:
                beside = total - held[number]
                held[number], total = turn.held, beside + turn.held
                turn = replace(turn, held=beside + turn.held, peak=beside + turn.peak)
                if turn.asks is None:
                    del going[number]
                    turn = replace(turn, asks=np.zeros(turn.held.shape, bool)) if going else turn
                yield turn
                if turn.meets:
                    break


def _turns(one: WalkedBucket, factor: float, without: tuple[str, ...]) -> Iterator[_Turn]:
    """A round's turns on all positions. All kinds take as many: those that take no part have empty ones."""
    for row in zip(*one.traces, strict=True):
        asking = [turn for turn in row if turn.flight is not None]

        def of(values: list[float], kinds: np.ndarray = one.kinds) -> np.ndarray:
            return np.array(values, dtype=float)[kinds]

        free = bool(asking) and _phase(asking[0]).startswith(without)
        moving = [0.0 if free else max(turn.moving / factor, turn.sending) for turn in row]
        latency = [0.0 if free or turn.flight is None else turn.flight.latency for turn in row]
        is_end = row is not None and row[0] is one.traces[0][-1]
        yield _Turn(
            product=of([turn.product for turn in row]),
            copy=of([turn.copy for turn in row]),
            held=of([turn.now for turn in row]),
            peak=of([turn.peak for turn in row]),
            moving=of(moving),
            latency=of(latency),
            asks=None if is_end else np.array([turn.flight is not None for turn in row])[one.kinds],
            asked=asking[0] if asking else None,
            root=None
            if not asking or asking[0].root is None
            else one.roots.get(asking[0].root, asking[0].root),
            meets=row[0].meets,
        )


def _phase(turn: WalkedTurn) -> str:
    return "" if turn.flight is None else turn.flight.label.phase


def alone(traces: Sequence[Trace]) -> list[Round]:
    """Walks that are the same on all ranks, one after the other."""
    return [[WalkedBucket((trace,), np.zeros(1, dtype=int))] for trace in traces]
