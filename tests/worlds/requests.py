"""Every kind of collective as small programs for any world: a rank's request, and the correct answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from muon_tutorial.engine.collective import IDLE, Collective, Kind, Label, Start, Wait, Walk

PARTS = 3
ROOT = 1
KINDS: tuple[Kind, ...] = get_args(Kind)  # ``all_to_all`` is the last
SPLITS = {
    "even": ((2, 2, 2), (2, 2, 2), (2, 2, 2)),
    "uneven, some empty": ((0, 3, 1), (2, 0, 0), (0, 5, 0)),
    "all empty": ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
}
"""For ``all_to_all``: the number of elements that each position sends to each position."""
STARTS = {
    "the same to all": (((0, 3, 3), (2, 0, 2), (4, 4, 4)), ((0, 0, 0), (0, 0, 0), (0, 0, 0))),
    "the same to two": (((2, 2, 2), (2, 2, 2), (2, 2, 2)), ((0, 0, 2), (0, 2, 2), (2, 0, 2))),
}
"""Pairs: splits as in ``SPLITS``, and the offsets of each position's parts in its sent buffer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a function of the position: the kind, the elements of a piece, and the dtype.

    ``splits``: the number of elements that each position sends to each position; ``starts``: their offsets.
    """

    kind: Kind
    size: int
    dtype: torch.dtype = torch.float32
    splits: tuple[tuple[int, ...], ...] = SPLITS["even"]
    starts: tuple[tuple[int, ...], ...] | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.size} {self.dtype}, splits {self.splits} from {self.starts}"

    def begin(self, position: int, to: int) -> int:
        """The offset of the part for ``to`` in the buffer of ``position``."""
        return sum(self.splits[position][:to]) if self.starts is None else self.starts[position][to]

    def request(self, position: int) -> Collective:
        """The request of the rank at ``position``, one of three along dp."""
        at_root, parts, size = position == ROOT, PARTS, self.size
        sends, receives = self.splits[position], tuple(row[position] for row in self.splits)
        sent, receive = {
            "all_gather": (size, parts * size),
            "reduce_scatter": (parts * size, size),
            "all_reduce": (size, size),
            "broadcast": (size if at_root else None, size),
            "gather": (size, parts * size if at_root else 0),
            "scatter": (parts * size if at_root else None, size),
            "reduce": (size, size if at_root else 0),
            "all_to_all": (max(self.begin(position, to) + sends[to] for to in range(PARTS)), sum(receives)),
        }[self.kind]
        rooted, split = self.kind in ("broadcast", "gather", "scatter", "reduce"), self.kind == "all_to_all"
        return Collective(
            kind=self.kind,
            axes=("dp",),
            dtype=self.dtype,
            send=None if sent is None else numbers(position, sent, self.dtype),
            receive=receive,
            label=Label("test", self.kind),
            root=ROOT if rooted else None,
            sends=sends if split else None,
            receives=receives if split else None,
            starts=None if self.starts is None else self.starts[position],
        )

    def answer(self, position: int) -> Tensor:
        """The correct answer for the rank at ``position``, computed without any world."""
        asked = [self.request(other) for other in range(PARTS)]
        sent = [request.send for request in asked if request.send is not None]
        if self.kind == "all_to_all":
            begins = [self.begin(other, position) for other in range(PARTS)]
            rows = zip(sent, begins, self.splits, strict=True)
            return torch.cat([whole[begin : begin + splits[position]] for whole, begin, splits in rows])
        if self.kind in ("all_gather", "gather"):
            return torch.cat(sent)[: asked[position].receive]
        if self.kind in ("all_reduce", "reduce_scatter"):
            total = torch.stack(sent).sum(0)
            return total if self.kind == "all_reduce" else total.view(PARTS, -1)[position]
        if self.kind == "reduce":
            return torch.stack(sent).sum(0)[: asked[position].receive]
        return sent[0] if self.kind == "broadcast" else sent[0].view(PARTS, -1)[position]


def numbers(position: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different at each position, whose sums are exact in every dtype."""
    return ((torch.arange(count) * 7 + position * 3) % 16).to(dtype)


def asks(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> list[Ask]:
    """All eight kinds in each dtype; pieces have four elements, one or none."""
    made = [Ask(kind, size, dtype) for dtype in dtypes for kind in KINDS[:-1] for size in (4, 1, 0)]
    split = [(splits, None) for splits in SPLITS.values()] + list(STARTS.values())
    return made + [Ask("all_to_all", 0, dtype, *one) for dtype in dtypes for one in split]


def one(turn: Any) -> Walk:
    """Yield one turn, and return its answer."""
    return (yield turn)


def one_by_one(position: int, asked: list[Ask]) -> Walk:
    answers = []
    for ask in asked:
        answers.append((yield ask.request(position)))
    return answers


def all_at_once(position: int, asked: list[Ask]) -> Walk:
    """Start all requests, with an empty turn in between, and wait in the opposite order."""
    tickets = []
    for ask in asked:
        tickets.append((yield Start(ask.request(position))))
        idle = yield Start(IDLE)
        assert (yield Wait(idle)) is None
    answers = []
    for ticket in reversed(tickets):
        answers.append((yield Wait(ticket)))
    return answers[::-1]


PROGRAMS: dict[str, Callable[[int, list[Ask]], Walk]] = {"blocking": one_by_one, "async": all_at_once}
