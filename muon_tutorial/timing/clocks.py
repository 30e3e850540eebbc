"""Keeps a clock for every rank of a grid over the rounds of a step, to find out how long ranks wait.

``rank_walks`` gives the turns of each kind of rank. A turn is a rank's computation until its next request,
together with this request. All ranks take their first turn together, then their second, and so on. A
collective begins when the last rank of its group has asked, the group's previous collective is done, and its
links are free. Ranks with the same turns in all rounds share a clock: they are one position. Several speeds
of the links are computed at once. Three things differ from ``TimedWorld``. Collectives of two groups on one
link run one after the other, not side by side. Ranks that share cores are slow in every turn, even while
others wait. Gloo's exchanges begin when all ranks have asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .rank_walks import PricedRequest, Trace, WalkedBucket, WalkedPlan


@dataclass(frozen=True, slots=True)
class Speed:
    """Assumes links ``factor`` times as fast; phases that begin with a text in ``free`` take no time."""

    factor: float = 1.0
    free: tuple[str, ...] = ()

    def moving(self, asked: PricedRequest | None) -> float:
        """Seconds that a collective's bytes take; 0 in an empty turn."""
        if asked is None or asked.label.phase.startswith(self.free):
            return 0.0
        return max(asked.moving / self.factor, asked.sending)

    def latency(self, asked: PricedRequest | None) -> float:
        """A collective's seconds that do not depend on bandwidth."""
        return 0.0 if asked is None or asked.label.phase.startswith(self.free) else asked.latency


AS_IT_IS = Speed()


@dataclass(frozen=True, slots=True)
class Timed:
    """The ``seconds`` until the last rank ends, at each speed of the links, and a rank's ``peak`` of bytes.

    One rank is watched at the first speed: it ended at ``ended``, after waiting ``others`` seconds for slower
    ranks and ``exposed`` seconds for bytes.
    """

    seconds: tuple[float, ...]
    peak: int
    ended: float
    others: float
    exposed: float


@dataclass(slots=True, eq=False)
class _Clocks:
    """The clock ``now`` of each position at each speed, the watched position's waits, and peak bytes."""

    plan: WalkedPlan
    watched: tuple[int, ...]
    now: np.ndarray
    others: float = 0.0
    exposed: float = 0.0
    peak: float = 0.0
    free: dict[Any, np.ndarray] = field(default_factory=dict)

    def most(self, each: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
        """Return the maximum over each group along ``axes``. In the result these axes have length 1."""
        if each.size == len(each):
            return each
        along = tuple(i for i, axis in enumerate(self.plan.axes, 1) if axis in axes and each.shape[i] > 1)
        return np.maximum.reduce(each, axis=along, keepdims=True) if along else each

    def watch(self, each: np.ndarray) -> float:
        """The watched position's value at the first speed. An axis of ``each`` may have length 1."""
        if each.size == len(each):
            return float(each.item(0))
        places = zip(self.watched, each.shape[1:], strict=True)
        return float(each.item((0, *(place if size > 1 else 0 for place, size in places))))


@dataclass(slots=True, eq=False)
class _Task:
    """A round in flight: its turns, and when its last requested collective is ``done``.

    ``asked``: when the last member of the watched position's group asked. ``held``: bytes that the round
    holds.
    """

    turns: Iterator[_Turn]
    asked: float = 0.0
    done: np.ndarray | None = None
    held: Any = 0.0


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn of a bucket: values for each kind of rank or each position. Equal values become one value.

    ``moving`` and ``latency`` have a first axis over the speeds. ``asked``: the collective that positions
    request, or None. ``asks``: the positions that request it; None means all of them. ``root``: the position
    of the collective's root. ``_Tables.placed`` turns ``root`` into an index of all root ranks if roots first
    copy what they send, and otherwise into None. ``beside``: the bytes that the round's other buckets hold.
    With ``meets``, the bucket waits here until the others have caught up.
    """

    busy: np.ndarray
    held: np.ndarray
    peak: np.ndarray
    moving: np.ndarray
    latency: np.ndarray
    asked: PricedRequest | None
    asks: np.ndarray | None
    root: Any
    meets: bool
    is_last: bool
    beside: Any = 0.0


def run_clocks(
    plan: WalkedPlan, speeds: Sequence[Speed] = (AS_IT_IS,), window: int = 1, watched: int = 0
) -> Timed:
    """Time all rounds on all positions, at several speeds of the links; one position is ``watched``."""
    clocks = _Clocks(plan, plan.at(watched), np.zeros((len(speeds), *plan.sizes)))
    waiting, tables = iter(plan.rounds), _Tables(plan, speeds)
    flight: list[_Task] = []
    while True:
        if len(flight) < window and (admitted := next(waiting, None)) is not None:
            flight.insert(0, _Task(_abreast(admitted, tables)))
        if not flight:
            seconds = clocks.now.reshape(len(speeds), -1).max(axis=1)
            ended = clocks.watch(clocks.now)
            return Timed(tuple(seconds.tolist()), int(clocks.peak), ended, clocks.others, clocks.exposed)
        for task in list(flight):
            _wait(clocks, task)
            turn = next(task.turns)
            clocks.now += turn.busy
            around = sum((other.held for other in flight if other is not task), turn.beside)
            clocks.peak = max(clocks.peak, float((around + turn.peak).max()))
            task.held = turn.beside + turn.held
            if turn.asked is not None:
                _ask(clocks, task, turn, turn.asked)
            if turn.is_last:
                flight.remove(task)


def _wait(clocks: _Clocks, task: _Task) -> None:
    if task.done is None:
        return
    now, done = clocks.watch(clocks.now), clocks.watch(task.done)
    waits = max(done - now, 0.0)
    others = min(max(task.asked - now, 0.0), waits)
    clocks.others += others
    clocks.exposed += waits - others
    np.maximum(clocks.now, task.done, out=clocks.now)
    task.done = None


def _ask(clocks: _Clocks, task: _Task, turn: _Turn, asked: PricedRequest) -> None:
    """Begin a collective in every group that requests one, and note when it is done."""
    if turn.root is not None:
        makes_it = 1.0 if turn.asks is None else turn.asks[turn.root]
        clocks.now[(slice(None), *turn.root)] += makes_it * asked.root_copy
    there = clocks.now if turn.asks is None else np.where(turn.asks, clocks.now, -np.inf)
    last = begin = clocks.most(there, asked.axes)
    keys = asked.axes, asked.link
    for free in {id(free): free for key in keys if (free := clocks.free.get(key)) is not None}.values():
        begin = np.maximum(begin, clocks.most(free, asked.axes))
    done = begin + clocks.most(turn.latency, asked.axes) + clocks.most(turn.moving, asked.axes)
    if turn.asks is not None:
        last, done = (np.where(turn.asks, each, -np.inf) for each in (last, done))
    task.asked, task.done = clocks.watch(last), done
    for key in keys:
        before = None if turn.asks is None else clocks.free.get(key)  # if all ask, ``done`` is the later time
        clocks.free[key] = done if before is None else np.maximum(before, done)


def _abreast(buckets: Sequence[WalkedBucket], tables: _Tables) -> Iterator[_Turn]:
    """The turns of a round's buckets. Each bucket runs until it must wait for the others (``meets``)."""
    held: list[Any] = [0.0] * len(buckets)
    total: Any = 0.0  # the sum of ``held``; exact, because bytes are whole numbers
    going = {place: iter(tables.turns(one)) for place, one in enumerate(buckets)}
    while going:
        for place, turns in list(going.items()):
            for each in turns:
                if each.is_last:
                    del going[place]
                beside = total - held[place] if len(buckets) > 1 else 0.0
                turn = tables.placed(each, buckets[place], beside, is_last=not going)
                held[place], total = turn.held, beside + turn.held
                yield turn
                if turn.meets:
                    break


@dataclass(slots=True, eq=False)
class _Tables:
    """What each kind of rank does in each turn of a bucket. Buckets that look the same share their traces."""

    plan: WalkedPlan
    speeds: Sequence[Speed]
    known: dict[tuple[int, ...], list[_Turn]] = field(default_factory=dict)

    def turns(self, one: WalkedBucket) -> list[_Turn]:
        """The turns of a bucket, for each kind of rank."""
        key = tuple(map(id, one.traces))
        if key not in self.known:
            self.known[key] = self._turns(one.traces)
        return self.known[key]

    def placed(self, of: _Turn, one: WalkedBucket, beside: Any, is_last: bool) -> _Turn:
        """A turn of a bucket on all positions."""
        busy, held, peak, moving, latency = (
            each if each.shape[-1] == 1 else each.take(one.kinds, axis=-1)
            for each in (of.busy, of.held, of.peak, of.moving, of.latency)
        )
        root: tuple[int | slice, ...] | None = None
        if of.asked is not None and of.root is not None and of.asked.root_copy:
            root = self.plan.line(of.asked.axes, one.root(of.root))
        asks = None if of.asks is None else of.asks.take(one.kinds)
        return _Turn(busy, held, peak, moving, latency, of.asked, asks, root, of.meets, is_last, beside)

    def _turns(self, traces: Sequence[Trace]) -> list[_Turn]:
        """The turns of all kinds of rank; a kind that takes no part in a request has an empty turn there."""
        rows = [*zip(*traces, strict=True)]
        asked = [[turn.asked for turn in row] for row in rows]
        values = zip(
            self._thin([[turn.product + turn.copy for turn in row] for row in rows]),
            self._thin([[float(turn.now) for turn in row] for row in rows]),
            self._thin([[float(turn.peak) for turn in row] for row in rows]),
            self._thin([[[*map(speed.moving, row)] for speed in self.speeds] for row in asked]),
            self._thin([[[*map(speed.latency, row)] for speed in self.speeds] for row in asked]),
            strict=True,
        )
        turns = []
        for row, its in zip(rows, values, strict=True):
            first = next((turn for turn in row if turn.asked is not None), row[0])
            asks = np.array([turn.asked is not None for turn in row])
            some = None if asks.all() else asks
            turns.append(_Turn(*its, first.asked, some, first.root, row[0].meets, row is rows[-1]))
        return turns

    def _thin(self, table: Sequence[Any]) -> list[np.ndarray]:
        """Each turn's values by kind of rank. Equal values become one value, with length 1 along all axes."""
        values = np.array(table)
        firsts = values[..., :1]
        alike = (values == firsts).reshape(len(values), -1).all(axis=1)
        ones = (1,) * len(self.plan.axes)
        return [
            first.reshape(*first.shape[:-1], *ones) if same else each
            for each, first, same in zip(values, firsts, alike.tolist(), strict=True)
        ]


@dataclass(slots=True, eq=False)
class Alone:
    """A rank's seconds in walks that run one after the other. All ranks have the same walks."""

    product: float = 0.0
    copy: float = 0.0
    exposed: float = 0.0
    latency: float = 0.0
    peak: int = 0

    @property
    def seconds(self) -> float:
        return self.product + self.copy + self.exposed


def run_alone(traces: Iterable[tuple[Trace, int]], speed: Speed = AS_IT_IS) -> Alone:
    """Time walks that are the same on all ranks, so no rank waits. ``traces``: traces and their counts."""
    found = Alone()
    for trace, times in traces:
        for turn in trace:
            latency = speed.latency(turn.asked)
            found.product += times * turn.product
            found.copy += times * turn.copy
            found.exposed += times * (latency + speed.moving(turn.asked))
            found.latency += times * latency
            found.peak = max(found.peak, turn.peak)
    return found
