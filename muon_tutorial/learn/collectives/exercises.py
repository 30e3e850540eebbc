"""Exercises of lesson 03: count messages and bytes, write both halves of an all_reduce, and the quiz."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from ...engine.collective import Kind
from ..exercises.judge import Diagnosis, Exercise, Par, first, guesses, numbers, written
from ..exercises.on_real_ranks import judge_on_ranks, say_failure
from . import messages, on_ranks
from .messages import MessageNote
from .on_ranks import ITEM, NUMEL, PATIENCE, CollectiveRun, my_piece, my_pieces, play_on_ranks, ring_formula
from .pictures import GATHER, HALF, draw_ladder

Found = str | Diagnosis
Judge = Callable[[CollectiveRun], Iterator[Found]]

ORDER_HINT = "isend first, then recv, then wait() for the isend."
GATHER_HINTS = (
    "In the first round, send your own piece. After that, send the piece that has just arrived.",
    "In round `step` (from 0) rank r sends piece (r - step) % ranks and receives (r - step - 1) % ranks.",
)
SUM_HINTS = (
    "Follow one piece backwards: piece 0 ends at rank 0, so it sets out from rank 1 and visits every rank.",
    "In round `step` (from 0) rank r receives piece (r - step - 2) % ranks, and adds its own to it.",
)


def guess_bytes(ranks: int) -> Exercise:
    """The prediction: how many messages and bytes one rank sends in an all_reduce."""
    count, piece = 2 * (ranks - 1), NUMEL * ITEM
    home = "That would bring every piece home again; each half ends one round before that."
    one_half = "That is one half. There are two."
    in_entries = f"That counts entries, and each takes {ITEM} bytes."
    all_of_it = "That would be the whole tensor in every message, not one piece."
    each = f"A message carries one piece: {NUMEL:,} entries of {ITEM} bytes."
    wrong_sizes = (count * NUMEL, in_entries), (count * ranks * piece, all_of_it)
    return guesses(
        ("messages", count, "Count both halves.", (ranks - 1, one_half), (ranks, home), (2 * ranks, home)),
        ("bytes_sent", count * piece, each, *wrong_sizes),
        hints=(
            "In each half, a rank sends one piece a round. Count the rounds of a half in the picture.",
            "Count the messages of both halves. How many entries does each hold, and how large is an entry?",
        ),
        praise="In each half, a rank passes on every piece but one.",
    )


def counted(run: CollectiveRun) -> dict[str, int]:
    """What rank 0 sent in a run, by the names of the prediction."""
    return {"messages": run.messages_sent(0), "bytes_sent": run.bytes_sent(0)}


def guess_stuck() -> Exercise:
    """The prediction: each rank sends or receives first; in how many settings does a rank wait for ever?"""
    rest = "As soon as one sends to a neighbour that receives, the rest can follow."
    other = "In one, all ranks send first. What else can all do at the same time?"
    praise = "They stand still only if all do the same. A rank that differs sets the others free, one by one."
    return guesses(("stuck", 2, rest, (1, other)), praise=praise)


def check_ring(ranks: int, backend: str = "gloo", timeout: float = PATIENCE) -> Exercise:
    """The exercise: a ring all_gather on real ranks. Each rank passes on the piece that it received last."""
    play = partial(play_on_ranks, bring=my_piece, ranks=ranks, backend=backend, timeout=timeout)
    praise = "Every rank holds every piece, in order, and has sent all of them except one."
    hints = (*GATHER_HINTS, ORDER_HINT)
    judges = (_judge_stuck, _judge_returned, _judge_messages, _judge_pieces, _judge_ring)
    judge = partial(_with_ladder, judges, GATHER_HINTS, GATHER, "collectives-yours")
    return Exercise(judge_on_ranks(play, judge, say_failure), hints, praise, keeps=("ring_all_gather",))


def _with_ladder(
    judges: Sequence[Judge], hints: tuple[str, ...], heading: tuple[str, str], name: str, run: CollectiveRun
) -> Diagnosis:
    """The first mistake, if any, with the run's ladder. A mistake without hints of its own gets ``hints``."""
    found = first(chain.from_iterable(judge(run) for judge in judges))
    given = found if isinstance(found, Diagnosis) else Diagnosis(found or "")
    return Diagnosis(given.what, given.hints or hints, draw_ladder(run, heading, name))


def check_reduce_scatter(ranks: int, backend: str = "gloo", timeout: float = PATIENCE) -> Exercise:
    """The hard exercise: a reduce_scatter on real ranks; par counts the bytes of an all_reduce with it."""
    play = partial(play_on_ranks, bring=my_pieces, ranks=ranks, backend=backend, timeout=timeout)

    def bytes_of_all_reduce(reduce_scatter: Callable[..., Any]) -> int:
        both = partial(on_ranks.ring_all_reduce, reduce_scatter=reduce_scatter)
        return max(on_ranks.run_sum(both, ranks, backend).bytes_sent(rank) for rank in range(ranks))

    least = ring_formula("all_reduce", ranks * NUMEL, ITEM, ranks)
    par = Par("bytes in its all_reduce", least, bytes_of_all_reduce)
    done = "The hardest part of this lesson is done, so this is a good place to stop."
    praise = f"Every rank has its piece of the sum. {done}"
    hints = (*SUM_HINTS, ORDER_HINT)
    judges = (_judge_stuck, _judge_own_sum, _judge_received, _judge_waits)
    judge = partial(_with_ladder, judges, SUM_HINTS, HALF, "collectives-your-sum")
    return Exercise(judge_on_ranks(play, judge), hints, praise, par, ("ring_reduce_scatter",))


def _judge_own_sum(run: CollectiveRun) -> Iterator[Found]:
    for rank, report in enumerate(run.reports):
        mine = report.returned
        if not isinstance(mine, Tensor) or mine.shape != (NUMEL,):
            shape = f"a tensor of shape {tuple(mine.shape)}" if isinstance(mine, Tensor) else ""
            came = shape or type(mine).__name__
            yield f"Return one piece, a tensor of {NUMEL} entries; rank {rank} returned {came}."
        content = messages.content_of(mine, run.ranks)
        if content is None:
            mixed = "pieces are mixed, or some rank's entries are in it twice."
            yield f"What rank {rank} returned is not a sum of one piece: {mixed}"
        elif content.piece != rank:
            yield f"Rank {rank} returned piece {content.piece} of the sum. Its own is piece {rank}."
        elif run.reports[rank].changed:
            yield f"Rank {rank} has changed the pieces that it was given. Add into a new tensor."
        elif lacking := [str(other) for other in range(run.ranks) if other not in content.ranks]:
            what = f"the entries of rank {', '.join(lacking)} are not in the sum."
            yield f"Rank {rank} has its own piece, but {what}"


def _judge_received(run: CollectiveRun, right: str = "sums") -> Iterator[Found]:
    if run.ranks > 1 and not run.messages:
        yield f"The {right} are right, but no message was seen. Send them yourself: dist.isend and dist.recv."
    for message in run.messages:
        if message.stop is None:
            yield f"Round {message.round}: {message}, and no rank receives it."


def _judge_stuck(run: CollectiveRun) -> Iterator[Found]:
    if any(report.stuck for report in run.reports):
        yield Diagnosis(next(_say_stuck(run)), (ORDER_HINT,))


def _say_stuck(run: CollectiveRun) -> Iterator[str]:
    dropped = [sum(note.verb == "sent" and note.stop is None for note in r.notes) for r in run.reports]
    if max(dropped) > 1:
        many = f"Rank {dropped.index(max(dropped))} has not waited for {max(dropped)} of its isends."
        yield f"{many} If a handle is dropped before its wait(), its message may never arrive."
    last = {rank: report.notes[-1] for rank, report in enumerate(run.reports) if report.notes}
    if len(last) == run.ranks and all(note.verb == "sent" and note.stop is None for note in last.values()):
        yield "The ranks wait for each other: all are in send(), and none receives. isend() does not wait."
    if len(last) == run.ranks and all(note.verb == "received" for note in last.values()):
        yield f"The ranks wait for each other: {_say_waiting(last)}."
    stuck = next(rank for rank, report in enumerate(run.reports) if report.stuck)
    yield f"Rank {stuck} timed out: {_say_waiting({stuck: last[stuck]})}."


def _say_waiting(last: Mapping[int, MessageNote]) -> str:
    verbs = {"sent": "to send to", "received": "to receive from"}
    return ", ".join(f"rank {rank} waits {verbs[note.verb]} rank {note.peer}" for rank, note in last.items())


def _judge_returned(run: CollectiveRun) -> Iterator[Found]:
    for rank, report in enumerate(run.reports):
        pieces = report.returned
        if not isinstance(pieces, (list, tuple)) or len(pieces) != run.ranks:
            came = f"a list of {len(pieces)}" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
            yield f"Return a list of {run.ranks} pieces; rank {rank} returned {came}."
    for rank, report in enumerate(run.reports):
        seen: dict[int, int] = {}
        for place, piece in enumerate(report.returned):
            if (twin := seen.setdefault(id(piece), place)) != place:
                what = f"Rank {rank} returned the same tensor at places {twin} and {place}"
                yield f"{what}: what came last has overwritten the rest. Receive into a new one each round."


def _judge_messages(run: CollectiveRun) -> Iterator[Found]:
    for message in run.messages:
        if message.stop is None:
            yield f"Round {message.round}: {message}, and no rank receives it."
    if wrong := messages.first_repeat(run.start, run.messages):
        if wrong.content is None:
            yield f"Round {wrong.round}: rank {wrong.sender} sends a buffer that holds no piece yet."
        held = "which holds it already. The next rank lacks the piece that came last."
        yield f"Round {wrong.round}: {wrong}, {held}"


def _judge_pieces(run: CollectiveRun) -> Iterator[Found]:
    for rank, report in enumerate(run.reports):
        for place, piece in enumerate(report.returned):
            content = messages.content_of(piece, run.ranks) if isinstance(piece, Tensor) else None
            if content is None:
                yield f"Rank {rank} returned no piece at place {place}: that buffer was never filled."
            elif content.piece != place:
                advice = "Pieces are in the order of ranks, and each needs its own tensor."
                yield f"Rank {rank} returned piece {content.piece} at place {place}. {advice}"


def _judge_ring(run: CollectiveRun) -> Iterator[Found]:
    yield from _judge_received(run, "pieces")
    for message in run.messages:
        if (message.receiver - message.sender) % run.ranks != 1:
            to = (message.sender + 1) % run.ranks
            yield f"Round {message.round}: {message}. In a ring it sends to rank {to} only."
    yield from _judge_waits(run)


def _judge_waits(run: CollectiveRun) -> Iterator[Found]:
    for rank, report in enumerate(run.reports):
        if any(note.stop is None for note in report.notes):
            yield f"Rank {rank} returns without wait() for its isend: the bytes may not have left yet."


_CASES: tuple[tuple[Kind, int, int, int], ...] = (
    ("all_gather", 4096, 4, 4),
    ("reduce_scatter", 4096, 2, 4),
    ("all_reduce", 4096, 4, 4),
    ("all_reduce", 1_000_000, 2, 8),
    ("all_gather", 3_000_000, 4, 3),
    ("all_reduce", 1 << 30, 2, 1 << 14),
)


def check_formula() -> Exercise:
    slips = (
        ("Those are entries. Each takes itemsize bytes.", lambda *given: ring_formula(*given) / given[2]),
        ("That is one half of an all_reduce.", lambda kind, *given: ring_formula("all_gather", *given)),
        ("In each half, one piece need not travel.", lambda *at: ring_formula(*at) * at[3] / (at[3] - 1)),
        ("A message carries one piece, not the whole tensor.", lambda *at: ring_formula(*at) * at[3]),
    )
    hints = (
        "The tensor is cut into as many pieces as there are ranks. In one half, how many does a rank send?",
        "One half: (ranks - 1) / ranks of the tensor's bytes. An all_reduce is both halves.",
    )
    say = "{} of {:,} entries of {} bytes, {:,} ranks"
    praise = "These few lines hold for every ring in this course."
    return written(ring_formula, _CASES, *slips, say=say, hints=hints, praise=praise)


def ring_seconds(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """The exercise's reference: seconds of a ring's all_reduce of ``size`` bytes."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def check_seconds() -> Exercise:
    cases = [(1e6, 2, 1e-4, 1e9), (1e6, 64, 1e-4, 1e9), (4096.0, 8, 5e-6, 2e9)]
    slips = (
        ("That is one half of an all_reduce.", lambda *given: ring_seconds(*given) / 2),
        ("A message carries one piece: size / ranks.", lambda s, p, at, bw: 2 * (p - 1) * (at + s / bw)),
        ("Each message costs latency.", lambda s, p, at, bw: at + 2 * (p - 1) * s / p / bw),
        ("A half takes ranks − 1 messages.", lambda s, p, at, bw: 2 * p * (at + s / p / bw)),
        ("That is a single message.", lambda s, p, at, bw: at + s / bw),
    )
    hints = ("How many messages does a rank send, one after the other? How many bytes has each?",)
    say = "{:,.0f} bytes, {} ranks, latency {:g} s, {:g} bytes a second"
    return written(ring_seconds, cases, *slips, say=say, hints=hints, praise="More ranks, more latency.")


def quiz(ranks: int) -> Exercise:
    halves = "In each of the two halves a rank sends seven eighths of the entries, at 2 bytes each."
    return numbers(
        ("messages", 2 * (ranks - 1), "In each half a rank sends every piece but one."),
        ("share", 0.5, "An all_gather is one of the two halves of an all_reduce."),
        ("bytes", ring_formula("all_reduce", 1_000_000, 2, 8), halves),
    )
