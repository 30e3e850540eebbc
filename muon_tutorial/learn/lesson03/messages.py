"""Messages between ranks, written down as they happen, and what they brought to whom.

Inside ``noting``, ``torch.distributed``'s own send and receive write a note of every call. Pieces carry
numbers from which a note reads which piece travels, and whose summands are in it. Knows messages. Refuses to
know how they are drawn, and judges nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Verb = Literal["sent", "received"]
HeldPieces = dict[int, frozenset[int]]
_VERBS: dict[str, Verb] = {"send": "sent", "isend": "sent", "recv": "received", "irecv": "received"}


@dataclass(frozen=True, slots=True)
class PieceContent:
    """What a piece holds: its number, and the ranks whose summands are in it."""

    piece: int
    ranks: frozenset[int]


def fill(piece: int, rank: int, ranks: int, numel: int) -> Tensor:
    """A piece as one rank brings it. Sums of such pieces are exact, and ``content_of`` reads them."""
    return torch.full((numel,), float(2**rank + piece * 2**ranks))


def content_of(tensor: Tensor, ranks: int) -> PieceContent | None:
    """What a tensor holds, or None where it is no piece, nor a sum of one piece's summands.

    >>> content_of(fill(2, rank=0, ranks=4, numel=8) + fill(2, rank=3, ranks=4, numel=8), 4)
    PieceContent(piece=2, ranks=frozenset({0, 3}))
    """
    flat = tensor.detach().reshape(-1)
    value = float(flat[0]) if flat.numel() else float("nan")
    if not (0 < value < 2**24 and value.is_integer() and bool((flat == value).all())):
        return None
    weight, mask = divmod(int(value), 2**ranks)
    members = frozenset(rank for rank in range(ranks) if mask >> rank & 1)
    if not members or weight % len(members) or not 0 <= weight // len(members) < ranks:
        return None
    return PieceContent(weight // len(members), members)


@dataclass(frozen=True, slots=True)
class CallNote:
    """One call, as one rank saw it. Seconds of a clock they share; ``stop`` None: never finished."""

    verb: Verb
    peer: int
    content: PieceContent | None
    nbytes: int
    start: float
    stop: float | None = None


@dataclass(slots=True)
class CallNotes:
    """The notes of one rank, in the order of its calls."""

    ranks: int
    notes: list[CallNote] = field(default_factory=list)

    def call(self, verb: Verb, original: Callable[..., Any], tensor: Tensor, peer: int) -> Any:
        """Make the call and write it down; what returns at once is written down again when waited for."""
        number = len(self.notes)
        content = content_of(tensor, self.ranks) if verb == "sent" else None
        self.notes.append(CallNote(verb, peer, content, tensor.nbytes, time.monotonic()))
        answer = original(tensor, peer)
        if isinstance(answer, dist.Work):
            return NotedWork(self, number, tensor, answer)
        self.finish(number, tensor)
        return answer

    def finish(self, number: int, tensor: Tensor) -> None:
        """Write down that a call has ended, and what has come."""
        note = self.notes[number]
        content = content_of(tensor, self.ranks) if note.verb == "received" else note.content
        self.notes[number] = replace(note, stop=time.monotonic(), content=content)


@dataclass(frozen=True, slots=True)
class NotedWork:
    """What ``isend`` and ``irecv`` return: ``wait()`` notes the end."""

    notebook: CallNotes
    number: int
    tensor: Tensor
    work: dist.Work

    def wait(self) -> Any:
        """Wait for the message."""
        answer = self.work.wait()
        self.notebook.finish(self.number, self.tensor)
        return answer

    def is_completed(self) -> bool:
        """Whether it has gone or come."""
        return self.work.is_completed()


@contextmanager
def noting(ranks: int) -> Iterator[CallNotes]:
    """Write down every send and receive that this process makes inside."""
    notebook = CallNotes(ranks)
    originals = {name: getattr(dist, name) for name in _VERBS}
    try:
        for name, original in originals.items():
            setattr(dist, name, _noted(notebook, _VERBS[name], original))
        yield notebook
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _noted(notebook: CallNotes, verb: Verb, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(
        tensor: Tensor, dst: int | None = None, *, src: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        peer = dst if src is None else src
        if peer is None or group is not None or tag:
            raise ValueError("in this lesson, say only what travels and the rank at the other end")
        if not 0 <= peer < notebook.ranks:
            last = notebook.ranks - 1
            raise ValueError(f"there is no rank {peer}: ranks go from 0 to {last}. Take it % {last + 1}.")
        return notebook.call(verb, original, tensor, peer)

    return call


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``round`` counts what had to arrive at the sender before; seconds from the run's start.

    ``stop`` is None where nobody received it.
    """

    round: int
    sender: int
    receiver: int
    content: PieceContent | None
    nbytes: int
    start: float
    stop: float | None

    def __str__(self) -> str:
        what = "something that is no piece" if self.content is None else f"piece {self.content.piece}"
        return f"rank {self.sender} sends {what} to rank {self.receiver}"


def match_messages(notes: Sequence[Sequence[CallNote]]) -> list[Message]:
    """The messages behind the ranks' notes: the first that one sent is the first that the other received.

    In order of rounds, then of senders.
    """
    arrivals: dict[tuple[int, int], list[CallNote]] = {}
    for rank, mine in enumerate(notes):
        for note in mine:
            if note.verb == "received" and note.stop is not None:
                arrivals.setdefault((note.peer, rank), []).append(note)
    origin = min((note.start for mine in notes for note in mine), default=0.0)
    found = [message for rank, mine in enumerate(notes) for message in _sent_by(rank, mine, arrivals, origin)]
    return sorted(found, key=lambda message: (message.round, message.sender))


def _sent_by(
    rank: int, mine: Sequence[CallNote], arrivals: dict[tuple[int, int], list[CallNote]], origin: float
) -> Iterator[Message]:
    came, sent = 0, dict.fromkeys((note.peer for note in mine), 0)
    for note in mine:
        if note.verb == "received":
            came += 1
            continue
        there = arrivals.get((rank, note.peer), [])
        end = there[sent[note.peer]].stop if sent[note.peer] < len(there) else None
        sent[note.peer] += 1
        stop = None if end is None else end - origin
        yield Message(came + 1, rank, note.peer, note.content, note.nbytes, note.start - origin, stop)


def holdings_after(start: Sequence[HeldPieces], messages: Iterable[Message], last: int) -> list[HeldPieces]:
    """What each rank holds of each piece after round ``last``: what it began with, and what came."""
    held = [dict(mine) for mine in start]
    for message in messages:
        if message.round <= last and message.stop is not None and message.content is not None:
            mine, content = held[message.receiver], message.content
            mine[content.piece] = mine.get(content.piece, frozenset()) | content.ranks
    return held


def first_repeat(start: Sequence[HeldPieces], messages: Sequence[Message]) -> Message | None:
    """The first message that brings its receiver nothing that it did not hold."""
    for message in messages:
        held = holdings_after(start, messages, message.round - 1)
        if message.content is None:
            return message
        if message.content.ranks <= held[message.receiver].get(message.content.piece, frozenset()):
            return message
    return None
