"""Lesson 11: one step through functions with handles, timed on real ranks, for three sizes of the window.

When a call began and when its tensor had come, and when Newton–Schulz computed, all on the machine's one
clock. The functions are the reference's, which return before their tensors have come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ... import DistributedConfig, Muon
from ...callbacks import callback_step
from ...evidence.traces.time_split import Flight, RankTimes, Timeline
from ...launching.launch import launch
from ...worlds.live import gather_objects
from . import three_functions
from .on_ranks import LR, rows_at, whole_matrix

SIDE = 320
PER_RANK = 3
What = Literal["gather", "Newton–Schulz", "redistribute"]


@dataclass(frozen=True, slots=True)
class TimedNote:
    """What a rank did for one matrix, and from when to when, in nanoseconds."""

    what: What
    index: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowRun:
    """One timed step by its name: the notes of each rank, and a hash of all parameters after it."""

    name: str
    notes: tuple[tuple[TimedNote, ...], ...]
    bits: str

    @property
    def timeline(self) -> Timeline:
        """The step as the package's traces have it: computing, and calls in flight."""
        return Timeline(tuple(_times_of(rank, notes) for rank, notes in enumerate(self.notes)))

    @property
    def milliseconds(self) -> float:
        """From the first call to the last answer."""
        return (self.timeline.end - self.timeline.begin) / 1e6

    @property
    def at_once(self) -> int:
        """On how many ranks Newton–Schulz ran at the same time, at most."""
        return _most_at_once(note for notes in self.notes for note in notes if note.what == "Newton–Schulz")

    @property
    def under_way(self) -> int:
        """How many matrices rank 0 had begun to gather and not yet finished, at most."""
        begun = {note.index: note.begin for note in self.notes[0] if note.what == "gather"}
        done = {note.index: note.end for note in self.notes[0] if note.what == "redistribute"}
        return _most_at_once(TimedNote("gather", index, begun[index], done[index]) for index in begun)


def _times_of(rank: int, notes: Sequence[TimedNote]) -> RankTimes:
    compute = tuple((note.begin, note.end) for note in notes if note.what == "Newton–Schulz")
    calls = sorted((note for note in notes if note.what != "Newton–Schulz"), key=lambda note: note.begin)
    flights = tuple(
        Flight(rank, "all_to_all", f"{note.what}_fn", f"matrix {note.index}", (), turn, note.begin, note.end)
        for turn, note in enumerate(calls)
    )
    begin, end = min(note.begin for note in notes), max(note.end for note in notes)
    return RankTimes(rank, begin, end, compute, flights)


def _most_at_once(notes: Iterator[TimedNote]) -> int:
    edges = sorted(edge for note in notes for edge in ((note.begin, 1), (note.end, -1)))
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


Settings = Mapping[str, Mapping[str, Any]]
"""Keywords of a ``DistributedConfig``, by a name for each."""


def run_windows(
    settings: Settings, ranks: int, seed: int, backend: str = "gloo", side: int = SIDE
) -> tuple[WindowRun, ...]:
    """Time a step for each setting, on all ranks as one group."""
    found = launch(_time_settings, ranks, args=(settings, seed, side), backend=backend, output="quiet")
    return tuple(_joined(name, [mine[number] for mine in found]) for number, name in enumerate(settings))


def _joined(name: str, found: Sequence[tuple[list[TimedNote], str]]) -> WindowRun:
    bits = hashlib.sha256("".join(bits for _, bits in found).encode()).hexdigest()[:12]
    return WindowRun(name, tuple(tuple(notes) for notes, _ in found), bits)


def _time_settings(rank: int, settings: Settings, seed: int, side: int) -> list[tuple[list[TimedNote], str]]:
    return [_time_setting(rank, seed, side, keywords) for keywords in settings.values()]


def _time_setting(
    rank: int, seed: int, side: int, keywords: Mapping[str, Any]
) -> tuple[list[TimedNote], str]:
    ranks, notes = dist.get_world_size(), list[TimedNote]()
    shapes = [(side, side)] * (PER_RANK * ranks)
    params = [
        torch.nn.Parameter(rows_at(whole_matrix(shape, i, seed), rank, ranks))
        for i, shape in enumerate(shapes)
    ]
    config = DistributedConfig(
        three_functions.assign,
        partial(_noted, notes, "gather", three_functions.gather_later),
        partial(_noted, notes, "redistribute", three_functions.redistribute_later),
        {"group": dist.group.WORLD, "shapes": shapes},
        **keywords,
    )
    muon = Muon(params, lr=LR, distributed_config=config)
    for step in range(2):  # the first step compares answers over all ranks; the second is the one to look at
        for i, (shape, param) in enumerate(zip(shapes, params, strict=True)):
            param.grad = rows_at(whole_matrix(shape, i, seed, 1 + step), rank, ranks)
        gather_objects(step)
        notes.clear()
        with _noting_newton_schulz(notes):
            muon.step()
    held = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in params))
    return notes, held.hexdigest()


@dataclass(frozen=True, slots=True)
class _NotedTensor:
    """A handle that notes when its tensor has come."""

    handle: three_functions.LaterTensor
    notes: list[TimedNote]
    what: What
    index: int
    begin: int

    def wait(self) -> Tensor | None:
        tensor = self.handle.wait()
        self.notes.append(TimedNote(self.what, self.index, self.begin, perf_counter_ns()))
        return tensor


def _noted(
    notes: list[TimedNote], what: What, function: Callable[..., Any], tensor: Any, rank: int, state: dict
) -> _NotedTensor:
    begin = perf_counter_ns()
    return _NotedTensor(function(tensor, rank, state), notes, what, state["param_idx"], begin)


@contextmanager
def _noting_newton_schulz(notes: list[TimedNote]) -> Iterator[None]:
    """Note when the optimizer computes, and for which matrix: the one that has just come."""
    original = callback_step.newton_schulz_update

    def noted(*given: Any) -> Tensor:
        index = next(note.index for note in reversed(notes) if note.what == "gather")
        begin = perf_counter_ns()
        update = original(*given)
        notes.append(TimedNote("Newton–Schulz", index, begin, perf_counter_ns()))
        return update

    with patch.object(callback_step, "newton_schulz_update", noted):
        yield


def say_windows(runs: Sequence[WindowRun]) -> str:
    """What the window changes, and what it does not."""
    lines = [f"{'':<28}{'computing at once':>18}{'under way':>11}   bits after the step"]
    for run in runs:
        lines.append(f"{run.name:<28}{run.at_once:>18}{run.under_way:>11}   {run.bits}")
    return "\n".join(lines)
