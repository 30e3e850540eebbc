"""A window of generators in flight, in an order that follows from the plan alone.

A turn first admits new tasks, then lets every task in flight, the youngest first, wait for its own last
request and issue the next one. So while the older task computes, the younger one's first request is already
under way, and an older task's last answer arrives while the younger one computes. Since a task takes the
same number of turns on every rank (``stand_by`` yields the empty ones), all members of a group issue the
same sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .collective import Collective, Idle, Start, Wait, Walk


def pipeline(tasks: Iterable[Walk], window: int = 1, stride: int = 1) -> Walk:
    """Run ``tasks`` with at most ``window`` in flight; returns their values in order.

    At most ``stride`` tasks are admitted in a turn. Must be walked by all ranks with the same tasks, window
    and stride.
    """
    waiting = enumerate(tasks)
    flight: list[tuple[int, Walk, object]] = []
    values: dict[int, object] = {}
    while True:
        flight += [(index, task, None) for index, task in _admit(waiting, min(stride, window - len(flight)))]
        if not flight:
            return [values[index] for index in sorted(values)]
        going = []
        for index, task, ticket in reversed(flight):
            answer = None if ticket is None else (yield Wait(ticket))
            try:
                request = task.send(answer)
            except StopIteration as stop:
                values[index] = stop.value
            else:
                assert isinstance(request, Collective | Idle)
                going.append((index, task, (yield Start(request))))
        flight = going[::-1]


def _admit(waiting: Iterator[tuple[int, Walk]], room: int) -> list[tuple[int, Walk]]:
    return [item for _, item in zip(range(room), waiting, strict=False)]
