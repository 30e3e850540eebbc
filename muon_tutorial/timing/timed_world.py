"""Walks all ranks at once without data; clocks show when each rank computes, waits and is answered.

This is a fourth world, besides the live, the local and the shadow world. A timed world walks the same
generators, and charges their computation and requests with a machine's costs. If there are fewer cores than
ranks, ranks share the cores. If the machine's link is a bus, all ranks share it. So waiting and overlap
follow from the order of requests; nothing here knows a strategy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.collective import Call, Collective, Idle, Kind, Label, Start, Turn, Wait, Walk
from ..errors import DeadlockError, RequestError
from ..evidence.gloo_bytes import GlooTraffic, gloo_sent
from ..evidence.ring_bytes import ring_bytes, ring_traffic
from ..plan.grid import Coordinate, Grid
from ..worlds.local import check_alike
from .compute_seconds import Work
from .machine import Algorithm, Link, Machine

Doing = Literal["product", "copy", "wait", "transfer"]
"""What a rank does; a transfer runs on the link while the rank does something else."""
GLOO_THREADS = 2
"""How many collectives of one group Gloo runs at once: the number of threads that torch gives each group."""
IN_ROUNDS = ("all_reduce", "reduce_scatter", "all_gather", "reduce")
"""The collectives that Gloo runs as a ring, round by round."""
_INSTANT = 1e-12


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank did from ``begin`` to ``end``, in seconds since the start of all ranks.

    ``label`` names the request that the rank waits for, or the rank's last request if it does not wait.
    """

    rank: int
    doing: Doing
    begin: float
    end: float
    label: str


@dataclass(slots=True, eq=False)
class TimedFlight:
    """A collective in flight: when its members issued it, when it began, and when it was answered.

    At ``done`` a rank's part is finished, and the rank can continue; at ``end`` all parts are finished. For
    each member, ``asked``: its request in words; ``traffic``: its bytes and messages; ``payload``: the bytes
    that it hands over; ``ring``: the bytes that it would send on a ring; ``answered``: when it had the
    answer; ``parts``: how many of its parts are unfinished. ``requests``: the members' requests until the
    flight begins. ``link``: the link that members use. ``latency``: the seconds that do not depend on
    bandwidth.
    """

    group: tuple[int, ...]
    kind: Kind
    label: Label
    link: Link
    issued: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    answered: dict[int, float] = field(default_factory=dict)
    payload: dict[int, int] = field(default_factory=dict)
    ring: dict[int, int] = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    requests: dict[int, Collective] = field(default_factory=dict, repr=False)
    parts: Counter[int] = field(default_factory=Counter, repr=False)
    latency: float = 0.0
    begin: float = 0.0
    end: float | None = None


@dataclass(frozen=True, slots=True)
class TimedRun:
    """What ranks did and when. ``seconds`` is when the last rank ends."""

    seconds: float
    ends: tuple[float, ...]
    spans: tuple[Span, ...]
    flights: tuple[TimedFlight, ...]

    def total(self, doing: Doing, rank: int) -> float:
        return sum(span.end - span.begin for span in self.spans if (span.rank, span.doing) == (rank, doing))


@dataclass(slots=True, eq=False)
class _Job:
    """Work that still needs ``left`` of a shared resource: seconds of a core, or bytes of a link.

    Jobs of a core with the same ``once`` proceed together, and count as one. Jobs with the same ``thread``
    share the part of the core that one job would get. ``then``: the job that follows this one.
    """

    left: float
    node: int = 0
    link: Any = None
    bandwidth: float = 0.0
    once: Any = None
    thread: Any = None
    then: _Job | None = None


@dataclass(slots=True, eq=False)
class _Ticket:
    flight: TimedFlight
    answer: Tensor | None


@dataclass(slots=True, eq=False)
class _Rank:
    """``until``: the job that the rank does, or the ticket that it waits for. ``ahead`` yields the next."""

    at: Coordinate
    ahead: Iterator[_Job | _Ticket] = field(init=False)
    until: _Job | _Ticket | None = None
    doing: Doing = "copy"
    since: float = 0.0
    label: str = "start"
    ended: float | None = None


@dataclass(eq=False)
class _Moving:
    """A flight, or a part of it on some ``ranks``. Its unfinished ``jobs`` begin at the time ``after``.

    Flights with the same ``line`` run one after the other.
    """

    flight: TimedFlight
    ranks: tuple[int, ...]
    jobs: list[_Job]
    after: float
    line: Any = None


@dataclass(eq=False)
class TimedWorld:
    """A grid of ranks with clocks. ``run`` walks one generator per rank, with tensors on the meta device.

    >>> from muon_tutorial.engine.collective import Label
    >>> link = Link(bandwidth=1e9, latency=0.0)
    >>> rates = {"float32": ((1, 1e9),), "bfloat16": ((1, 1e9),)}
    >>> machine = Machine("toy", rates, ((1, 1e9),), operation=0.0, turn=0.0, inside=link)
    >>> def program(rank):
    ...     mine = torch.zeros(10**6, device="meta")
    ...     yield Collective("all_reduce", ("dp",), mine.dtype, mine, 10**6, Label("sum"))
    >>> run = TimedWorld(Grid.of(dp=2), machine).run([program(0), program(1)])
    >>> round(1000 * (run.flights[0].end - run.flights[0].begin), 3)  # 4 MB at 1 GB/s
    4.0
    """

    grid: Grid
    machine: Machine
    now: float = 0.0
    ranks: list[_Rank] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[TimedFlight] = field(default_factory=list)
    queues: dict[tuple[int, ...], list[TimedFlight]] = field(default_factory=lambda: defaultdict(list))
    moving: list[_Moving] = field(default_factory=list)
    behind: dict[Any, list[_Moving]] = field(default_factory=dict)
    saved: dict[Link, float] = field(init=False)

    def __post_init__(self) -> None:
        links = [link for link in (self.machine.inside, self.machine.between) if link is not None]
        self.saved = {link: 0.0 for link in links if link.shared}  # no credit: the previous step used it up

    def run(self, walks: Sequence[Walk]) -> TimedRun:
        """Walk all ranks to their end. A world runs only once.

        Raises:
            MismatchError: members of a group requested different collectives.
            DeadlockError: no rank can go on.
            RequestError: a walk requested something whose time cannot be predicted.
        """
        self.ranks = [_Rank(self.grid.at(rank)) for rank in self.grid.ranks]
        with torch.no_grad(), Work(self.machine) as work:
            for rank, walk in zip(self.ranks, walks, strict=True):
                rank.ahead = self._walk(rank, walk, work)
                self._go_on(rank)
            while not all(rank.ended is not None for rank in self.ranks):
                self._pass_time()
                self._settle()
        waiting = [each for flights in self.queues.values() for one in flights for each in one.asked.items()]
        lines = [f"  rank {rank} requested {it}, but others of its group did not" for rank, it in waiting]
        if lines:
            raise DeadlockError("ranks have ended, and:\n" + "\n".join(lines))
        ends = tuple(rank.ended or 0.0 for rank in self.ranks)
        return TimedRun(max(ends), ends, tuple(self.spans), tuple(self.flights))

    # Time.

    def _pass_time(self) -> None:
        """Let all jobs proceed until the first one is done."""
        jobs = [rank.until for rank in self.ranks if isinstance(rank.until, _Job)]
        sending = [moving for moving in self.moving if moving.after <= self.now + _INSTANT]
        jobs += [job for moving in sending for job in moving.jobs]
        rates = self._rates(jobs)
        ends = [job.left / rate for job, rate in zip(jobs, rates, strict=True)]
        ends += [moving.after - self.now for moving in self.moving if moving not in sending]
        ends += [0.0 for moving in sending if not moving.jobs]
        if not ends:
            waits = [f"waits in {one.label}" if one.ended is None else "has ended" for one in self.ranks]
            lines = [f"  {one.at} {said}" for one, said in zip(self.ranks, waits, strict=True)]
            raise DeadlockError("\n".join(["no rank can go on:", *lines]))
        passed = max(0.0, min(ends))
        for job, rate in zip(jobs, rates, strict=True):
            job.left = max(0.0, job.left - passed * rate)
        self.now += passed
        carrying = {job.link for job in jobs}
        for bus, saved in self.saved.items():
            if ("bus", bus) not in carrying:
                self.saved[bus] = min(bus.burst, saved + passed * bus.bandwidth)

    def _rates(self, jobs: Sequence[_Job]) -> list[float]:
        """Each job's rate: its part of the cores (at most one core), or its part of its link."""
        cores: dict[int, int] = defaultdict(int)
        links: dict[Any, int] = defaultdict(int)
        threads: dict[Any, int] = defaultdict(int)
        counted: set[Any] = set()
        for job in jobs:
            if job.link is not None:
                links[job.link] += 1
            elif job.thread is not None:
                cores[job.node] += not threads[job.thread]
                threads[job.thread] += 1
            else:
                cores[job.node] += job.once not in counted
                counted |= set() if job.once is None else {job.once}

        def rate(job: _Job) -> float:
            if job.link is not None:
                return job.bandwidth / links[job.link]
            share = 1.0 if self.machine.cores is None else min(1.0, self.machine.cores / cores[job.node])
            return share / threads.get(job.thread, 1)

        return [rate(job) for job in jobs]

    def _settle(self) -> None:
        """Finish the flights that are done by now, and wake the ranks that waited for them or for a job."""
        for moving in list(self.moving):
            if moving.after <= self.now + _INSTANT:
                after = [job if job.left > _least(job) else job.then for job in moving.jobs]
                moving.jobs = [job for job in after if job is not None]
                if not moving.jobs:
                    self.moving.remove(moving)
                    self._finish(moving)
        for rank in self.ranks:
            if self._is_done(rank):
                if self.now > rank.since:
                    self.spans.append(Span(rank.at.rank, rank.doing, rank.since, self.now, rank.label))
                rank.since = self.now
                self._go_on(rank)

    # Ranks.

    def _is_done(self, rank: _Rank) -> bool:
        """Whether a rank's job is done, or its ticket is answered."""
        if isinstance(rank.until, _Job):
            return rank.until.left <= _least(rank.until)
        return rank.until is not None and rank.at.rank in rank.until.flight.done

    def _go_on(self, rank: _Rank) -> None:
        """Let a rank proceed until it computes, waits or ends."""
        rank.until = next(rank.ahead, None)
        if rank.until is None:
            rank.ended = self.now

    def _walk(self, rank: _Rank, walk: Walk, work: Work) -> Iterator[_Job | _Ticket]:
        """Yield the jobs of a rank and the tickets that it waits for, in order."""
        answer: Any = None
        while True:
            work.take()
            try:
                turn = walk.send(answer)
            except StopIteration:
                turn = None  # the walk has ended, but its last turn may have computed
            product, copy = work.take()
            jobs: list[tuple[Doing, float]] = [
                ("product", product),
                ("copy", copy + self._cost_of_turn(turn)),
            ]
            for doing, seconds in jobs:
                if seconds > _INSTANT:
                    rank.doing = doing
                    yield _Job(seconds, self.machine.node(rank.at.rank))
            if turn is None:
                return
            answer = self._take(rank, turn)
            if isinstance(answer, _Ticket) and not isinstance(turn, Start):
                if rank.at.rank not in answer.flight.done:
                    rank.doing = "wait"
                    yield answer
                answer.flight.answered[rank.at.rank] = self.now
                answer = answer.answer

    def _cost_of_turn(self, turn: Turn | None) -> float:
        request = turn.request if isinstance(turn, Start) else turn
        if not isinstance(request, Collective):
            return 0.0
        copied = 0
        if request.send is not None and request.kind in ("all_reduce", "broadcast", "reduce"):  # in place
            copied = 2 * request.send.numel() * request.dtype.itemsize
        return self.machine.turn + self.machine.copy_seconds(copied)

    def _take(self, rank: _Rank, turn: Turn) -> _Ticket | Idle | None:
        """Issue what a rank requests. Returns the ticket to wait for or, for an empty turn, the answer."""
        request = turn.request if isinstance(turn, Start) else turn
        if isinstance(request, Wait):
            if not isinstance(request.ticket, _Ticket):
                return None
            rank.label = str(request.ticket.flight.label)
            return request.ticket
        if isinstance(request, Collective):
            rank.label = str(request.label)
            return self._issue(rank, request)
        if isinstance(request, Call):
            raise RequestError(f"{rank.at} makes a call (Call) whose time cannot be predicted")
        if not isinstance(request, Idle):
            raise RequestError(f"{rank.at} requested {request!r}, whose time cannot be predicted")
        return request if isinstance(turn, Start) else None

    # Flights.

    def _issue(self, rank: _Rank, request: Collective) -> _Ticket:
        number, group = rank.at.rank, rank.at.group(*request.axes)
        flight = next((one for one in self.queues[group] if number not in one.issued), None)
        if flight is None:
            link = self.machine.link(group, request.kind)
            flight = TimedFlight(group, request.kind, request.label, link)
            self.queues[group].append(flight)
            self.flights.append(flight)
        flight.issued[number], flight.asked[number] = self.now, str(request)
        flight.payload[number] = 0 if request.send is None else request.send.numel() * request.dtype.itemsize
        flight.ring[number] = ring_bytes(request, rank.at)
        flight.traffic[number] = traffic_of(request, rank.at, self.machine.algorithm)
        flight.requests[number] = request
        if self._in_messages(flight):
            self._exchange(flight, number)
        else:
            self._begin_next(group)
        return _Ticket(flight, torch.empty(request.receive, dtype=request.dtype, device="meta"))

    def _begin_next(self, group: tuple[int, ...]) -> None:
        """Begin a group's next flight. Flights begin in order. Only Gloo's rings may run together."""
        queue = [one for one in self.queues[group] if not self._in_messages(one)]
        going = [moving.flight for moving in self.moving if moving.flight.group == group]
        moving = sum(1 for one in going if not self._in_messages(one))
        if not queue or len(queue[0].issued) < len(group):
            return
        flight = queue[0]
        # Gloo's rings share a link, round by round; a flight without rounds waits for the earlier ones.
        in_rounds = self.machine.algorithm == "gloo" and flight.kind in IN_ROUNDS
        if moving >= (GLOO_THREADS if in_rounds else 1):
            return
        self._begin(flight)
        jobs = [job for rank in flight.traffic for job in self._jobs(rank, flight)]
        flight.parts = Counter(flight.issued.keys())
        self.moving.append(_Moving(flight, tuple(flight.issued), jobs, self.now + flight.latency))

    def _begin(self, flight: TimedFlight) -> None:
        """Begin a flight that all members have requested, and check that their requests match."""
        self.queues[flight.group].remove(flight)
        check_alike({rank: flight.requests[rank] for rank in flight.group})
        flight.requests.clear()  # frees the requests' tensors as early as a backend would
        rounds = max(traffic.busy.messages_out for traffic in flight.traffic.values())
        if self.machine.algorithm != "gloo":  # if a ring would have many rounds, NCCL uses trees
            rounds = min(rounds, 2 * max(1, (len(flight.group) - 1).bit_length()))
        flight.begin, flight.latency = self.now, flight.link.latency * rounds

    def _finish(self, moving: _Moving) -> None:
        """Finish a part. A rank's flight is done when all its parts are done, and the whole flight when all
        its ranks are done."""
        flight = moving.flight
        flight.parts.subtract(moving.ranks)
        flight.done |= {rank: self.now for rank in moving.ranks if not flight.parts[rank]}
        if moving.line is not None:
            following = self.behind[moving.line]
            following.remove(moving)
            self.moving += following[:1]
        if len(flight.done) == len(flight.group):
            flight.end = self.now
            self._begin_next(flight.group)

    # Exchanges on Gloo: messages between two ranks, sent as soon as both have made their requests.

    def _in_messages(self, flight: TimedFlight) -> bool:
        return flight.kind == "all_to_all" and self.machine.algorithm == "gloo"

    def _exchange(self, flight: TimedFlight, rank: int) -> None:
        """Send the messages that waited only for this rank's request."""
        group, requests = flight.group, flight.requests
        if any(len(row or group) != len(group) for row in (requests[rank].sends, requests[rank].receives)):
            check_alike(requests)
        mine, here = requests[rank], group.index(rank)
        gives, gets = mine.sends or (0,) * len(group), mine.receives or (0,) * len(group)
        messages = [n for row in (gives, gets) for place, n in enumerate(row) if n and place != here]
        flight.parts[rank] += 1 + len(messages)
        for place, other in enumerate(group):
            if other != rank and other in flight.issued:
                for elements, pair in ((gives[place], (rank, other)), (gets[place], (other, rank))):
                    if elements:
                        self._send(flight, pair, elements * mine.dtype.itemsize)
        for other in flight.issued:
            splits = requests[other].sends or (), requests[other].receives or ()
            partners = {group[place] for row in splits for place, elements in enumerate(row) if elements}
            if rank in (other, *partners) and flight.issued.keys() >= partners:
                # All partners of ``other`` have asked, so ``other`` begins its work on the messages. _send
                # charges the work on their bytes.
                count = flight.traffic[other].busy.messages_out
                waking = _Job(count * self.machine.message, self.machine.node(other), once=other)
                after = self.now + count * flight.link.latency
                self.moving.append(_Moving(flight, (other,), [waking], after))
        if len(flight.issued) == len(group):
            self._begin(flight)

    def _send(self, flight: TimedFlight, pair: tuple[int, int], data: int) -> None:
        """Send a message. Each of the two ranks does half of the work on the bytes. The message waits for
        earlier messages between the same ranks or, on a bus, for all earlier messages."""
        link, ends = flight.link, [(rank, self.machine.node(rank)) for rank in pair]
        jobs = [_Job(data * self.machine.byte / 2, node, thread=rank) for rank, node in ends]
        travelling = GlooTraffic(data, 1, 0).tcp
        if link.shared:
            left = travelling - self._take_saved(link, travelling)
            jobs.append(_Job(left, ends[0][1], ("bus", link), link.bandwidth))
        else:
            jobs += [
                _Job(travelling, node, _way(link, way, rank), link.bandwidth)
                for way, (rank, node) in zip(("out", "in"), ends, strict=True)
            ]
        line = link if link.shared else pair
        moving = _Moving(flight, pair, jobs, self.now, line)
        before = self.behind.setdefault(line, [])
        before.append(moving)
        if len(before) == 1:
            self.moving.append(moving)

    def _jobs(self, rank: int, flight: TimedFlight) -> list[_Job]:
        """The jobs of a rank's part in a flight. The rank's core first handles messages, and can do so for
        several flights at once. Then it works on each byte. Meanwhile the link carries the bytes.
        """
        node, link, traffic = self.machine.node(rank), flight.link, flight.traffic[rank]
        data = traffic.busy.data * self.machine.byte
        copying = _Job(data, node) if data else None
        waking = traffic.busy.messages_out * self.machine.message
        first = _Job(waking, node, once=rank, then=copying) if waking else copying
        jobs = [] if first is None else [first]
        if travelling := travels(traffic, link, self.machine.algorithm):
            on = ("bus", link) if link.shared else _way(link, "out", rank)
            at_once = self._take_saved(link, travelling) if link.shared else 0.0
            jobs.append(_Job(travelling - at_once, node, on, link.bandwidth))
        return jobs

    def _take_saved(self, bus: Link, travelling: float) -> float:
        """Spend credit that a bus collected while idle; return how many bytes take no time on this credit."""
        taken = min(self.saved[bus], travelling)
        self.saved[bus] -= taken
        return taken


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's bytes and messages in a collective, with a machine's algorithm.

    ``sent``: what the rank sends, which a shared bus carries. ``busy``: the larger of what the rank sends and
    what it receives, which occupies its processor and its own duplex link. ``moved``: bytes sent plus bytes
    received; in a ring's rounds, a rank receives as much as it sends.
    """

    sent: GlooTraffic
    busy: GlooTraffic
    moved: GlooTraffic


def travels(traffic: Traffic, link: Link, algorithm: Algorithm) -> int:
    """Bytes that a rank puts on its link: the data and, with Gloo, headers and notices."""
    own = traffic.busy if link.duplex else traffic.moved
    on_link = traffic.sent if link.shared else own
    return on_link.tcp if algorithm == "gloo" else on_link.data


def traffic_of(request: Collective, at: Coordinate, algorithm: Algorithm, is_alone: bool = False) -> Traffic:
    """A rank's traffic for a request.

    In Gloo's broadcast the root sends its messages one by one. A rank that is walked alone (``is_alone``)
    counts as busy with all of these messages.
    """
    given, received = ring_traffic(request, at)
    if algorithm == "gloo":
        sent = gloo_sent(request, at)
    else:
        rounds = (at.size(*request.axes) - 1) * (2 if request.kind == "all_reduce" else 1)
        sent = GlooTraffic(given, rounds, rounds)
    messages = max(sent.messages_out, sent.messages_in)
    data = max(sent.data, received)
    if is_alone and algorithm == "gloo" and request.kind == "broadcast":
        messages = (at.size(*request.axes) - 1).bit_length()
        data = messages * request.receive * request.dtype.itemsize
    both = sent.data + max(received, sent.data if request.kind in IN_ROUNDS else 0)
    return Traffic(
        sent,
        GlooTraffic(data, messages, sent.messages_in),
        GlooTraffic(both, sent.messages_out, sent.messages_in),
    )


def _way(link: Link, way: str, rank: int) -> tuple[Any, ...]:
    """A key for what a transfer occupies: one direction of a rank's duplex link, or a whole link."""
    return way if link.duplex else "both", rank, link


def _least(job: _Job) -> float:
    """A job counts as done if at most this much of it is left, because rounding may leave a remainder."""
    return _INSTANT if job.link is None else 1e-3
