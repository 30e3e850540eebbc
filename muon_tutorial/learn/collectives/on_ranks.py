"""Lesson 03 on real ranks: a collective played message by message, and the bytes that a rank sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.collective import Collective, Kind, Label
from ...evidence.ring_bytes import ring_bytes
from ...launching.launch import launch
from ...plan.grid import Grid
from ..exercises.on_real_ranks import run_or_reference
from . import messages
from .messages import CallNote, HeldPieces, Message
from .ring import ring_all_gather

Algorithm = Callable[[Any, int, int], Any]
Bring = Callable[[int, int], Any]
NUMEL = 1024
ITEM = 4
PATIENCE = 8.0


@dataclass(frozen=True, slots=True)
class CallReport:
    """What one rank sends back: what its function returned, its notes, and whom it waited for in vain."""

    returned: Any
    notes: tuple[CallNote, ...]
    stuck: str | None


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """One collective, as all ranks played it."""

    ranks: int
    start: tuple[HeldPieces, ...]
    reports: tuple[CallReport, ...]

    @property
    def is_open(self) -> bool:
        """Whether the function was a stub still."""
        return all(report.returned is ... for report in self.reports)

    @property
    def messages(self) -> list[Message]:
        """All messages, in order."""
        return messages.match_messages([report.notes for report in self.reports])

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return max((message.round for message in self.messages), default=0)

    @property
    def sums(self) -> bool:
        """Whether pieces are summed: then every rank begins with all of them."""
        return self.ranks > 1 and all(len(held) == self.ranks for held in self.start)

    def bytes_sent(self, rank: int, first: int = 1, last: int = 10**6) -> int:
        """Bytes that a rank sent in some of the rounds."""
        mine = (m for m in self.messages if m.sender == rank and first <= m.round <= last)
        return sum(message.nbytes for message in mine)

    def messages_sent(self, rank: int) -> int:
        """How many messages a rank sent."""
        return sum(message.sender == rank for message in self.messages)


def my_piece(rank: int, ranks: int) -> Tensor:
    """What a rank brings to an all_gather: one piece."""
    return messages.fill(rank, rank, ranks, NUMEL)


def my_pieces(rank: int, ranks: int) -> list[Tensor]:
    """What a rank brings to a sum: all pieces, with numbers of its own."""
    return [messages.fill(piece, rank, ranks, NUMEL) for piece in range(ranks)]


def run_gather(
    algorithm: Algorithm, ranks: int, backend: str = "gloo", timeout: float = PATIENCE
) -> CollectiveRun:
    """Play ``algorithm(my piece, rank, ranks)`` on real ranks; the reference, where it is still a stub."""
    play_it = partial(play_on_ranks, bring=my_piece, ranks=ranks, backend=backend, timeout=timeout)
    return run_or_reference(play_it, algorithm, ring_all_gather)


def run_sum(algorithm: Algorithm, ranks: int, backend: str = "gloo") -> CollectiveRun:
    """Play ``algorithm(my pieces, rank, ranks)`` on real ranks."""
    return play_on_ranks(algorithm, my_pieces, ranks, backend)


def play_on_ranks(
    algorithm: Algorithm, bring: Bring, ranks: int, backend: str, timeout: float = PATIENCE
) -> CollectiveRun:
    """Play ``algorithm(what bring gives a rank, rank, ranks)`` on real ranks."""
    reports = launch(play, ranks, args=(algorithm, bring, ranks), backend=backend, timeout=timeout)
    return CollectiveRun(
        ranks, tuple(_held(bring(rank, ranks), ranks) for rank in range(ranks)), tuple(reports)
    )


def _held(brought: Tensor | list[Tensor], ranks: int) -> HeldPieces:
    pieces = brought if isinstance(brought, list) else [brought]
    contents = (messages.content_of(piece, ranks) for piece in pieces)
    return {content.piece: content.ranks for content in contents if content}


def play(rank: int, algorithm: Algorithm, bring: Bring, ranks: int) -> CallReport:
    """One rank's part, noted. A wait in vain is reported; any other error is the caller's."""
    mine, stuck, returned = bring(rank, ranks), None, None
    dist.barrier()
    with messages.noting(ranks) as notes:
        try:
            returned = algorithm(mine, rank, ranks)
        except RuntimeError as error:
            if all(note.stop is not None for note in notes):
                raise
            stuck = str(error).splitlines()[0]
    return CallReport(returned, tuple(notes), stuck)


def say_bytes(gather: CollectiveRun, total: CollectiveRun, rank: int = 0) -> str:
    """What one rank sent, counted, beside what the ring's formula says, and the halves of the all_reduce."""
    ranks, half = total.ranks, total.ranks - 1
    rows: list[tuple[str, int, Kind]] = [
        ("all_gather", gather.bytes_sent(rank), "all_gather"),
        ("all_reduce", total.bytes_sent(rank), "all_reduce"),
        ("  its reduce_scatter", total.bytes_sent(rank, last=half), "reduce_scatter"),
        ("  its all_gather", total.bytes_sent(rank, first=half + 1), "all_gather"),
    ]
    lines = [f"{name:<22}{counted:>12,}{ring_formula(kind, ranks):>12,}" for name, counted, kind in rows]
    return "\n".join([f"{f'bytes rank {rank} sends':<22}{'counted':>12}{'formula':>12}", *lines])


def ring_formula(kind: Kind, ranks: int) -> int:
    """Bytes the ring model says each rank sends for a whole tensor of ``ranks`` pieces."""
    whole, piece = torch.empty(ranks * NUMEL), torch.empty(NUMEL)
    send, receive = {"all_gather": (piece, whole), "reduce_scatter": (whole, piece)}.get(kind, (whole, whole))
    request = Collective(kind, ("dp",), whole.dtype, send, receive.numel(), Label("lesson"))
    return ring_bytes(request, Grid.of(dp=ranks).at(0))
