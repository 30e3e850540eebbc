"""Exercises of lesson 03: count messages and bytes, write a ring for real ranks, and the quiz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain

from torch import Tensor

from ..exercises.judge import Exercise, numbers
from ..exercises.on_real_ranks import judge_on_ranks, say_failure
from . import messages
from .messages import CallNote
from .on_ranks import ITEM, NUMEL, PATIENCE, CollectiveRun, my_piece, play_on_ranks


def predict(ranks: int) -> Exercise:
    """The guess: how many messages, and how many bytes, does one rank send in an all_gather?"""
    piece = NUMEL * ITEM

    def judge(count: object, size: object) -> str | None:
        if not isinstance(count, int) or not isinstance(size, int):
            return "Give two whole numbers."
        if count != ranks - 1:
            return f"messages: {_why_not_so_many(count, ranks)}"
        if size != count * piece:
            unit = " That counts numbers, and each takes 4 bytes." if size == count * NUMEL else ""
            return f"bytes: a message carries one piece, {piece} bytes; {size} is not {count} of them.{unit}"
        return None

    hints = ("Each rank lacks all pieces but its own, and one arrives in a message.",)
    return Exercise(judge, hints, "Everybody lacks all pieces but one, and sends as many as it receives.")


def _why_not_so_many(count: int, ranks: int) -> str:
    if count == ranks:
        return f"{count} would bring every piece home again; the last one is not needed."
    if count == 1:
        return "after one message each, everybody holds its own piece and a neighbour's, no more."
    most = "less than what everybody lacks" if count < ranks - 1 else "more than anybody lacks"
    return f"{count} is {most}."


def check_ring(ranks: int, backend: str = "gloo", timeout: float = PATIENCE) -> Exercise:
    """The exercise: an all_gather in which each rank passes on to the next what came last, on real ranks."""

    play = partial(play_on_ranks, bring=my_piece, ranks=ranks, backend=backend, timeout=timeout)
    hints = (
        "In the first round pass on your own piece; then always the one that has just come.",
        "In round `step` (from 0) rank r sends piece (r - step) % ranks and receives (r - step - 1) % ranks.",
        "isend first, then recv, then wait() for the isend.",
    )
    praise = "Every rank holds every piece, in order, after sending one fewer than there are."
    return Exercise(judge_on_ranks(play, judge_ring, say_failure), hints, praise)


def judge_ring(run: CollectiveRun) -> str | None:
    """What is wrong with a run of an all_gather, or None."""
    judges = (_judge_stuck, _judge_returned, _judge_messages, _judge_pieces, _judge_ring)
    return next(chain.from_iterable(judge(run) for judge in judges), None)


def _judge_stuck(run: CollectiveRun) -> Iterator[str]:
    stuck = [rank for rank, report in enumerate(run.reports) if report.stuck]
    if not stuck:
        return
    dropped = [sum(note.verb == "sent" and note.stop is None for note in r.notes) for r in run.reports]
    if max(dropped) > 1:
        many = f"Rank {dropped.index(max(dropped))} has not waited for {max(dropped)} of its isends."
        yield f"{many} A handle dropped before its wait() may drop its message, too, and its receiver waits."
    last = {rank: report.notes[-1] for rank, report in enumerate(run.reports) if report.notes}
    if len(last) == run.ranks and all(note.verb == "sent" and note.stop is None for note in last.values()):
        yield "The ranks wait for each other: all are in send(), and nobody receives. isend() does not wait."
    if len(last) == run.ranks and all(note.verb == "received" for note in last.values()):
        yield f"The ranks wait for each other: {_say_waiting(last)}."
    yield f"Rank {stuck[0]} waited in vain: {_say_waiting({stuck[0]: last[stuck[0]]})}."


def _say_waiting(last: Mapping[int, CallNote]) -> str:
    verbs = {"sent": "to send to", "received": "to receive from"}
    return ", ".join(f"rank {rank} waits {verbs[note.verb]} rank {note.peer}" for rank, note in last.items())


def _judge_returned(run: CollectiveRun) -> Iterator[str]:
    for rank, report in enumerate(run.reports):
        pieces = report.returned
        if not isinstance(pieces, (list, tuple)) or len(pieces) != run.ranks:
            came = f"a list of {len(pieces)}" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
            yield f"Return a list of {run.ranks} pieces; rank {rank} returned {came}."
    for rank, report in enumerate(run.reports):
        first: dict[int, int] = {}
        for place, piece in enumerate(report.returned):
            if (twin := first.setdefault(id(piece), place)) != place:
                what = f"Rank {rank} returned one tensor at places {twin} and {place}"
                yield f"{what}: what came last has overwritten the rest. Receive into a new one each round."


def _judge_messages(run: CollectiveRun) -> Iterator[str]:
    for message in run.messages:
        if message.stop is None:
            yield f"Round {message.round}: {message}, and nobody receives it."
    if wrong := messages.first_repeat(run.start, run.messages):
        if wrong.content is None:
            yield f"Round {wrong.round}: rank {wrong.sender} sends a buffer that holds no piece yet."
        held = "who holds it already. What came last is what the next rank lacks."
        yield f"Round {wrong.round}: {wrong}, {held}"


def _judge_pieces(run: CollectiveRun) -> Iterator[str]:
    for rank, report in enumerate(run.reports):
        for place, piece in enumerate(report.returned):
            content = messages.content_of(piece, run.ranks) if isinstance(piece, Tensor) else None
            if content is None:
                yield f"Rank {rank} returned no piece at place {place}: that buffer was never filled."
            elif content.piece != place:
                advice = "Pieces stand in the order of ranks, and each needs a tensor of its own."
                yield f"Rank {rank} returned piece {content.piece} at place {place}. {advice}"


def _judge_ring(run: CollectiveRun) -> Iterator[str]:
    if run.ranks > 1 and not run.messages:
        yield "The pieces are right, but no message was seen. Send them yourself: dist.isend and dist.recv."
    for message in run.messages:
        if (message.receiver - message.sender) % run.ranks != 1:
            to = (message.sender + 1) % run.ranks
            yield f"Round {message.round}: {message}. In a ring it sends to rank {to} only."
    for rank, report in enumerate(run.reports):
        if any(note.stop is None for note in report.notes):
            yield f"Rank {rank} returns without wait() for its isend: the bytes may not have left yet."


def quiz(ranks: int) -> Exercise:
    """Three numbers that the notebook has measured."""
    half = ranks - 1
    expected = {"rounds": 2 * half, "share": 0.5, "bytes": 2 * half * NUMEL * ITEM}
    why = {
        "rounds": "Look at the last rung of the all_reduce's ladder, or ask total.messages_sent(0).",
        "share": "Divide what rank 0 sent in the all_gather by what it sent in the all_reduce.",
        "bytes": "Ask total.bytes_sent(0).",
    }
    return numbers(expected, why)
