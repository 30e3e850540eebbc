"""Ends, stops or stalls a rank at a chosen moment: before it joins, in a step, or while it saves.

A step is struck at one of its requests, which an observer of the world sees. A save or a load is struck when
it opens, renames or removes a file, which Python's audit events report.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from muon_tutorial import Coordinate, Grid, LiveWorld, build_mesh
from muon_tutorial.engine.collective import Collective

from . import job
from .case import STRUCK, TIMEOUT, Case, RankRecord

STALL = 10 * TIMEOUT  # seconds that a stuck rank sleeps; the other ranks must give up long before


class PlantedError(Exception):
    """The error that a rank of the campaign raises on purpose."""


def fail(error: BaseException) -> NoReturn:
    raise error


def _stop_for(seconds: float) -> None:
    """Stop this process (SIGSTOP) until a child process wakes it."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


STRIKES: Mapping[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stopped for a moment": lambda: _stop_for(0.5),
    "asleep for a moment": lambda: time.sleep(0.5),
    "stuck": lambda: time.sleep(STALL),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "exception": lambda: fail(PlantedError("planted")),
    "MemoryError": lambda: fail(MemoryError("planted")),
    "KeyboardInterrupt in a rank": lambda: fail(KeyboardInterrupt("planted")),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "every descriptor closed": lambda: os.closerange(3, 1024),
}

STARTING = "starting up"
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGSTOP")
"""The signals that the campaign sends to a rank that has not yet joined the others."""

IN_A_STEP = ("first request of a step", "in the middle of a step", "last request of a step")
BEFORE = ("arguments arrive", "before the mesh", "before construction")
PHASES = (*BEFORE, *IN_A_STEP, "between steps", "returning")


def suffer(rank: int, case: Case, gift: Gift, folder: str) -> Any:
    """Run one rank of a job in which one rank is struck; ``gift`` strikes it in the first phase."""
    hit = Trigger(case, rank, folder)
    hit.at("before the mesh")
    world = LiveWorld(build_mesh(Grid.of(dp=case.dp, tp=case.tp)))
    hit.at("before construction")
    rig = job.build(job.Blueprint(case.strategy), world)
    worlds = [mesh.world for mesh in rig.muon.steps if isinstance(mesh.world, LiveWorld)]
    requests = Requests(hit, worlds or [world])
    for step in range(job.STEPS):
        rig.give(step)
        requests.begin(step)
        rig.muon.step()
        if step == job.FAULT_AT:
            hit.at("between steps")
    equal = rig.equals(job.oracle(rig.blueprint))
    record = RankRecord(rank, equal=equal)
    return Parting(record, hit) if case.phase == "returning" else record


class Trigger:
    """Strikes its rank once, when the case's phase comes, and writes down the time."""

    def __init__(
        self,
        case: Case,
        rank: int,
        folder: str | Path,
        strikes: Mapping[str, Callable[[], object]] = STRIKES,
    ) -> None:
        self._strike = strikes[case.kind] if case.rank == rank else None
        self._phase, self._path = case.phase, Path(folder, STRUCK)

    def at(self, phase: str) -> None:
        if phase == self._phase and self._strike is not None:
            strike, self._strike = self._strike, None
            self._path.write_text(str(time.monotonic()), encoding="utf-8")
            strike()


class Requests:
    """Counts the requests of one step, and strikes at the first, middle or last request of the next step."""

    def __init__(self, hit: Trigger, worlds: list[LiveWorld]) -> None:
        self._hit, self._step, self._seen, self._count = hit, -1, 0, 0
        for world in worlds:
            world.observers.append(self._observe)

    def begin(self, step: int) -> None:
        if step == job.FAULT_AT:
            self._count = self._seen
        self._step, self._seen = step, 0

    def _observe(self, request: Collective, at: Coordinate) -> None:
        if self._step == job.FAULT_AT:
            places = (0, self._count // 2, self._count - 1)
            for phase, place in zip(IN_A_STEP, places, strict=True):
                if self._seen == place:
                    self._hit.at(phase)
        self._seen += 1


class Gift:
    """An argument of a rank's function that strikes the rank while the rank unpickles it."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.folder = case, folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrap, (self.case, self.folder)


def _unwrap(case: Case, folder: str) -> Gift:
    if dist.is_initialized():
        Trigger(case, dist.get_rank(), folder).at("arguments arrive")
    return Gift(case, folder)


class Parting:
    """A rank's return value that strikes the rank while the rank pickles it."""

    def __init__(self, record: RankRecord, hit: Trigger) -> None:
        self.record, self._hit = record, hit

    def __reduce__(self) -> tuple[Any, ...]:
        self._hit.at("returning")
        return RankRecord, (self.record.rank, "", "", True, None, self.record.equal)
