"""Lesson 12: loops over matrices, written as generators that ask for gathers and wait for them.

In turn ``i``, each rank gathers one matrix, whose rows lie on all ranks, and works on it. A loop runs on real
ranks, in one process, or in the timed world, where gathers and work take the milliseconds they are given.
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import Grid, zeropower_via_newtonschulz
from ...engine.collective import Collective, Label, Start, Wait, Walk
from ...timing.machine import Link, Machine
from ...timing.timed_world import TimedWorld
from ...timing.timeline import StepTimeline, predicted_timeline
from ..exercises.judge import MistakeError, value_of

Loop = Callable[[int, Callable[[int], Collective], Callable[[int, Any], Any], int], Walk]
"""``loop(count, gather, work, window)``: ``gather(i)`` is a request, ``work(i, whole)`` computes."""

ENTRIES = 1000
"""Entries of a piece that occupies the toy link for one millisecond."""
COLUMNS = 24


def one_by_one(count: int, gather: Callable, work: Callable, window: int = 1) -> Walk:
    """Ask for a matrix, wait for it and work on it; then ask for the next."""
    for i in range(count):
        ticket = yield Start(gather(i))
        whole = yield Wait(ticket)
        work(i, whole)


def prefetch(count: int, gather: Callable, work: Callable, window: int) -> Walk:
    """The exercise's reference: at most ``window`` matrices are asked for and not yet done."""
    tickets, asked = [], 0
    for i in range(count):
        while asked < min(count, i + window):
            tickets.append((yield Start(gather(asked))))
            asked += 1
        whole = yield Wait(tickets.pop(0))
        work(i, whole)


def toy_machine(ranks: int) -> Machine:
    """A machine on which ``asked_for`` and ``busy_for`` take the milliseconds that they are given."""
    rate = ((1.0, 2e6),)  # a product of w pairs of numbers takes w microseconds
    link = Link(bandwidth=4.0 * ENTRIES * 1000 * max(1, ranks - 1), latency=0.0)
    return Machine("toy", {"float32": rate, "bfloat16": rate}, ((1.0, 1e18),), 0.0, 0.0, link)


def asked_for(phase: str, index: int, milliseconds: float, ranks: int) -> Collective:
    """An exchange of pieces without data that keeps the toy link busy for ``milliseconds``."""
    return exchange(phase, index, torch.empty(ranks * round(ENTRIES * milliseconds), device="meta"), ranks)


def busy_for(milliseconds: float) -> None:
    """Keep the toy processor busy for ``milliseconds``, by computing without data."""
    one = torch.empty(1, round(1000 * milliseconds), device="meta")
    torch.mm(one, one.t())


@dataclass(eq=False)
class LoopWatch:
    """The matrices that a loop worked on, and the largest number asked for but not yet worked on."""

    asked: int = 0
    done: list[int] = field(default_factory=list)
    held: int = 0


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Milliseconds that each gather and the work on each matrix take."""

    gather: tuple[float, ...]
    work: tuple[float, ...]

    @classmethod
    def alike(cls, count: int, gather: float, work: float) -> LoopTimes:
        return cls((gather,) * count, (work,) * count)


@dataclass(frozen=True, slots=True)
class TimedLoop:
    """A loop's run in the timed world: its timeline, and rank 0's ``LoopWatch``."""

    timeline: StepTimeline
    watch: LoopWatch

    @property
    def milliseconds(self) -> float:
        """Milliseconds until the last rank ended, rounded so that whole numbers print as such."""
        return round(1000 * self.timeline.seconds, 6)


def time_loop(loop: Loop, times: LoopTimes, window: int, ranks: int) -> TimedLoop:
    """Run a loop on all ranks of the toy machine; raises what ``guarded`` raises."""
    watches = [LoopWatch() for _ in range(ranks)]
    walks = [_timed_walk(loop, times, window, ranks, watch) for watch in watches]
    run = TimedWorld(Grid.of(dp=ranks), toy_machine(ranks)).run(walks)
    return TimedLoop(predicted_timeline(run), watches[0])


def _timed_walk(loop: Loop, times: LoopTimes, window: int, ranks: int, watch: LoopWatch) -> Walk:
    def gather(index: int) -> Collective:
        watch.asked += 1
        watch.held = max(watch.held, watch.asked - len(watch.done))
        return asked_for("gather", index, times.gather[index], ranks)

    def work(index: int, whole: Any) -> None:
        check_came(whole)
        busy_for(times.work[index])
        watch.done.append(index)

    return guarded(loop, len(times.work), gather, work, window, most=1)


def check_came(whole: Any) -> None:
    """Raise MistakeError if a loop works on something that is not yet a tensor."""
    if not isinstance(whole, Tensor):
        raise MistakeError("work was given a ticket. Wait for it first: whole = yield Wait(ticket).")


@dataclass(eq=False)
class ReaderTicket:
    """A reader's loop gets this in place of a world's ticket, so that the tickets it keeps can be counted."""

    world: Any


def guarded(loop: Callable[..., Any], *given: Any, most: float = math.inf) -> Walk:
    """Run a reader's generator, and turn its errors into one plain sentence.

    Raises:
        MistakeError: it is no generator, raised an error, yielded something other than a request, or keeps
            more than ``most`` tickets after it has waited for them.
        OpenAnswerError: the function is a stub.
    """
    walk = value_of(loop, *given)
    if not isinstance(walk, Generator):
        raise MistakeError("The function asks for nothing: it has no yield.")
    answer, waited = None, list[weakref.ref[ReaderTicket]]()
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration as stop:
            return stop.value
        except MistakeError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[1:]
            where = f" In: {last[0].line}" if last and last[0].line else ""
            if isinstance(error, IndexError):  # the error's text says whether it was the tuple of times
                beyond = "tuple" in str(error)
                where += f" Ask {'for no more than count matrices' if beyond else 'before you wait'}."
            raise MistakeError(f"The loop raised {type(error).__name__}: {error}.{where}") from error
        if not isinstance(turn, Start | Wait | Collective):
            raise MistakeError(f"It yields {turn!r}. Yield Start(request) or Wait(ticket).")
        if isinstance(turn, Wait) and isinstance(turn.ticket, ReaderTicket):
            waited.append(weakref.ref(turn.ticket))
            turn = Wait(turn.ticket.world)
        answer = yield turn
        if isinstance(turn, Start):
            answer = ReaderTicket(answer)
            if (kept := sum(each() is not None for each in waited)) > most:
                said = f"{kept} tickets are kept after their waits, and they keep their matrices: use pop."
                raise MistakeError(said)


@dataclass(eq=False)
class RealMatrices:
    """One rank's rows of real matrices, and its updates. ``noting`` may wrap the work, to record it."""

    rank: int
    ranks: int
    seed: int
    rows: int = 8
    noting: Callable[[], AbstractContextManager] = nullcontext
    updates: dict[int, Tensor] = field(default_factory=dict)

    def whole(self, index: int, owner: int) -> Tensor:
        """The matrix that one owner gathers in a turn, made from the seed, so that any rank can check it."""
        draw = torch.Generator().manual_seed(1000 * self.seed + index * self.ranks + owner)
        return torch.randn(self.rows * self.ranks, COLUMNS * self.rows // 8, generator=draw)

    def gather(self, index: int) -> Collective:
        """The request that gives each rank its whole matrix of this turn."""
        mine = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        pieces = [self.whole(index, owner)[mine].reshape(-1) for owner in range(self.ranks)]
        return exchange("gather", index, torch.cat(pieces), self.ranks)

    def work(self, index: int, arrived: Any) -> Tensor:
        check_came(arrived)
        with self.noting():
            self.updates[index] = zeropower_via_newtonschulz(arrived.view(self.rows * self.ranks, -1))
        return self.updates[index]

    def flat_work(self, index: int, arrived: Any) -> Tensor:
        return self.work(index, arrived).reshape(-1)

    def right(self, index: int) -> Tensor:
        """The update of this rank's matrix, computed in one process."""
        return zeropower_via_newtonschulz(self.whole(index, self.rank))


def exchange(phase: str, index: int, packed: Tensor, ranks: int) -> Collective:
    """A request that sends each rank its piece of a flat buffer. All pieces have the same size."""
    each = (packed.numel() // ranks,) * ranks
    label = Label(phase, f"matrix {index}")
    return Collective("all_to_all", ("dp",), packed.dtype, packed, packed.numel(), label, None, each, each)


def first_wrong(matrices: RealMatrices, count: int) -> int | None:
    """The first turn whose update is missing, or differs in any bit from one process's; None if all agree."""
    came = matrices.updates
    wrong = (i for i in range(count) if i not in came or not torch.equal(came[i], matrices.right(i)))
    return next(wrong, None)


def matrix_of(label: str) -> int | None:
    """The number in a label such as "gather of matrix 3", if it has one.

    >>> matrix_of("gather of matrix 3"), matrix_of("gradient flags")
    (3, None)
    """
    last = label.rpartition(" ")[2]
    return int(last) if last.isdigit() else None
