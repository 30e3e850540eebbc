"""All ranks in one process, with real data and one collective at a time.

Each rank runs until it waits. A group's request is answered when all its members have made the same request.
If members make different requests, or no group's request can be answered, the error names each rank's
request. Sums are taken in rank order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Collective, Idle, Start, Turn, Wait, Walk
from ..errors import DeadlockError, GridError, MismatchError, RequestError, UsageError
from ..plan.grid import Coordinate, Grid
from .compare_plans import check_lines


@dataclass(slots=True, eq=False)
class _Ticket:
    request: Collective
    done: bool = False
    answer: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One collective that a local world answered: each rank's request."""

    requests: Mapping[int, Collective]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.requests)

    @property
    def request(self) -> Collective:
        """The request of the group's first rank."""
        return self.requests[self.ranks[0]]

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}: {self.request}"


@dataclass(slots=True, eq=False)
class _Rank:
    walk: Walk
    waiting: _Ticket | None = None
    ended: bool = False
    value: Any = None
    answer: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class LocalMesh:
    """One rank of a local world, which an optimizer takes instead of a ``DeviceMesh``."""

    world: LocalWorld
    at: Coordinate

    @property
    def grid(self) -> Grid:
        return self.at.grid

    def compare(self, lines: Sequence[str]) -> None:
        """Compare this rank's n-th plan, as lines of text, with the n-th plans of ranks that called before.

        Raises:
            PlanMismatchError: the plans differ; the message shows where.
        """
        mine = self.world.plans.setdefault(self.at.rank, [])
        mine.append(tuple(lines))
        turn = len(mine) - 1
        check_lines({rank: plans[turn] for rank, plans in self.world.plans.items() if len(plans) > turn})

    def held_by_ranks(self, what: Hashable, value: int) -> dict[int, int]:
        """Record this rank's value of ``what`` for its current plan; return all ranks' values so far."""
        turn = len(self.world.plans.get(self.at.rank, ()))
        said = self.world.held.setdefault((turn, what), {})
        said[self.at.rank] = value
        return said

    def run(self, walk: Walk) -> Any:
        """Run a generator if this is the only rank. Several ranks must use ``LocalWorld.run`` together."""
        if self.grid.world_size > 1:
            raise GridError(
                f"{self.at} cannot step alone in a local world of {self.grid.world_size} ranks; "
                "hand the programs of all ranks to LocalWorld.run"
            )
        return self.world.run([walk])[0]


@dataclass(slots=True, eq=False)
class LocalWorld:
    """A grid of ranks in this process.

    ``start`` takes one generator per rank, ``advance`` answers one collective, and ``run`` runs all
    generators to their end. ``ready`` lists the groups that could be answered next, and ``pick`` chooses
    one of them, by default the first. ``observers`` are called with each request when it is issued.

    >>> from muon_tutorial.engine.collective import Collective, Label
    >>> def program(rank):
    ...     mine = torch.full((2,), float(rank))
    ...     return (yield Collective("all_reduce", ("dp",), mine.dtype, mine, 2, Label("sum")))
    >>> world = LocalWorld(Grid.of(dp=3))
    >>> [value.tolist() for value in world.run([program(rank) for rank in range(3)])]
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """

    grid: Grid
    pick: Callable[[int], int] = lambda ready: 0
    observers: list[Callable[[Collective, Coordinate], None]] = field(default_factory=list)
    plans: dict[int, list[tuple[str, ...]]] = field(default_factory=dict)
    held: dict[Hashable, dict[int, int]] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _queues: dict[tuple[int, ...], dict[int, list[_Ticket]]] = field(default_factory=dict)

    def mesh(self, rank: int) -> LocalMesh:
        return LocalMesh(self, self.grid.at(rank))

    def run(self, walks: Sequence[Walk]) -> list[Any]:
        """Run all ranks' generators to their end, and return their values in rank order.

        Raises:
            MismatchError: members of a group asked for different collectives.
            DeadlockError: no group can proceed.
        """
        self.start(walks)
        while self.advance():
            pass
        return [self._ranks[rank].value for rank in self.grid.ranks]

    def start(self, walks: Sequence[Walk]) -> None:
        """Give each rank its generator, in rank order. Nothing runs yet."""
        if len(walks) != self.grid.world_size:
            raise GridError(
                f"a grid of {self.grid} needs {self.grid.world_size} programs, one per rank; got {len(walks)}"
            )
        self._ranks = {rank: _Rank(walk) for rank, walk in enumerate(walks)}
        self._queues = defaultdict(lambda: defaultdict(list))

    def ready(self) -> list[tuple[int, ...]]:
        """Run each rank until it waits. Return the groups in which all members have made a request."""
        for number, rank in self._ranks.items():
            self._proceed(number, rank)
        return [group for group, queues in self._queues.items() if all(queues[rank] for rank in group)]

    def advance(self, group: tuple[int, ...] | None = None) -> Event | None:
        """Answer one collective of ``group``, or of the group that ``pick`` chooses.

        Returns None when every rank has ended.

        Raises:
            UsageError: the group is not ready.
        """
        ready = self.ready()
        if group is not None and group not in ready:
            raise UsageError(f"the group of ranks {group} is not ready; ready are {ready}")
        if ready:
            return self._answer(ready[self.pick(len(ready))] if group is None else group)
        if all(rank.ended for rank in self._ranks.values()) and not self._unanswered():
            return None
        raise DeadlockError(
            "no group can proceed:\n" + "\n".join(self._describe(number) for number in self._ranks)
        )

    def _unanswered(self) -> dict[int, Collective]:
        """For each rank, return its first request that other members of its group have not made."""
        queues = [(rank, queue) for group in self._queues.values() for rank, queue in group.items() if queue]
        return {rank: queue[0].request for rank, queue in reversed(queues)}

    @property
    def pending(self) -> dict[int, Collective]:
        """The request of each waiting rank; ``send`` is the tensor that the rank is about to send."""
        return {
            number: rank.waiting.request
            for number, rank in self._ranks.items()
            if rank.waiting and not rank.waiting.done
        }

    def _proceed(self, number: int, rank: _Rank) -> None:
        while not rank.ended and (rank.waiting is None or rank.waiting.done):
            if rank.waiting is not None:
                rank.answer, rank.waiting = rank.waiting.answer, None
            try:
                turn = rank.walk.send(rank.answer)
            except StopIteration as stop:
                rank.ended, rank.value = True, stop.value
            else:
                rank.answer = self._take_turn(number, rank, turn)

    def _take_turn(self, number: int, rank: _Rank, turn: Turn) -> Any:
        if isinstance(turn, Wait):
            rank.waiting = turn.ticket if isinstance(turn.ticket, _Ticket) else None
            return None
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Idle):
            return request if isinstance(turn, Start) else None
        if not isinstance(request, Collective):
            raise RequestError(f"{self.grid.at(number)} asked for {request!r}, which no local world answers")
        ticket, at = _Ticket(request), self.grid.at(number)
        for observer in self.observers:
            observer(request, at)
        self._queues[at.group(*request.axes)][number].append(ticket)
        if isinstance(turn, Start):
            return ticket
        rank.waiting = ticket
        return None

    def _answer(self, group: tuple[int, ...]) -> Event:
        tickets = {rank: self._queues[group][rank].pop(0) for rank in group}
        requests = {rank: ticket.request for rank, ticket in tickets.items()}
        check_alike(requests)
        for ticket, answer in zip(tickets.values(), _answers(list(requests.values())), strict=True):
            ticket.answer, ticket.done = answer, True
        return Event(requests)

    def _describe(self, number: int) -> str:
        rank, left = self._ranks[number], self._unanswered()
        doing = f"waits for {rank.waiting.request}" if rank.waiting else "has not started"
        if rank.ended:
            doing = f"has ended without {left[number]}" if number in left else "has ended"
        return f"  {self.grid.at(number)} {doing}"


def check_alike(requests: Mapping[int, Collective]) -> None:
    """Raise ``MismatchError``, with each rank's request, if members of a group made different requests."""
    asked = [(r.kind, r.axes, r.dtype, r.root, r.label) for r in requests.values()]
    differ = "differently" if len(set(asked)) > 1 else "for sizes that do not fit together"
    if len(set(asked)) == 1 and asked[0][0] == "all_gather":
        differ += f" (all must send equally many elements, 1/{len(requests)} of what each receives)"
    if len(set(asked)) > 1 or not _sizes_agree(list(requests.values())):
        lines = "\n".join(f"  rank {rank} asks {request}" for rank, request in requests.items())
        raise MismatchError(f"members of one group asked {differ}:\n{lines}")


def _sizes_agree(requests: list[Collective]) -> bool:
    """Whether the numbers of elements that ranks send and receive fit the collective and each other."""
    first, parts = requests[0], len(requests)
    sent = [None if request.send is None else request.send.numel() for request in requests]
    received = [request.receive for request in requests]
    if first.kind == "all_to_all":
        sends = [request.sends or () for request in requests]
        receives = [request.receives or () for request in requests]
        return (
            all(len(split) == parts for split in (*sends, *receives))
            and receives == [*zip(*sends, strict=True)]
            and sent == [request.packed for request in requests]
            and received == [sum(row) for row in receives]
        )
    most = max(received)
    each, piece, whole = [most] * parts, most // parts, most // parts * parts
    at_root = [position == first.root for position in range(parts)]
    return (sent, received) == {
        "all_gather": ([piece] * parts, [whole] * parts),
        "gather": ([piece] * parts, [whole if root else 0 for root in at_root]),
        "all_reduce": (each, each),
        "reduce_scatter": ([most * parts] * parts, each),
        "reduce": (each, [most if root else 0 for root in at_root]),
        "broadcast": ([most if root else None for root in at_root], each),
        "scatter": ([most * parts if root else None for root in at_root], each),
    }[first.kind]


def _answers(requests: list[Collective]) -> list[Tensor]:
    """Return the answer to each member of a group, in order of position."""
    first, parts = requests[0], len(requests)
    sent = [request.send for request in requests if request.send is not None]
    match first.kind:
        case "all_gather" | "gather":
            whole = torch.cat(sent)
            kept = [first.root in (None, position) for position in range(parts)]
            return [whole.clone() if keeps else whole.new_empty(0) for keeps in kept]
        case "all_reduce" | "reduce_scatter" | "reduce":
            total = sent[0].clone()
            for other in sent[1:]:
                total += other
            if first.kind == "reduce_scatter":
                return list(total.chunk(parts))
            if first.kind == "reduce":
                return [total if position == first.root else total.new_empty(0) for position in range(parts)]
            return [total.clone() for _ in requests]
        case "broadcast":
            return [sent[0].clone() for _ in requests]
        case "scatter":
            return [piece.clone() for piece in sent[0].view(parts, -1)]
        case "all_to_all":
            rows = [(send, request.parcels) for send, request in zip(sent, requests, strict=True)]
            return [torch.cat([send[row[position]] for send, row in rows]) for position in range(parts)]
