"""Lesson 12: in which order to gather matrices of several sizes, so that work hides most of it.

One link, one processor, and room for so many megabytes: what is asked for and not yet done takes room.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...engine.collective import Start, Wait, Walk
from .loops import LoopTimes, TimedLoop, time_loop


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices to gather and to work on: milliseconds of each, megabytes of each, and the room for them."""

    gather: tuple[float, ...]
    work: tuple[float, ...]
    megabytes: tuple[float, ...]
    room: float

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return len(self.gather)


Order = Callable[[Sequence[float], Sequence[float], Sequence[float], float], Sequence[int]]


def makespan(
    order: Sequence[int],
    gather: Sequence[float],
    work: Sequence[float],
    megabytes: Sequence[float],
    room: float,
) -> float:
    """Milliseconds until all is done, if gathers are asked for in this order, each as soon as there is room.

    >>> makespan([0, 1], [2, 2], [3, 3], [1, 1], room=2)
    8.0
    >>> makespan([0, 1], [2, 2], [3, 3], [1, 1], room=1)
    10.0
    """
    link = processor = 0.0
    inside: list[tuple[float, float]] = []  # what takes room: when it is done, megabytes
    for i in order:
        while inside and sum(size for _, size in inside) + megabytes[i] > room:
            link = max(link, inside.pop(0)[0])
        link += gather[i]
        processor = max(processor, link) + work[i]
        inside.append((processor, megabytes[i]))
    return processor


def order_of(
    gather: Sequence[float], work: Sequence[float], megabytes: Sequence[float], room: float
) -> list[int]:
    """The reference: Johnson's rule for two machines, then swaps that make it no slower.

    Johnson, S. M. (1954), Optimal two- and three-stage production schedules with setup times included.
    """
    draw, given = random.Random(0), (gather, work, megabytes, room)
    short = [i for i in range(len(gather)) if gather[i] < work[i]]
    best = sorted(short, key=lambda i: gather[i])
    best += sorted(set(range(len(gather))) - set(short), key=lambda i: -work[i])
    for _ in range(1000):
        i, j = draw.sample(range(len(best)), 2)
        tried = list(best)
        tried[i], tried[j] = best[j], best[i]
        if makespan(tried, *given) <= makespan(best, *given):
            best = tried
    return best


def batches() -> list[Batch]:
    """Two models' matrices: a layer of a GPT three times over, and many sizes mixed."""
    gpt = ((4.0, 2.0), (1.0, 1.0), (1.0, 4.0), (4.0, 9.0))
    layers = [times for _ in range(3) for times in gpt]
    draw = random.Random(5)
    mixed = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(12)]
    return [_batch(layers, 8.0), _batch(mixed, 14.0)]


def _batch(times: Sequence[tuple[float, float]], room: float) -> Batch:
    """A matrix takes as much room as its gather takes time."""
    gathers, works = zip(*times, strict=True)
    return Batch(tuple(map(float, gathers)), tuple(map(float, works)), tuple(map(float, gathers)), room)


def time_order(order: Sequence[int], batch: Batch, ranks: int) -> TimedLoop:
    """The timed world on an order: the same as ``makespan`` says, and its timeline."""
    times = LoopTimes(tuple(batch.gather[i] for i in order), tuple(batch.work[i] for i in order))
    sizes = [batch.megabytes[i] for i in order]

    def loop(count: int, gather: Callable, work: Callable, window: int) -> Walk:
        tickets, asked = [], 0
        for i in range(count):
            while asked < count and sum(sizes[i : asked + 1]) <= batch.room:
                tickets.append((yield Start(gather(asked))))
                asked += 1
            work(i, (yield Wait(tickets.pop(0))))

    return time_loop(loop, times, batch.count, ranks)
