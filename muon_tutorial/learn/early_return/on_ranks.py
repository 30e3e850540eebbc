"""Lesson 12 on real ranks: a call that returns early, and a reader's loop, on a bare link or a slow one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ... import build_mesh, zeropower_via_newtonschulz
from ...engine.collective import Collective
from ...launching.launch import launch
from ...timing.step_recorder import RankNotes, StepRecorder, record_walk, recorded_timeline
from ...timing.timeline import StepTimeline
from ...worlds import live
from ...worlds.live import LiveWorld, gather_objects
from ..inputs import measure
from .loops import COLUMNS, Loop, RealMatrices, first_wrong, guarded

ROWS = 64
SIZES = (16, 32, 64, 128, 256)
"""The numbers of rows per rank from which ``run_on_slow_links`` chooses."""
WARM_UPS = 4
SLOWER = 2
"""The time of a gather on a slow link, divided by the time of the work on a matrix."""
LONG_ENOUGH = 0.02
"""The seconds that work on a matrix should take, so that it outweighs what a request costs."""


@dataclass(frozen=True, slots=True)
class LoopOnRanks:
    """A loop's run on real ranks: the first wrong turn of each rank, and the timeline."""

    wrong: tuple[int | None, ...]
    timeline: StepTimeline

    def __str__(self) -> str:
        if all(turn is None for turn in self.wrong):
            return f"the bits of one process on all {len(self.wrong)} ranks"
        told = (f"rank {r} from turn {turn} on" for r, turn in enumerate(self.wrong) if turn is not None)
        return f"other bits: {', '.join(told)}"


def run_loop(
    loop: Loop, ranks: int, seed: int, window: int, count: int = 6, backend: str = "gloo"
) -> LoopOnRanks:
    """Run a loop on real ranks, over real matrices, and compare with one process."""
    found = launch(_run_loop, ranks, args=(loop, seed, window, count), backend=backend, output="quiet")
    return LoopOnRanks(tuple(wrong for wrong, _ in found), recorded_timeline([notes for _, notes in found]))


def _run_loop(rank: int, loop: Loop, seed: int, window: int, count: int) -> tuple[int | None, RankNotes]:
    world, recorder = LiveWorld(build_mesh({"dp": dist.get_world_size()})), StepRecorder(rank)
    for _ in range(2):  # the first run only makes the connections
        held = _walk_loop(world, recorder, loop, window, count, seed, ROWS)
    return first_wrong(held, count), recorder.notes[-1]


def _walk_loop(
    world: LiveWorld, recorder: StepRecorder, loop: Loop, window: int, count: int, seed: int, rows: int
) -> RealMatrices:
    held = RealMatrices(world.at.rank, world.grid.world_size, seed, rows, recorder.product)
    gathers = [held.gather(i) for i in range(count)]  # made here, because making them takes time
    record_walk(world, guarded(loop, count, gathers.__getitem__, held.work, window), recorder)
    return held


@dataclass(eq=False)
class SlowLink:
    """A rank's own link, on which each exchange takes at least ``seconds``, and which carries one at a time.

    It stands in for the function ``call`` with which a live world calls its backend. A thread waits for the
    real exchange, and sleeps for the rest of the time, so the link costs no processor time.
    """

    call: Callable[..., Any]
    seconds: float = 0.0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def __call__(self, request: Collective, received: Tensor, group: Any, async_op: bool) -> Any:
        carried = self._thread.submit(self._carry, self.call(request, received, group, True))
        if async_op:
            return SimpleNamespace(wait=carried.result, get_future=lambda: carried)
        carried.result()
        return None

    def _carry(self, work: Any) -> None:
        begin = time.perf_counter()
        work.wait()
        time.sleep(max(0.0, begin + self.seconds - time.perf_counter()))


def run_on_slow_links(
    loop: Loop,
    ranks: int,
    seed: int,
    windows: Sequence[int],
    steps: int,
    count: int = 6,
    backend: str = "gloo",
) -> list[StepTimeline]:
    """The fastest of ``steps`` runs of a loop for each window, with a slow link for each rank.

    There, a gather takes ``SLOWER`` times as long as the work on a matrix takes on this machine: then overlap
    pays even if the cores are busy with other programs, too.
    """
    args = (loop, seed, tuple(windows), steps, count)
    found = launch(_run_slowed, ranks, args=args, backend=backend, output="quiet")
    by_window = (zip(*(notes[each] for notes in found), strict=True) for each in range(len(windows)))
    return [min(map(recorded_timeline, runs), key=lambda run: run.seconds) for runs in by_window]


def _rows(ranks: int) -> int:
    """How many rows of a matrix each rank should hold, so that the work on a matrix is long enough."""
    for rows in SIZES:
        matrix = torch.ones(rows * ranks, COLUMNS * rows // 8)
        if measure.fastest(1, zeropower_via_newtonschulz, matrix) > LONG_ENOUGH:
            break
    return rows


def _run_slowed(
    rank: int, loop: Loop, seed: int, windows: Sequence[int], steps: int, count: int
) -> list[list[RankNotes]]:
    world, recorder = LiveWorld(build_mesh({"dp": dist.get_world_size()})), StepRecorder(rank)
    rows, link = max(gather_objects(_rows(world.grid.world_size))), SlowLink(live._call_backend)
    with patch.object(live, "_call_backend", link):
        for _ in range(WARM_UPS):
            _walk_loop(world, recorder, loop, 1, count, seed, rows)
        works = [statistics.mean(end - begin for begin, end in notes.products) for notes in recorder.notes]
        link.seconds = SLOWER * min(map(statistics.mean, zip(*gather_objects(works), strict=True))) / 1e9
        # in turns, so that a machine that gets slower does not slow down one window alone
        for window in [*windows] * steps:
            _walk_loop(world, recorder, loop, window, count, seed, rows)
    return [recorder.notes[WARM_UPS + each :: len(windows)] for each in range(len(windows))]


def say_stopwatch(told: Sequence[tuple[float, float]]) -> str:
    rows = (f"{rank:<6}{1000 * call:>14.2f}{1000 * wait:>14.2f}" for rank, (call, wait) in enumerate(told))
    return "\n".join([f"{'rank':<6}{'the call, ms':>14}{'the wait, ms':>14}", *rows])
