"""Records a real step of one rank, cheaply enough that the step does not get slower.

No profiler runs: a live world's observers tell when a request was issued, done and answered, and
Newton–Schulz's functions are replaced by functions that also note when they begin and end. The ranks of a
machine share its monotonic clock, so the notes of all ranks become one ``StepTimeline``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from ..engine.collective import Collective, Walk
from ..evidence.ring_bytes import ring_bytes
from ..evidence.traces.time_split import CollectiveOfRank
from ..plan.grid import Coordinate
from ..step import orthogonalize, sum_gram_matrices
from ..worlds.live import Follow, LiveWorld, Moment
from .timed_world import Doing, Span
from .timeline import RankFlight, StepTimeline, transfers

PRODUCTS = (
    (orthogonalize, "newton_schulz_update"),
    (sum_gram_matrices, "own_grams"),
    (sum_gram_matrices, "multiply_shard"),
)
"""Calls of these functions are noted as Newton–Schulz."""


@dataclass(frozen=True, slots=True)
class NotedRequest(CollectiveOfRank):
    """A request as its rank saw it: when it was made, and the moments that the world reported.

    Times are nanoseconds on the machine's clock.
    """

    payload: int
    ring: int
    asked: int
    moments: dict[Moment, int] = field(default_factory=dict)

    @property
    def in_background(self) -> bool:
        """Whether the rank did something else between its request and its wait for the answer."""
        return "waiting" in self.moments

    @property
    def issued(self) -> int:
        return self.moments["issued"] if self.in_background else self.asked

    @property
    def answered(self) -> int:
        return self.moments["answered" if self.in_background else "issued"]

    @property
    def done(self) -> int:
        """When the backend was done, or when the rank had the answer if the backend does not report it."""
        return min(self.answered, self.moments.get("done", self.answered))


@dataclass(frozen=True, slots=True)
class RankNotes:
    """One rank's notes of one step: its requests and products, in nanoseconds on the machine's clock."""

    rank: int
    begin: int
    end: int
    requests: tuple[NotedRequest, ...]
    products: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class StepRecorder:
    """An observer for a live world that notes one rank's steps, each in a ``with`` block.

    recorder = StepRecorder(world.at.rank)
    world.observers.append(recorder)
    with recorder:
        world.run(step.walk())
    notes = recorder.notes[-1]
    """

    rank: int
    notes: list[RankNotes] = field(default_factory=list)
    _requests: list[NotedRequest] = field(default_factory=list)
    _products: list[tuple[int, int]] = field(default_factory=list)
    _turns: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _begin: int = 0
    _patched: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> StepRecorder:
        self._requests, self._products, self._turns = [], [], Counter()
        self._patched = ExitStack()
        for module, name in PRODUCTS:
            self._patched.enter_context(patch.object(module, name, self._noted(getattr(module, name))))
        self._begin = perf_counter_ns()
        return self

    def _noted(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            with self.product():
                return update(*given)

        return noted

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        end = perf_counter_ns()
        self._patched.close()
        if kind is None:
            found = tuple(self._requests), tuple(self._products)
            self.notes.append(RankNotes(self.rank, self._begin, end, *found))

    @contextmanager
    def product(self) -> Iterator[None]:
        """Note a ``with`` block's time as Newton–Schulz; the package's own functions need no such block."""
        begin = perf_counter_ns()
        yield
        self._products.append((begin, perf_counter_ns()))

    def __call__(self, request: Collective, at: Coordinate) -> Follow:
        payload = 0 if request.send is None else request.send.numel() * request.dtype.itemsize
        label, group = request.label, at.group(*request.axes)
        about = self.rank, request.kind, label.phase, label.subject, group, self._turns[group]
        noted = NotedRequest(*about, payload, ring_bytes(request, at), perf_counter_ns())
        self._turns[group] += 1
        self._requests.append(noted)

        def follow(moment: Moment) -> None:
            noted.moments[moment] = perf_counter_ns()

        return follow


def record_walk(world: LiveWorld, walk: Walk, recorder: StepRecorder) -> RankNotes:
    """Walk a step from a common start, and note it. Must be called by all ranks of the world."""
    world.observers.append(recorder)
    dist.barrier()
    try:
        with recorder:
            world.run(walk)
    finally:
        world.observers.remove(recorder)
    return recorder.notes[-1]


def recorded_timeline(notes: Sequence[RankNotes]) -> StepTimeline:
    """The timeline of one step, from the notes of all ranks."""
    zero = min(one.begin for one in notes)
    last: dict[tuple[tuple[int, ...], int], int] = {}
    requests = [request for one in notes for request in one.requests]
    for request in requests:
        key = request.group, request.turn
        last[key] = max(last.get(key, 0), request.issued)
    flights = [_flight(request, last[request.group, request.turn], zero) for request in requests]
    spans = [span for one in notes for span in _spans(one, zero)]
    return StepTimeline("recorded", (*spans, *transfers(flights)), tuple(flights))


def _flight(it: NotedRequest, last: int, zero: int) -> RankFlight:
    begin = min(last, it.done)  # a rank that only sends may be done before the last member asks
    times = (it.issued, begin, it.done, it.answered)
    issued, began, done, answered = ((each - zero) / 1e9 for each in times)
    about = (it.rank, it.kind, it.phase, it.subject, it.group, it.turn)
    return RankFlight(*about, issued, began, done, answered, it.payload, it.ring)


def _spans(notes: RankNotes, zero: int) -> Iterator[Span]:
    """A rank's time in order: waiting, products, and everything else as copies."""
    at, label = notes.begin, "start"
    for begin, end, doing, name in sorted(_noted(notes)):
        if begin > at:
            yield _span(notes.rank, "copy", at, begin, label, zero)
        label = name or label
        if end > begin:
            yield _span(notes.rank, doing, begin, end, label, zero)
        at = max(at, end)
    if notes.end > at:
        yield _span(notes.rank, "copy", at, notes.end, label, zero)


def _noted(notes: RankNotes) -> Iterator[tuple[int, int, Doing, str]]:
    """A rank's intervals (begin, end, activity, name). A request in the background counts only while the rank
    waits for it."""
    for request in notes.requests:
        if request.in_background:
            yield request.asked, request.asked, "wait", request.label
            yield request.moments["waiting"], request.answered, "wait", request.label
        else:
            yield request.asked, request.answered, "wait", request.label
    for begin, end in notes.products:
        yield begin, end, "product", ""


def _span(rank: int, doing: Doing, begin: int, end: int, label: str, zero: int) -> Span:
    return Span(rank, doing, (begin - zero) / 1e9, (end - zero) / 1e9, label)
