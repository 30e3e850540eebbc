"""Lesson 15 as a film: one step in a local world with a fault of your choice, call by call.

The ranks send a number that is 0 while all is well, and 1 after the fault; each sum spreads it to its group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ...engine.collective import Collective, Label, Walk
from ...errors import RequestError
from ...plan.grid import Grid
from ...worlds.local import LocalWorld
from .training_rank import CALLS

AXES = {"load": ("tp",), "average": ("dp",), "gather": ("tp",), "share": ("dp",), "log": ("dp", "tp")}
SPREADS = {"a wrong number": "wrong", "a skipped call": "skips"}


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
    """All moments of one step with this fault; the first one is before any call is answered."""
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
        label = Label(name)
        told = yield Collective("all_reduce", AXES[name], numbers.dtype, numbers, 1, label)
        wrong = float(told.any())


def moments_of(dp: int, tp: int) -> int:
    """The number of calls that are answered in a sound step, which is the last moment's number."""
    return len(film_of(dp, tp, 0, "log", "wrong")) - 1
