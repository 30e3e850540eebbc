"""A window of generators in flight, in an order that follows from the plan alone.

In each turn every task in the window, in plan order, waits for its own last request and issues the next one.
A task leaves when it ends and the next one is admitted at the start of the following turn. Since a task
takes the same number of turns on every rank (``stand_by`` yields the empty ones), all members of a group
issue the same sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from .collective import Collective, Idle, Start, Wait, Walk


def pipeline(tasks: Iterable[Walk], window: int = 1) -> Walk:
    """Run ``tasks`` with at most ``window`` in flight; returns their values in order.

    Must be walked by all ranks with the same tasks and the same window.
    """
    waiting = enumerate(tasks)
    flight: list[tuple[int, Walk, object]] = []
    values: dict[int, object] = {}
    while True:
        turn = flight + [(index, task, None) for index, task in _admit(waiting, window - len(flight))]
        if not turn:
            return [values[index] for index in sorted(values)]
        flight = []
        for index, task, ticket in turn:
            answer = None if ticket is None else (yield Wait(ticket))
            try:
                request = task.send(answer)
                assert isinstance(request, Collective | Idle)
            except StopIteration as stop:
                values[index] = stop.value
            else:
                flight.append((index, task, (yield Start(request))))


def _admit(waiting: Iterable[tuple[int, Walk]], room: int) -> Iterable[tuple[int, Walk]]:
    return [item for _, item in zip(range(room), waiting, strict=False)]
