"""Runs several generators at once, in an order that depends only on the plan.

Each turn first admits new tasks. Then every task in flight waits for its last request and issues its next
one. The newest tasks go first, and tasks that were admitted together go in order. So while one task computes,
another task's request is in flight. A task takes the same number of turns on every rank, because ranks that
take no part in a collective yield ``IDLE`` instead. So all members of a group issue the same sequence of
requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .collective import IDLE, Abreast, Call, Collective, Idle, Start, Wait, Walk


def pipeline(tasks: Iterable[Walk], window: int = 1, stride: int = 1) -> Walk:
    """Run ``tasks`` with at most ``window`` in flight, and return their values in order.

    At most ``stride`` tasks are admitted per turn. All ranks must run it, with the same tasks, window and
    stride.
    """
    waiting = enumerate(tasks)
    flight: list[Task] = []
    values: dict[int, Any] = {}
    while True:
        room = range(min(stride, window - len(flight)))
        flight = [*(Task(index, walk) for _, (index, walk) in zip(room, waiting, strict=False)), *flight]
        if not flight:
            return [values[index] for index in sorted(values)]
        flight = yield from take_turn(flight, values)


def abreast(walks: Iterable[Walk]) -> Walk:
    """Run each walk to its next ``ABREAST``, one after the other, then continue all of them from there.

    So a rank takes part in sending all of a round's matrices to their owners before it computes its own. No
    owner then waits for another's Newton–Schulz. All ranks must run it, with the same ``walks``.
    """
    going = list(walks)
    while going:
        arrived = []
        while going:
            walk, answer = going.pop(0), None
            while True:
                try:
                    request = walk.send(answer)
                except StopIteration:
                    break
                if isinstance(request, Abreast):
                    arrived.append(walk)
                    break
                answer = None
                answer = yield request
                del request
            del walk, answer
        going = arrived


def take_turn(flight: list[Task], values: dict[int, Any]) -> Walk:
    """Let every task wait for its last request and issue its next one; return the tasks that go on.

    The values of finished tasks go to ``values``, by index. To free memory early, each task is removed from
    ``flight`` when its turn comes, a sent tensor is dropped when its request is answered, and an answer is
    dropped when its task makes the next request. All ranks must run it, with the same tasks.
    """
    going = []
    while flight:
        task = flight.pop(0)
        index, walk = task.index, task.walk
        wait = None if task.ticket is None else Wait(task.ticket)
        del task
        answer = None if wait is None else (yield wait)
        del wait
        try:
            request = walk.send(answer)
        except StopIteration as stop:
            request, values[index] = None, stop.value
        del answer
        if request is None:
            yield IDLE  # lets the world drop the last answer before the next task continues
        else:
            assert isinstance(request, Collective | Call | Idle)
            going.append(Task(index, walk, (yield Start(request))))
        del request, walk
    return going


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A walk in flight: its index among the tasks, and the ticket of its last request."""

    index: int
    walk: Walk
    ticket: Any = None
