"""Exercises of lesson 03: count messages and bytes, write a ring for real ranks, and the quiz."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..exercises.judge import Exercise, numbers
from ..exercises.on_real_ranks import judge_on_ranks, say_failure
from . import messages
from .messages import CallNote
from .on_ranks import ITEM, NUMEL, PATIENCE, Algorithm, CollectiveRun, my_piece, play_on_ranks


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

    def play(algorithm: Algorithm) -> CollectiveRun:
        return play_on_ranks(algorithm, my_piece, ranks, backend, timeout)

    hints = (
        "In the first round pass on your own piece; then always the one that has just come.",
        "In round `step` (from 0) rank r sends piece (r - step) % ranks and receives (r - step - 1) % ranks.",
        "isend first, then recv, then wait() for the isend.",
    )
    praise = "Every rank holds every piece, in order, after sending one fewer than there are."
    return Exercise(judge_on_ranks(play, judge_ring, say_failure), hints, praise)


def judge_ring(run: CollectiveRun) -> str | None:
    """What is wrong with a run of an all_gather, or None."""
    judges = (
        _judge_stuck,
        _judge_returned,
        _judge_shared,
        _judge_messages,
        _judge_pieces,
        _judge_ring,
        _judge_waits,
    )
    return next((wrong for judge in judges if (wrong := judge(run))), None)


def _judge_stuck(run: CollectiveRun) -> str | None:
    if not any(report.stuck for report in run.reports):
        return None
    dropped = [sum(note.verb == "sent" and note.stop is None for note in r.notes) for r in run.reports]
    if max(dropped) > 1:
        many = f"Rank {dropped.index(max(dropped))} has not waited for {max(dropped)} of its isends."
        return f"{many} A handle dropped before its wait() may drop its message, too, and its receiver waits."
    last = {rank: report.notes[-1] for rank, report in enumerate(run.reports) if report.notes}
    if len(last) == run.ranks and all(note.verb == "sent" and note.stop is None for note in last.values()):
        return "The ranks wait for each other: all are in send(), and nobody receives. isend() does not wait."
    if len(last) == run.ranks and all(note.verb == "received" for note in last.values()):
        return f"The ranks wait for each other: {_say_waiting(last)}."
    rank = next(rank for rank, report in enumerate(run.reports) if report.stuck)
    return f"Rank {rank} waited in vain: {_say_waiting({rank: last[rank]})}."


def _say_waiting(last: Mapping[int, CallNote]) -> str:
    verbs = {"sent": "to send to", "received": "to receive from"}
    return ", ".join(f"rank {rank} waits {verbs[note.verb]} rank {note.peer}" for rank, note in last.items())


def _judge_returned(run: CollectiveRun) -> str | None:
    for rank, report in enumerate(run.reports):
        pieces = report.returned
        if not isinstance(pieces, (list, tuple)) or len(pieces) != run.ranks:
            came = f"a list of {len(pieces)}" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
            return f"Return a list of {run.ranks} pieces; rank {rank} returned {came}."
    return None


def _judge_shared(run: CollectiveRun) -> str | None:
    for rank, report in enumerate(run.reports):
        first: dict[int, int] = {}
        for place, piece in enumerate(report.returned):
            twin = first.setdefault(id(piece), place)
            if twin != place:
                what = f"Rank {rank} returned one tensor at places {twin} and {place}"
                return f"{what}: what came last has overwritten the rest. Receive into a new one each round."
    return None


def _judge_messages(run: CollectiveRun) -> str | None:
    for message in run.messages:
        if message.stop is None:
            return f"Round {message.round}: {message}, and nobody receives it."
    wrong = messages.first_repeat(run.start, run.messages)
    if wrong is None:
        return None
    if wrong.content is None:
        return f"Round {wrong.round}: rank {wrong.sender} sends a buffer that holds no piece yet."
    return f"Round {wrong.round}: {wrong}, who holds it already. What came last is what the next rank lacks."


def _judge_pieces(run: CollectiveRun) -> str | None:
    for rank, report in enumerate(run.reports):
        for place, piece in enumerate(report.returned):
            content = messages.content_of(piece, run.ranks) if isinstance(piece, Tensor) else None
            if content is None:
                return f"Rank {rank} returned no piece at place {place}: that buffer was never filled."
            if content.piece != place:
                advice = "Pieces stand in the order of ranks, and each needs a tensor of its own."
                return f"Rank {rank} returned piece {content.piece} at place {place}. {advice}"
    return None


def _judge_ring(run: CollectiveRun) -> str | None:
    if run.ranks > 1 and not run.messages:
        return "The pieces are right, but no message was seen. Send them yourself: dist.isend and dist.recv."
    for message in run.messages:
        if (message.receiver - message.sender) % run.ranks != 1:
            to = (message.sender + 1) % run.ranks
            return f"Round {message.round}: {message}. In a ring it sends to rank {to} only."
    return None


def _judge_waits(run: CollectiveRun) -> str | None:
    for rank, report in enumerate(run.reports):
        if any(note.stop is None for note in report.notes):
            return f"Rank {rank} returns without wait() for its isend: the bytes may not have left yet."
    return None


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
