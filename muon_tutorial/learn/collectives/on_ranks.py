"""Lesson 03 on real ranks: collectives message by message, their bytes, a link's speed, and deadlocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.collective import Collective, Kind, Label
from ...errors import RankFailedError
from ...evidence.ring_bytes import ring_bytes
from ...launching.launch import launch
from ...plan.grid import Grid
from ..inputs.measure import fastest  # noqa: F401  (the notebook uses it, too)
from ..my_muon.reference import ring_all_gather, ring_reduce_scatter
from . import messages
from .messages import MessageLog, MessageNote, content_of

Algorithm = Callable[[Any, int, int], Any]
Bring = Callable[[int, int], Any]
NUMEL = 1024
ITEM = 4
PATIENCE = 8.0


def ring_all_reduce(
    pieces: list[Tensor], rank: int, ranks: int, reduce_scatter: Callable[..., Any] = ring_reduce_scatter
) -> list[Tensor]:
    """The sum of all ranks' pieces, in order: a reduce_scatter, then an all_gather of its results."""
    return ring_all_gather(reduce_scatter(pieces, rank, ranks), rank, ranks)


@dataclass(frozen=True, slots=True)
class CallReport:
    """One rank's report: what its function returned, its notes, and the error of a wait that timed out.

    ``changed``: whether the function changed what it was given.
    """

    returned: Any
    notes: tuple[MessageNote, ...]
    stuck: str | None
    changed: bool


@dataclass(frozen=True, slots=True)
class CollectiveRun(MessageLog):
    reports: tuple[CallReport, ...]

    def bytes_sent(self, rank: int, first: int = 1, last: int = 10**6) -> int:
        mine = (m for m in self.messages if m.sender == rank and first <= m.round <= last)
        return sum(message.nbytes for message in mine)

    def messages_sent(self, rank: int) -> int:
        return sum(message.sender == rank for message in self.messages)


def my_piece(rank: int, ranks: int) -> Tensor:
    """What a rank brings to an all_gather: one piece."""
    return messages.fill(rank, rank, ranks, NUMEL)


def my_pieces(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What a rank brings to a sum: all pieces, with its own entries."""
    return [messages.fill(piece, rank, ranks, NUMEL, dtype) for piece in range(ranks)]


def run_sum(
    algorithm: Algorithm, ranks: int, backend: str = "gloo", dtype: torch.dtype = torch.float32
) -> CollectiveRun:
    """Run ``algorithm(my pieces, rank, ranks)`` on real ranks, with pieces of ``dtype``."""
    return play_on_ranks(algorithm, partial(my_pieces, dtype=dtype), ranks, backend)


def play_on_ranks(
    algorithm: Algorithm, bring: Bring, ranks: int, backend: str, timeout: float = PATIENCE
) -> CollectiveRun:
    """Run ``algorithm(bring(rank, ranks), rank, ranks)`` on real ranks."""
    reports = launch(play, ranks, args=(algorithm, bring, ranks), backend=backend, timeout=timeout)
    start = []
    for brought in (bring(rank, ranks) for rank in range(ranks)):
        pieces = brought if isinstance(brought, list) else [brought]
        contents = (content_of(piece, ranks) for piece in pieces)
        start.append({content.piece: content.ranks for content in contents if content})
    sent = messages.match_messages([report.notes for report in reports])
    return CollectiveRun(ranks, tuple(start), sent, tuple(reports))


def play(rank: int, algorithm: Algorithm, bring: Bring, ranks: int) -> CallReport:
    """One rank's part, with notes. A wait that times out is reported; any other error is raised."""
    mine, stuck, returned = bring(rank, ranks), None, None
    dist.barrier()
    with messages.noting(ranks) as notes:
        try:
            returned = algorithm(mine, rank, ranks)
        except RuntimeError as error:
            if all(note.stop is not None for note in notes):
                raise
            stuck = str(error).splitlines()[0]
    changed = not all(map(torch.equal, mine, bring(rank, ranks)))
    return CallReport(returned, tuple(notes), stuck, changed)


def say_bytes(total: CollectiveRun, dtype: torch.dtype, formula: Callable[..., Any]) -> str:
    """Rank 0's bytes in an all_reduce and its halves: counted, and by formula(kind, entries, size, ranks)."""
    ranks = total.ranks
    half = total.messages_sent(0) - (ranks - 1)  # the all_gather comes last, in ranks - 1 messages
    entries, size = ranks * NUMEL, dtype.itemsize
    counted: dict[Kind, int] = {
        "reduce_scatter": total.bytes_sent(0, last=half),
        "all_gather": total.bytes_sent(0, first=half + 1),
        "all_reduce": total.bytes_sent(0),
    }
    name = str(dtype).removeprefix("torch.")
    head = f"{f'{name}: {entries:,} entries of {size} bytes':<38}{'counted':>10}{'formula':>10}"
    due = {kind: formula(kind, entries, size, ranks) for kind in counted}
    return "\n".join([head, *(f"  {kind:<36}{counted[kind]:>10,}{due[kind]:>10,.0f}" for kind in counted)])


def ring_formula(collective: Kind, entries: int, itemsize: int, ranks: int) -> int:
    """Bytes that each rank sends on a ring for a whole tensor of ``entries``, as the package counts them."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    whole, piece = (torch.empty(numel, dtype=dtype, device="meta") for numel in (entries, entries // ranks))
    both = {"all_gather": (piece, whole), "reduce_scatter": (whole, piece)}
    send, receive = both.get(collective, (whole, whole))
    request = Collective(collective, ("dp",), dtype, send, receive.numel(), Label("lesson"))
    return ring_bytes(request, Grid.of(dp=ranks).at(0))


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A message's time as ``latency + bytes / bandwidth``, in seconds and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


def fit_wire(sizes: Sequence[int], seconds: Sequence[float]) -> LinkSpeed:
    """The non-negative latency and bandwidth that fit measured messages with the least relative error."""
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    slope, latency = np.polyfit(size, time, 1, w=1 / time)
    if latency <= 0 or slope <= 0:
        latency, slope = time.min(), max(time[-1] - time.min(), 1e-12) / size[-1]
    return LinkSpeed(float(latency), float(1 / slope))


def say_wire(wire: LinkSpeed, sizes: Sequence[int], seconds: Sequence[float]) -> str:
    same = wire.latency * wire.bandwidth
    return (
        f"{f'a message of {sizes[0]} bytes':<29}{seconds[0] * 1e6:10,.0f} µs\n"
        f"{f'a message of {sizes[-1] / 1e6:.1f} MB':<29}{seconds[-1] * 1e6:10,.0f} µs\n"
        f"{'latency':<29}{wire.latency * 1e6:10,.0f} µs\n"
        f"{'bandwidth, fitted to all':<29}{wire.bandwidth / 1e9:10.2f} GB/s\n"
        f"{'bandwidth, largest message':<29}{sizes[-1] / seconds[-1] / 1e9:10.2f} GB/s\n"
        f"{'bytes that take one latency':<29}{same / 1e3:10,.0f} kB\n"
        f"{'64 messages of 1 kB':<29}{64 * wire.seconds(1e3) * 1e6:10,.0f} µs\n"
        f"{'1 message of 64 kB':<29}{wire.seconds(64e3) * 1e6:10,.0f} µs"
    )


First = Literal["send", "receive"]
Setting = tuple[First, ...]
Exchange = Callable[[Any, int, int, Sequence[First]], Any]
SETTINGS: tuple[Setting, ...] = tuple(itertools.product(("send", "receive"), repeat=4))
"""What each rank in a ring of four may do first."""
SHORT, AMPLE = 3.0, 60.0


def run_every_setting(exchange: Exchange, backend: str = "gloo") -> dict[Setting, bool]:
    """For each setting, whether ``exchange(mine, rank, ranks, first)`` ends on real ranks."""
    ended = {}
    for setting in SETTINGS:
        is_alike = len(set(setting)) == 1  # a deadlock, so patience is short
        try:
            run = run_setting(exchange, setting, backend, SHORT if is_alike else AMPLE)
        except RankFailedError:  # a busy machine could not start the ranks in time
            if not is_alike:
                raise
            run = run_setting(exchange, setting, backend, 5 * SHORT)
        ended[setting] = has_arrived(run)
    return ended


def say_stuck(ended: Mapping[Setting, bool]) -> str:
    """The settings in which all ranks waited for ever."""
    return "\n".join(f"all wait: {', '.join(setting)}" for setting, done in ended.items() if not done)


def run_setting(exchange: Exchange, setting: Setting, backend: str, patience: float = SHORT) -> CollectiveRun:
    def algorithm(mine: Tensor, rank: int, ranks: int) -> Any:
        return exchange(mine, rank, ranks, setting)

    return play_on_ranks(algorithm, my_piece, len(setting), backend, patience)


def has_arrived(run: CollectiveRun) -> bool:
    """Whether every rank has the piece of the rank before it."""
    came = (report.returned for report in run.reports)
    found = [content_of(each, run.ranks) if isinstance(each, Tensor) else None for each in came]
    return all(each and each.piece == (rank - 1) % run.ranks for rank, each in enumerate(found))
