"""Records a walk as steps and sizes, and computes the sizes of other walks with the same steps.

If dp cuts a matrix into slices, then what a rank does follows from the slices' lengths. Each size in its walk
(bytes copied, bytes held, elements sent) is a constant plus a multiple of the first slice's length. So two
walks give a line for each size. If a third walk lies on the same lines, these lines also give the sizes of
further walks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from ..engine.collective import Collective, Kind, Label
from ..evidence.memory import PeakMemory


class Asked(NamedTuple):
    """A step that makes a request. The tape holds the request's sizes: elements sent, and elements received.
    If ``splits``, more sizes follow for each direction: elements exchanged with a rank that has no slice,
    then with the rank of each slice. ``root``: the number of the root's slice.
    """

    kind: Kind
    axes: tuple[str, ...]
    dtype: torch.dtype
    phase: str
    root: int | None
    gives: bool
    splits: bool

    def request(self, sizes: Iterator[int], places: Sequence[int], parts: int) -> Collective:
        """The request at these sizes, with slices at these places, in a group of ``parts`` ranks."""
        given, receive = next(sizes), next(sizes)
        send = torch.empty(given, dtype=self.dtype, device="meta") if self.gives else None
        root = None if self.root is None else places[self.root]
        rows: list[Any] = [None, None]
        if self.splits:
            for way in range(2):
                rows[way] = [next(sizes)] * parts
                for place in places:
                    rows[way][place] = next(sizes)
        about = self.kind, self.axes, self.dtype, send, receive, Label(self.phase), root
        return Collective(*about, *(row and tuple(row) for row in rows))


class Iterated(NamedTuple):
    """A step that runs Newton–Schulz: its seconds, its peak bytes, and the bytes of its result."""

    product: float
    copy: float
    peak: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Tape:
    """The steps of one walk, and the sizes in these steps. ``"copy"`` and ``"hold"`` each have one size, in
    bytes.

    ``first``: the length of the first slice. ``places``: the positions along dp that hold a slice.
    """

    first: int
    places: Sequence[int]
    steps: list[object] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    pauses: bool = False

    def note(self, step: object, *sizes: int) -> None:
        """Note a step, unless the tape pauses."""
        if not self.pauses:
            self.steps.append(step)
            self.sizes += sizes

    def note_turn(self, turn: object) -> None:
        """Note what a walk yields. ``turn`` is None at the walk's end."""
        if not isinstance(turn, Collective):
            self.note(type(turn))
            return
        root, send = None if turn.root is None else self.places.index(turn.root), turn.send
        other = next(place for place in count() if place not in self.places)  # a rank without a slice
        split = [row[place] for row in (turn.sends, turn.receives) if row for place in (other, *self.places)]
        about = turn.kind, turn.axes, turn.dtype, turn.label.phase, root, send is not None, bool(split)
        self.note(Asked(*about), 0 if send is None else send.numel(), turn.receive, *split)


class NotedMemory(PeakMemory):
    """Counts bytes, and notes on a tape how many are allocated or freed."""

    _now = 0

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        super().__init__()

    @property
    def now(self) -> int:
        return self._now

    @now.setter
    def now(self, held: int) -> None:
        if held != self._now:
            self.tape.note("hold", held - self._now)
        self._now = held


@dataclass(slots=True, eq=False)
class Lines:
    """The sizes of all walks that differ only in the first slice's length, if they are linear in that length.

    ``tapes``: the first walks. ``slopes``: each size's slope; None until a third walk lies on the lines.
    """

    tapes: list[Tape] = field(default_factory=list)
    slopes: np.ndarray | None = None

    def add(self, tape: Tape) -> None:
        """Add a walk's tape. With the third tape, check whether all sizes are linear."""
        if any(tape.first == other.first for other in self.tapes):
            return
        self.tapes.append(tape)
        if len(self.tapes) != 3 or any(tape.steps != other.steps for other in self.tapes):
            return
        one, two, three = (np.array(each.sizes, dtype=object) for each in self.tapes)
        to_two, to_three = (each.first - self.tapes[0].first for each in self.tapes[1:])
        slopes = (two - one) // to_two
        if (one + slopes * to_two == two).all() and (one + slopes * to_three == three).all():
            self.slopes = slopes

    def sizes(self, first: int) -> list[int] | None:
        """Return the sizes of a walk whose first slice has this length; None if the rank has to be walked."""
        if self.slopes is None:
            return None
        known = self.tapes[0]
        return (self.slopes * (first - known.first) + known.sizes).tolist()
