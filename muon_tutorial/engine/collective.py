"""The requests that a generator may make of a world. Requests are plain records; nothing here moves data."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import RequestError

Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "gather", "scatter", "reduce", "all_to_all"
]


@dataclass(frozen=True, slots=True)
class Label:
    """The phase of the step that a request belongs to, and the matrix or bucket that it serves."""

    phase: str
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.phase} of {self.subject}" if self.subject else self.phase


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """A request that all ranks of the group over ``axes`` make. Each rank gets a flat tensor as the answer.

    ``send`` is flat, or None if the rank sends nothing. ``receive`` is the number of elements in the answer,
    which may be 0. ``root`` is a position along the axis. After a ``reduce``, do not use ``send`` again,
    because a backend may overwrite it.

    For ``all_to_all``, ``sends`` and ``receives`` list the number of elements that go to and come from each
    position. ``starts`` lists where each position's elements begin in ``send``; several positions may get the
    same elements. Without ``starts``, the positions' elements lie one after the other.

    Raises:
        RequestError: ``send`` is not flat, or not of ``dtype`` (a backend would cast it silently, or abort),
            or ``axes`` is not a tuple of names.
    """

    kind: Kind
    axes: tuple[str, ...]
    dtype: torch.dtype
    send: Tensor | None  # [elements], or None
    receive: int
    label: Label
    root: int | None = None
    sends: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple):
            raise RequestError(f"axes are a tuple of names, such as ('dp',); got {self.axes!r}")
        if self.send is not None and (self.send.ndim != 1 or self.send.dtype != self.dtype):
            raise RequestError(
                f"{self}: send must be flat and {self.dtype}; "
                f"got shape {tuple(self.send.shape)} and {self.send.dtype}"
            )

    @property
    def parcels(self) -> list[slice]:
        """The part of ``send`` that each position gets (only for ``all_to_all``)."""
        assert self.sends is not None
        starts = (0, *accumulate(self.sends[:-1])) if self.starts is None else self.starts
        return [slice(start, start + n) for start, n in zip(starts, self.sends, strict=True)]

    @property
    def packed(self) -> int:
        """How many elements ``send`` must have, so that every position's part lies in it."""
        return max((parcel.stop for parcel in self.parcels), default=0)

    def __str__(self) -> str:
        sent = self.sends or (0 if self.send is None else self.send.numel())
        sizes = f"{sent} → {self.receives or self.receive} {str(self.dtype).removeprefix('torch.')}"
        root = "" if self.root is None else f", root {self.root}"
        return f"{self.kind} over {'×'.join(self.axes)}{root} ({sizes}), {self.label}"


@dataclass(frozen=True, slots=True)
class Idle:
    """A request for nothing. A rank that takes no part in a collective makes this request, so that it takes
    as many turns as other ranks; see ``order``."""


@dataclass(frozen=True, slots=True)
class Abreast(Idle):
    """A request for nothing: the walk pauses until this rank's other walks of the round have got here, too.
    It waits for no other rank. See ``order.abreast``."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request to call a user's own function, which only real processes can answer.

    The answer is the function's return value or, if that is a handle, what the handle's ``wait()`` returns.
    """

    fn: Callable[[], Any]
    label: Label


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A request for a collective without waiting. The answer is a ticket."""

    request: Collective | Call | Idle


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """A request to wait for the ticket of a ``Start``. The answer is the collective's answer."""

    ticket: Any


Turn = Collective | Call | Idle | Start | Wait
Walk = Generator[Turn, Any, Any]

IDLE = Idle()
ABREAST = Abreast()
