"""Messages between ranks, recorded as they are sent, and what each rank holds after them.

The numbers in a piece encode which piece it is and which ranks' summands are in it.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..exercises.on_real_ranks import watching

Verb = Literal["sent", "received"]
HeldPieces = dict[int, frozenset[int]]
_VERBS: dict[str, Verb] = {"send": "sent", "isend": "sent", "recv": "received", "irecv": "received"}


@dataclass(frozen=True, slots=True)
class PieceContent:
    """What a piece holds: its number, and the ranks whose summands are in it."""

    piece: int
    ranks: frozenset[int]


def fill(piece: int, rank: int, ranks: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's summand of a piece. Sums of these are exact in float32, so ``content_of`` can decode them."""
    return torch.full((numel,), float(2**rank + piece * 2**ranks), dtype=dtype)


def content_of(tensor: Tensor, ranks: int) -> PieceContent | None:
    """What a tensor holds: a piece, or a sum of one piece's summands; None if it is something else."""
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
class MessageNote:
    """One call, as one rank saw it. Times are seconds of a shared clock; a hanging call has no ``stop``."""

    verb: Verb
    peer: int
    content: PieceContent | None
    nbytes: int
    start: float
    stop: float | None = None


@contextmanager
def noting(ranks: int) -> Iterator[list[MessageNote]]:
    """In the block, record every send and receive that this process makes, in the order of its calls."""
    notes: list[MessageNote] = []

    def note(original: Callable[..., Any], tensor: Tensor, *peers: Any, **named: Any) -> Any:
        verb = _VERBS[original.__name__]
        peers += tuple(named.pop(name, None) for name in ("dst", "src", "group_dst", "group_src"))
        peer = next((rank for rank in peers if rank is not None), None)
        if peer is None or any(named.values()):
            raise ValueError("in this lesson, pass only the tensor and the other rank (no group or tag)")
        if not 0 <= peer < ranks:
            raise ValueError(f"there is no rank {peer}: ranks go from 0 to {ranks - 1}. Take it % {ranks}.")
        number, content = len(notes), content_of(tensor, ranks) if verb == "sent" else None
        notes.append(MessageNote(verb, peer, content, tensor.nbytes, time.monotonic()))

        def finish(answer: Any) -> Any:
            came = content if verb == "sent" else content_of(tensor, ranks)
            notes[number] = replace(notes[number], stop=time.monotonic(), content=came)
            return answer

        answer = original(tensor, peer)
        if not isinstance(answer, dist.Work):
            return finish(answer)
        return SimpleNamespace(wait=lambda: finish(answer.wait()), is_completed=answer.is_completed)

    with watching(note, *_VERBS):
        yield notes


@dataclass(frozen=True, slots=True)
class Message:
    """A message sent after its sender received ``round`` - 1 others; ``stop`` is None if it never arrived."""

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


@dataclass(frozen=True, slots=True)
class MessageLog:
    """What every rank held at the start, and all messages that followed, in order."""

    ranks: int
    start: tuple[HeldPieces, ...]
    messages: list[Message]

    @property
    def rounds(self) -> int:
        return max((message.round for message in self.messages), default=0)

    @property
    def sums(self) -> bool:
        """Whether the pieces are summed, which is so if every rank begins with all of them."""
        return self.ranks > 1 and all(len(held) == self.ranks for held in self.start)


def of_ring_all_reduce(ranks: int, nbytes: int) -> list[Message]:
    """The messages of a ring all_reduce, computed without processes. A round takes a second."""
    found = []
    for step, sender in itertools.product(range(2 * (ranks - 1)), range(ranks)):
        piece = (sender - step - 1) % ranks
        summed = min(step + 1, ranks)
        content = PieceContent(piece, frozenset((sender - back) % ranks for back in range(summed)))
        receiver, begun = (sender + 1) % ranks, float(step)
        found.append(Message(step + 1, sender, receiver, content, nbytes, begun, begun + 1))
    return found


def match_messages(notes: Sequence[Sequence[MessageNote]]) -> list[Message]:
    """The messages that the notes of all ranks describe: a pair's sends and receives are matched in order."""
    arrivals: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    for rank, mine in enumerate(notes):
        for note in mine:
            if note.verb == "received" and note.stop is not None:
                arrivals[note.peer, rank].append(note.stop)
    origin = min((note.start for mine in notes for note in mine), default=0.0)
    found = []
    for rank, mine in enumerate(notes):
        number = 1
        for note in mine:
            if note.verb == "received":
                number += 1
                continue
            there, start = arrivals[rank, note.peer], note.start - origin
            stop = there.popleft() - origin if there else None
            found.append(Message(number, rank, note.peer, note.content, note.nbytes, start, stop))
    return sorted(found, key=lambda message: (message.round, message.sender))


def holdings_after(start: Sequence[HeldPieces], messages: Iterable[Message], last: int) -> list[HeldPieces]:
    """What each rank holds of each piece after round ``last``, including the pieces that it began with."""
    held = [dict(mine) for mine in start]
    for message in messages:
        if message.round <= last and message.stop is not None and message.content is not None:
            mine, content = held[message.receiver], message.content
            mine[content.piece] = mine.get(content.piece, frozenset()) | content.ranks
    return held


def first_repeat(start: Sequence[HeldPieces], messages: Sequence[Message]) -> Message | None:
    """The first message that brings its receiver nothing new."""
    for message in messages:
        held = holdings_after(start, messages, message.round - 1)
        content = message.content
        if content is None or content.ranks <= held[message.receiver].get(content.piece, frozenset()):
            return message
    return None
