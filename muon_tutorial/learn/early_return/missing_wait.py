"""Lesson 12: a program that uses two buffers in turn and lacks a wait, and the effect of adding one.

Until a rank waits, a backend may read the rank's buffer at any time; here, it reads when the rank waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import Grid
from ...engine.collective import Start, Wait, Walk
from ...timing.timed_world import TimedWorld
from ...timing.timeline import StepTimeline, predicted_timeline
from ...worlds.local import LocalWorld
from ..exercises.judge import MistakeError
from .loops import RealMatrices, asked_for, busy_for, exchange, guarded, toy_machine

PROGRAM = """\
def program(count, gather, work, share, buffers):
    coming, leaving = {}, {}
    for i in range(count):
        while len(coming) < min(count, i + 3):
            coming[len(coming)] = yield Start(gather(len(coming)))
        whole = yield Wait(coming[i])
        update = work(i, whole)
        buffer = buffers[i % 2]
        buffer.copy_(update)
        leaving[i] = yield Start(share(i, buffer))
    for i in range(count):
        leaving[i] = yield Wait(leaving[i])
    return leaving
"""
COUNT = 5
GATHER, WORK, SHARE = 2.0, 3.0, 8.0
RIGHT_LINE, RIGHT_TICKET = 9, "leaving[i - 2]"
_TICKET = re.compile(r"\s*(coming|leaving)\[\s*i\s*(?:([+-])\s*(\d+)\s*)?\]\s*")


def say_program() -> str:
    return "\n".join(f"{number:2}  {line}" for number, line in enumerate(PROGRAM.splitlines(), 1))


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The first wrong matrix, if any; the timeline; the time (s) when that matrix was ``overwritten``."""

    wrong: int | None
    timeline: StepTimeline
    overwritten: float | None

    @property
    def milliseconds(self) -> float:
        return round(1000 * self.timeline.seconds, 6)


def with_wait(line: Any, ticket: Any) -> str:
    """The program, plus a wait for a ticket before a line. Raises MistakeError if no wait can be there."""
    lines = PROGRAM.splitlines()
    if not isinstance(line, int) or not 2 <= line <= len(lines):
        raise MistakeError(f"The wait goes before one of the lines 2 to {len(lines)}; yours is {line!r}.")
    found = _TICKET.fullmatch(ticket) if isinstance(ticket, str) else None
    if found is None:
        raise MistakeError(f"Name a ticket such as 'coming[i]' or 'leaving[i - 1]'; yours is {ticket!r}.")
    if line in (2, 3, len(lines)):
        raise MistakeError(f"Before line {line} there is no i.")
    name, sign, number = found.groups()
    index = f"i {sign} {number}" if sign else "i"
    after = lines[line - 1]
    indent = after[: len(after) - len(after.lstrip())]
    wait = f"{indent}if {index} in {name}: yield Wait({name}[{index}])"
    return "\n".join([*lines[: line - 1], wait, *lines[line - 1 :]]) + "\n"


def run_program(source: str, ranks: int, share: float = SHARE) -> ProgramRun:
    """Run the program in two ways: with real data that is read as late as possible, and in the timed world.

    In the timed world, sharing takes ``share`` milliseconds. Raises MistakeError if the program fails.
    """
    names: dict[str, Any] = {"Start": Start, "Wait": Wait}
    exec(compile(source, "<the program>", "exec"), names)
    wrong, timeline = _first_wrong(names["program"], ranks), _timeline(names["program"], ranks, share)
    return ProgramRun(wrong, timeline, _early_writes(timeline).get(wrong))


def overwrites(share: float, ranks: int) -> list[int | None]:
    """Matrices whose buffer the unchanged program overwrites too early, if sharing takes ``share`` ms."""
    return list(_early_writes(run_program(PROGRAM, ranks, share=share).timeline))


def _early_writes(timeline: StepTimeline) -> dict[int | None, float]:
    """Matrices whose buffer is written again before their share has ended, each with that time (s)."""
    shared = [f.end for f in timeline.flights if f.rank == 0 and f.label.startswith("share")]
    written = [work.end for work in timeline.of(0, "product")[2:]]  # written as soon as it is computed
    return {i: at for i, (at, end) in enumerate(zip(written, shared, strict=False)) if end - at > 1e-9}


def _timeline(program: Callable[..., Walk], ranks: int, milliseconds: float) -> StepTimeline:
    gather = partial(asked_for, "gather", milliseconds=GATHER, ranks=ranks)
    share = partial(asked_for, "share", milliseconds=milliseconds, ranks=ranks)

    def work(index: int, whole: Any) -> Tensor:
        busy_for(WORK)
        return buffers[0]

    buffers = [torch.empty(1, device="meta") for _ in range(2)]
    walks = [guarded(program, COUNT, gather, work, lambda i, _: share(i), buffers) for _ in range(ranks)]
    return predicted_timeline(TimedWorld(Grid.of(dp=ranks), toy_machine(ranks)).run(walks))


def _first_wrong(program: Callable[..., Walk], ranks: int) -> int | None:
    held, walks = [RealMatrices(rank, ranks, seed=0) for rank in range(ranks)], []
    for each in held:
        buffers = [torch.zeros_like(each.right(0).reshape(-1)) for _ in range(2)]
        share = partial(exchange, "share", ranks=ranks)
        walks.append(guarded(program, COUNT, each.gather, each.flat_work, share, buffers))
    came = run_late(walks)
    for index in range(COUNT):  # every rank must have its rows of every owner's update
        updates = [owner.right(index).reshape(-1).chunk(ranks) for owner in held]
        due = [torch.cat([update[rank] for update in updates]) for rank in range(ranks)]
        if not all(torch.equal(mine[index], right) for mine, right in zip(came, due, strict=True)):
            return index
    return None


@dataclass(eq=False)
class _LateTicket:
    request: Any
    answer: Tensor | None = None


def run_late(walks: Sequence[Walk]) -> list[Any]:
    """Run all ranks to their end and return their values. Data is read only when its rank waits."""
    return LocalWorld(Grid.of(dp=len(walks))).run([_late(walk) for walk in walks])


def _late(walk: Walk) -> Walk:
    """The same walk, except that each request is made only when the rank waits for it."""
    answer: Any = None
    while True:
        try:
            turn = walk.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(turn, Start):
            answer = _LateTicket(turn.request)
            continue
        assert isinstance(turn, Wait)
        answer = turn.ticket
        if isinstance(answer, _LateTicket):
            answer.answer = (yield answer.request) if answer.answer is None else answer.answer
            answer = answer.answer
