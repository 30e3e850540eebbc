"""Finds which ranks of a grid do the same work in a bucket, and what each kind of rank computes and sends.

Two positions of a bucket's group are of one kind if they work on matrices of the same shapes, hold the same
part of each, and send pieces to owners in the same relative positions. One rank of each kind is walked on the
meta device. The turns of this rank are stored, and used again for later buckets of the same form.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import compress, groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..engine.collective import Abreast, Collective, Kind, Label, Walk
from ..engine.hop_collectives import at_once
from ..evidence.gloo_bytes import GlooTraffic
from ..evidence.memory import PeakMemory
from ..evidence.predict import SETTINGS, held_parameters, step_over_ones, with_gradient
from ..newton_schulz import zeropower_via_newtonschulz
from ..orthogonalizers.workspace import Workspace
from ..plan.bucket import Bucket
from ..plan.exchange import LocalShards, SlicedBuffer
from ..plan.grid import Coordinate, Grid
from ..plan.layout import FEW_RANKS, Hop, Owned, Shard
from ..plan.matrix import BucketEntry
from ..plan.strategies import Plan
from ..step.parameter_state import ParameterState
from ..step.rank_bucket import AROUND, RankBucket, RankMatrix
from ..step.step import PlanStep, step_bucket
from .compute_seconds import Work
from .machine import Link, Machine
from .timed_world import traffic_of, travels
from .walks_by_length import Asked, Iterated, Lines, NotedMemory, Tape

META = torch.device("meta")


@dataclass(frozen=True, slots=True, eq=False)
class PricedRequest:
    """The costs of a collective for one rank; requests of the same sizes share a record.

    ``busy``: bytes and messages that keep the processor busy for ``sending`` seconds. ``copy``: seconds
    before the request, for call and copies. ``moving``: seconds that the rank's bytes spend on the link;
    ``latency``: seconds that do not depend on the link's bandwidth. The root of a broadcast first copies what
    it sends, in ``root_copy`` seconds. ``sent``: bytes that the rank sends; ``between``: bytes that leave the
    node. In the chain of a broadcast or reduce, each rank except the last sends ``passed`` bytes.
    """

    kind: Kind
    axes: tuple[str, ...]
    label: Label
    link: Link
    busy: GlooTraffic
    copy: float
    moving: float
    sending: float
    latency: float
    root_copy: float
    sent: int
    passed: int
    between: int

    def sends(self, place: int, parts: int, root: int) -> int:
        """Bytes that the rank sends if it is at ``place`` in its group and the root is at ``root``."""
        last = (place + 1) % parts == root if self.kind == "broadcast" else place == root
        return 0 if last else self.passed


@dataclass(frozen=True, slots=True)
class WalkedTurn:
    """A rank's work until its next request, and the request. ``asked`` is None in an empty or last turn.

    ``product`` and ``copy`` are seconds of computing. ``now``: bytes that the walk holds at the request;
    ``peak``: the largest number of bytes that the walk held since the previous request. ``root``: the
    position of the request's root. If ``meets`` is True, the rank waits here until its walks of the round's
    other buckets have reached the same point.
    """

    product: float
    copy: float
    now: int
    peak: int
    asked: PricedRequest | None = None
    root: int | None = None
    meets: bool = False


Trace = tuple[WalkedTurn, ...]
"""A walk, turn by turn; the last turn is its end."""


@dataclass(frozen=True, slots=True, eq=False)
class WalkedBucket:
    """A bucket: the trace of each kind of rank, and the kind at each position of its group that
    ``WalkedPlan`` keeps.

    A trace may come from another bucket. ``traced`` has the other bucket's roots, and ``roots`` has this
    bucket's roots in the same order. Roots are positions along dp.
    """

    traces: tuple[Trace, ...]
    kinds: np.ndarray
    traced: Sequence[int] = ()
    roots: Sequence[int] = ()

    def root(self, traced: int) -> int:
        """The root in this bucket that corresponds to the root ``traced`` of a trace."""
        return self.roots[self.traced.index(traced)] if traced in self.traced else traced


Round: TypeAlias = Sequence[WalkedBucket]
"""Buckets that are walked side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class WalkedPlan:
    """All rounds of a plan, walked on one position of each kind.

    Along each of the ``axes``, positions with the same work in all rounds are of one kind. ``folded``: for
    each position along an axis, the number of the walked position that represents it. ``axes`` has
    the bucket's axes in reverse, because NumPy is fastest if the longest axis is last.
    """

    rounds: Sequence[Round]
    axes: tuple[str, ...]
    folded: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of positions that are kept along each axis."""
        return tuple(int(places.max()) + 1 for places in self.folded)

    def at(self, position: int) -> tuple[int, ...]:
        """The index, along each axis, of the kept position that stands for a group's position."""
        at = np.unravel_index(position, tuple(map(len, self.folded)))
        return tuple(int(places[place]) for places, place in zip(self.folded, at, strict=True))

    def line(self, axes: tuple[str, ...], position: int) -> tuple[int | slice, ...]:
        """An index that selects the rank at ``position`` in every group over ``axes``."""
        within = [self.axes.index(axis) for axis in axes if axis in self.axes]
        at = np.unravel_index(position, [len(self.folded[i]) for i in within])
        index: list[int | slice] = [slice(None)] * len(self.axes)
        for i, place in zip(within, at, strict=True):
            index[i] = int(self.folded[i][place])
        return tuple(index)


class Seat(NamedTuple):
    """A rank's ``place`` among the ``parts`` ranks of a group. ``nodes``: how many nodes the group spans.
    ``elsewhere``: for each rank of the group, 1 if it is on another node than this rank, else 0."""

    place: int
    parts: int
    nodes: int
    elsewhere: bytes


class Charges(NamedTuple):
    """What it costs to run a function on one matrix: the seconds of products and of copies, operation by
    operation, the peak bytes, and the bytes of its workspace. Also the shape, strides and dtype of its
    result, if it has one."""

    seconds: Sequence[tuple[float, float]]
    peak: int
    block: int
    result: Any


class Boundless(Workspace):
    """A workspace on the meta device with room for any block. ``most``: bytes of the largest block needed."""

    most = 0
    room = torch.empty(1 << 60, dtype=torch.uint8, device=META)

    def _block(self, nbytes: int, device: torch.device) -> Tensor:
        self.most = max(self.most, nbytes)
        return self.room


@dataclass(eq=False)
class RankWalks:
    """Walks of single ranks on a machine, each made once. ``beside``: how many other ranks share a rank's
    cores and bus."""

    machine: Machine
    beside: int = 0
    _known: dict[Hashable, tuple[Trace, tuple[int, ...]]] = field(default_factory=dict)
    _links: dict[Hashable, Link] = field(default_factory=dict)
    _seats: dict[Hashable, Seat] = field(default_factory=dict)
    _signs: dict[Hashable, np.uint64] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _charges: dict[Hashable, Charges] = field(default_factory=dict)
    _workspace: Boundless = field(default_factory=Boundless)
    _prices: dict[Hashable, PricedRequest] = field(default_factory=dict)
    _lines: dict[Hashable, Lines] = field(default_factory=dict)
    _last: tuple[Plan, WalkedPlan] | None = None

    def rounds(self, plan: Plan) -> WalkedPlan:
        """Walk one rank of each kind, and return the buckets of a plan's rounds.

        The last plan is kept, because it is often timed with several windows.
        """
        if self._last is not None and self._last[0] is plan:
            return self._last[1]
        at, axes = plan.grid.at(0), plan.buckets[0].axes
        ids = [[self._sign(*_class_of(entry)) for entry in bucket.entries] for bucket in plan.buckets]
        slices = [_uneven_slices(bucket) for bucket in plan.buckets]
        signs = [self._kinds(*each, at) for each in zip(plan.buckets, ids, slices, strict=True)]
        folded = _fold(signs, slices, plan)
        firsts = [np.unique(places, return_index=True)[1] for places in folded]
        kept = np.arange(len(signs[0])).reshape([len(places) for places in folded])[np.ix_(*firsts)]
        times = np.ones((), dtype=int)
        for places in folded:
            times = np.multiply.outer(times, np.bincount(places))
        buckets = [
            (bucket.round, self._bucket(plan, bucket, its, lengths, each[kept], kept, times))
            for bucket, its, lengths, each in zip(plan.buckets, ids, slices, signs, strict=True)
        ]
        rounds = groupby(buckets, lambda numbered: numbered[0])
        walked = WalkedPlan([[bucket for _, bucket in its] for _, its in rounds], axes[::-1], folded[::-1])
        self._last = plan, walked
        return walked

    def agreement(self, plan: Plan) -> Trace:
        """The trace of the ranks' agreement before a step; it is the same on all ranks."""
        key = plan.grid, plan.expects, sum(len(bucket.entries) for bucket in plan.buckets)
        if key not in self._known:
            at = plan.grid.at(0)
            self._known[key] = self.trace(step_over_ones(plan, at, META).agree(), at), ()
        return self._known[key][0]

    def trace(self, walk: Walk, at: Coordinate, tape: Tape | None = None) -> Trace:
        """Walk one rank to its end, as if the other ranks made each request at the same time as this rank."""
        turns: list[WalkedTurn] = []
        answer: Tensor | None = None
        memory, share = PeakMemory() if tape is None else NotedMemory(tape), self._share
        with torch.no_grad(), Work(self.machine, memory, tape) as work, ExitStack() as stack:
            stack.callback(AROUND.reset, AROUND.set(partial(self._once, memory, work)))
            while True:
                try:
                    request = walk.send(answer)
                except StopIteration:
                    request = None
                answer = None
                product, copy = (seconds / share for seconds in work.take())
                now, peak = memory.now, memory.lap()
                if tape is not None:
                    tape.note_turn(request)
                if isinstance(request, Collective):
                    asked = self._priced(request, at)
                    turns.append(WalkedTurn(product, copy + asked.copy, now, peak, asked, request.root))
                    answer = torch.empty(request.receive, dtype=request.dtype, device="meta")
                else:
                    turns.append(WalkedTurn(product, copy, now, peak, meets=isinstance(request, Abreast)))
                if request is None:
                    return tuple(turns)
                del request

    def _once(
        self, memory: PeakMemory, work: Work, function: Callable[..., Tensor | None], *given: Any
    ) -> Tensor | None:
        """Run a function of one matrix, or only charge what an earlier run with equal sizes cost.

        Newton–Schulz is charged as one sum, and is one step on a tape. With a tape, other functions always
        run, so that the tape notes their operations.
        """
        in_one, tape = function is zeropower_via_newtonschulz, work.tape
        if tape is not None:
            if not in_one:
                return function(*given)
            tape.pauses = True
        key = function, *map(_look_of, given)
        peak, before, product, copy = memory.peak, memory.now, work.product, work.copy
        block = self._workspace.most
        if (known := self._charges.get(key)) is None:
            memory.peak, work.charged, self._workspace.most = before, [], 0
            result = function(*given)
            seconds, work.charged = work.charged, None
            if in_one:
                seconds = [(work.product - product, work.copy - copy)]
            known = Charges(seconds, memory.peak - before, self._workspace.most, None)
            if result is not None:
                known = known._replace(result=(result.shape, result.stride(), result.dtype))
            if memory.now == before + (0 if result is None else result.nbytes):  # it keeps nothing else
                self._charges[key] = known
        else:
            result = None
            if known.result is not None:
                shape, stride, dtype = known.result
                result = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        work.product, work.copy = product, copy
        for charge in known.seconds:
            work.charge(*charge)
        memory.peak, self._workspace.most = max(peak, before + known.peak), max(block, known.block)
        if tape is not None and result is not None:
            tape.pauses = False
            tape.note(Iterated(*known.seconds[0], known.peak, result.nbytes))
        return result

    def _retold(self, tape: Tape, at: Coordinate) -> Trace:
        """Rebuild the trace of a walk from its tape, with the same sums in the same order as in the walk."""
        turns: list[WalkedTurn] = []
        work, now, peak = Work(self.machine), 0, 0
        sizes, share = iter(tape.sizes), self._share
        for step in tape.steps:
            if step == "copy":
                work.charge_copy(next(sizes))
            elif step == "hold":
                now += next(sizes)
                peak = max(peak, now)
            elif isinstance(step, Iterated):
                work.product += step.product
                work.copy += step.copy
                peak, now = max(peak, now + step.peak), now + step.nbytes
            else:
                asked, more, root = None, 0.0, None
                if isinstance(step, Asked):
                    request = step.request(sizes, tape.places, at.size(*step.axes))
                    asked, root = self._priced(request, at), request.root
                    more = asked.copy
                product, copy = (seconds / share for seconds in work.take())
                turns.append(WalkedTurn(product, copy + more, now, peak, asked, root, step is Abreast))
                peak = now
        return tuple(turns)

    @property
    def _share(self) -> float:
        """The fraction of a core that a rank gets."""
        return 1.0 if self.machine.cores is None else min(1.0, self.machine.cores / (1 + self.beside))

    def _priced(self, request: Collective, at: Coordinate) -> PricedRequest:
        """The costs of a collective, computed once for equal requests."""
        if request.sends is not None:
            return self._price(request, at)
        where: tuple[Hashable, ...] = at.rank, request.root
        if self.machine.algorithm == "ring":  # the ranks between a chain's second and last one are alike
            place, parts, nodes, _ = self._seat(at, request.axes)
            from_root = None if request.root is None else min((place - request.root) % parts, 2)
            where = nodes, from_root, request.root is not None and (place + 1) % parts == request.root
        given = None if request.send is None else request.send.numel()
        sizes = request.dtype, given, request.receive
        key = where, at.grid.sizes, at.grid.axes, request.kind, request.axes, sizes, request.label.phase
        if key not in self._prices:
            self._prices[key] = self._price(request, at)
        return self._prices[key]

    def _price(self, request: Collective, at: Coordinate) -> PricedRequest:
        machine, link, share = self.machine, self._link(request.kind, request.axes, at.grid), self._share
        traffic = traffic_of(request, at, machine.algorithm, is_alone=True)
        sent, busy = traffic.sent, traffic.busy
        carried = travels(traffic, link, machine.algorithm)
        others = self.beside if link.shared else 0
        steps = 2 * max(1, (at.size(*request.axes) - 1).bit_length())
        rounds = busy.messages_out if machine.algorithm == "gloo" else min(busy.messages_out, steps)
        copied = 0
        if request.send is not None and request.kind in ("all_reduce", "reduce"):  # in place
            copied = 2 * request.send.numel() * request.dtype.itemsize
        whole = machine.copy_seconds(2 * request.receive * request.dtype.itemsize)
        passed = busy.data if request.root is not None and machine.algorithm == "ring" else 0
        return PricedRequest(
            request.kind,
            request.axes,
            request.label,
            link,
            busy,
            copy=(machine.turn + machine.copy_seconds(copied)) / share,
            moving=carried * (1 + others) / link.bandwidth,
            sending=(busy.data * machine.byte + busy.messages_out * machine.message) / share,
            latency=link.latency * rounds,
            root_copy=whole / share if request.kind == "broadcast" else 0.0,
            sent=sent.data,
            passed=passed,
            between=self._between(request, at, passed or sent.data),
        )

    def _link(self, kind: Kind, axes: tuple[str, ...], grid: Grid) -> Link:
        """The slowest link of all groups over the axes, because some groups may span several nodes."""
        key = kind, axes, grid
        if key not in self._links:
            ranks = np.arange(grid.world_size).reshape(grid.sizes)
            firsts = ranks[tuple(0 if axis in axes else slice(None) for axis in grid.axes)].ravel()
            groups = (grid.at(int(rank)).group(*axes) for rank in firsts)
            found = {self.machine.link(group, kind) for group in groups}
            self._links[key] = min(found, key=lambda link: link.bandwidth)
        return self._links[key]

    def _between(self, request: Collective, at: Coordinate, sent: int) -> int:
        """Bytes that leave the rank's node: the average in a ring, the exact number in an exchange."""
        seat = self._seat(at, request.axes)
        if request.sends is not None:
            return sum(compress(request.sends, seat.elsewhere)) * request.dtype.itemsize
        return sent * seat.nodes // seat.parts if seat.nodes > 1 else 0

    def _seat(self, at: Coordinate, axes: tuple[str, ...]) -> Seat:
        key = at.rank, at.grid.sizes, at.grid.axes, axes
        if key not in self._seats:
            place, ranks = at.position(*axes), np.array(at.group(*axes))
            node = ranks * 0 if self.machine.between is None else ranks // self.machine.ranks_per_node
            nodes, elsewhere = np.count_nonzero(np.bincount(node)), (node != node[place]).tobytes()
            self._seats[key] = Seat(place, len(ranks), int(nodes), elsewhere)
        return self._seats[key]

    def _bucket(
        self,
        plan: Plan,
        bucket: Bucket,
        ids: Sequence[np.uint64],
        slices: Mapping[int, int],
        signs: np.ndarray,
        kept: np.ndarray,
        times: np.ndarray,
    ) -> WalkedBucket:
        """Walk a bucket on the ``kept`` positions.

        ``times``: for each kept position, the number of equal positions that it represents. ``signs``: the
        labels from ``_kinds``.
        """
        at = plan.grid.at(0)
        owners = [entry.workers.start for entry in bucket.entries]
        places = tuple(sorted({*slices, *(at.peer(owner, *bucket.axes)["dp"] for owner in owners)}))
        found, firsts, kinds = np.unique(signs, return_index=True, return_inverse=True)
        kinds = kinds.reshape(kept.shape)
        counts = np.bincount(kinds.reshape(-1), times.reshape(-1)).astype(int)
        alike = *map(tuple, (sorted(map(int, ids)), found.tolist(), counts.tolist())), len(places)
        stands = None
        if times.sum() <= FEW_RANKS:  # else the order of owners is ignored
            order = {owner: number for number, owner in enumerate(sorted({*owners, *slices}))}
            stands = tuple((int(i), order[owner]) for i, owner in zip(ids, owners, strict=True))
        look = plan.grid, alike, stands, tuple(slices.values()), _travels_of(bucket)
        traces, traced = [], places
        for sign, first in zip(found.tolist(), kept.reshape(-1)[firsts].tolist(), strict=True):
            key = look, sign
            if key not in self._known:
                there = at.peer(first, *bucket.axes)
                self._known[key] = self._walk(plan, bucket, there, slices), places
            trace, traced = self._known[key]
            traces.append(trace)
        kinds = kinds.T.astype(np.min_scalar_type(len(traces)), "C")  # small, because plans have many buckets
        return WalkedBucket(tuple(traces), kinds, traced, places)

    def _walk(self, plan: Plan, bucket: Bucket, at: Coordinate, slices: Mapping[int, int]) -> Trace:
        """One rank's step of one bucket. Memory that is kept for the next step is counted from the start.

        If dp cuts a bucket's only matrix into slices, walks that differ only in the first slice's length are
        recorded. Once three of them show that all sizes are linear in this length, ``tapes`` computes the
        sizes of further walks.
        """
        tape = lines = None
        if self.machine.cores is None and len(bucket.entries) == 1 and 1 < len(slices) < at.size("dp"):
            [entry], [first, *others] = bucket.entries, slices.values()
            tape = Tape(first, [*slices])
            place = tape.places.index(at["dp"]) if at["dp"] in slices else None
            works = entry.workers.start - tape.places[0], len(entry.workers)
            alike = at.grid, _class_of(entry), works, _travels_of(bucket), place
            exchanged = at_once(at.size("dp"), max(slices.values()))
            lines = self._lines.setdefault((*alike, exchanged, len(others), *others[:-1]), Lines())
            if (sizes := lines.sizes(first)) is not None:
                return self._retold(Tape(first, tape.places, lines.tapes[0].steps, sizes), at)
        self._workspace.most = 0
        step = _step_of(replace(plan, buckets=(bucket,)), at, self._workspace)
        assert step.present is not None
        trace = self.trace(step_bucket(step.buckets[0], step.present), at, tape)
        if lines is not None and tape is not None:
            lines.add(tape)
        kept = self._workspace.most
        return tuple(replace(turn, peak=turn.peak + kept) for turn in trace) if kept else trace

    def _kinds(
        self, bucket: Bucket, ids: Sequence[np.uint64], slices: Mapping[int, int], at: Coordinate
    ) -> np.ndarray:
        """A label (a number) for each position of a bucket's group. Equal work gives equal labels.

        A label is a sum of random numbers. Each matrix contributes at most three: one if the position works
        on the matrix, one if the position differs from the matrix's first worker only along axes that cut the
        matrix, and one for the shape of the position's part. So equal labels mean equal work.
        """
        sizes = tuple(at.grid.size(axis) for axis in bucket.axes)
        signs = np.zeros(sizes, dtype=np.uint64)
        flat, travels_so = signs.reshape(-1), isinstance(bucket.storage_layout, LocalShards)
        counted: dict[np.uint64, int] = {}
        for entry, known in zip(bucket.entries, ids, strict=True):
            start, stop = entry.workers.start, entry.workers.stop
            flat[start:stop] += self._sign(known, "works")
            if travels_so and bucket.compute.hops:
                there = at.peer(start, *bucket.axes)
                line = (
                    slice(None) if axis in entry.matrix.axes else slice(there[axis], there[axis] + 1)
                    for axis in bucket.axes
                )
                signs[tuple(line)] += self._sign(known, "in line")
            counted[known] = counted.get(known, 0) + 1
        for place, length in slices.items():
            one = tuple(slice(place, place + 1) if axis == "dp" else slice(None) for axis in bucket.axes)
            signs[one] += self._sign("slice", length)
        if not isinstance(bucket.storage_layout, SlicedBuffer):
            for entry, known in zip(bucket.entries, ids, strict=True):
                if times := counted.pop(known, 0):
                    flat += np.uint64(times) * self._held(entry, known, bucket, at)
        return flat

    def _held(self, entry: BucketEntry, known: np.uint64, bucket: Bucket, at: Coordinate) -> np.ndarray:
        """A number for each position: the same for parts of the same shape, and 0 if all parts have the same
        shape.
        """
        cutting = [axis for axis in bucket.axes if axis in entry.matrix.axes]
        places = range(at.size(*cutting))
        shapes = [entry.matrix.box(at.peer(place, *cutting)).shape for place in places]
        if len(set(shapes)) == 1:
            return np.zeros(1, dtype=np.uint64)
        signs = np.array([self._sign(known, shape) for shape in shapes], dtype=np.uint64)
        sizes = [at.grid.size(axis) if axis in cutting else 1 for axis in bucket.axes]
        whole = [at.grid.size(axis) for axis in bucket.axes]
        return np.broadcast_to(signs.reshape(sizes), whole).reshape(-1)

    def _sign(self, *what: Hashable) -> np.uint64:
        """A random number for these values, the same in every call."""
        if what not in self._signs:
            self._signs[what] = np.uint64(self._random.getrandbits(64))
        return self._signs[what]


def _fold(
    signs: Sequence[np.ndarray], slices: Sequence[Mapping[int, int]], plan: Plan
) -> tuple[np.ndarray, ...]:
    """Number the positions along each axis; positions with equal labels in all buckets share a number."""
    axes, draw = plan.buckets[0].axes, np.random.default_rng(0)
    sizes = [plan.grid.size(axis) for axis in axes]

    def numbers(count: int) -> np.ndarray:
        return draw.integers(1, 1 << 63, count, dtype=np.uint64) | np.uint64(1)

    grid = np.zeros(sizes, dtype=np.uint64)
    for number, each in zip(numbers(len(signs)), signs, strict=True):
        grid += number * each.reshape(sizes)
    places = sorted(_roots(plan).union(*slices))
    for number, place in zip(numbers(len(places)), places, strict=True):
        np.moveaxis(grid, axes.index("dp"), 0)[place : place + 1] += number
    folded = []
    for i, size in enumerate(sizes):
        across = np.moveaxis(grid, i, 0).reshape(size, -1)
        line = (across * numbers(across.shape[1])).sum(axis=1, dtype=np.uint64)
        _, firsts, inverse = np.unique(line, return_index=True, return_inverse=True)
        folded.append(np.argsort(np.argsort(firsts))[inverse.reshape(-1)])
    return tuple(folded)


def _roots(plan: Plan) -> set[int]:
    """The positions along dp from which a broadcast may start; the caller adds the positions with uneven
    slices.

    Each of these positions does work that no other position does.
    """
    found: set[int] = set()
    for bucket in plan.buckets:
        for hop in (*bucket.gradient.hops, *bucket.compute.hops, *bucket.parameter.hops):
            if not isinstance(hop, Hop):
                continue
            for end in (hop.src, hop.dst):
                if isinstance(end, Owned):
                    found.add(end.rank)
                elif isinstance(end, Shard) and end.sizes is None and len(hop.shape) == 1:
                    parts = plan.grid.size(hop.axis)
                    found |= set(range(parts)) if hop.shape[0] % parts else set()
    return found


def _class_of(entry: BucketEntry) -> tuple[Hashable, ...]:
    """The properties, besides the workers, that decide what a rank does with a matrix."""
    matrix = entry.matrix
    return (
        matrix.shape,
        matrix.part,
        matrix.cuts,
        matrix.dtype,
        matrix.grad_dtype,
        entry.gram is None,
        entry.size,
    )


def _look_of(given: Any) -> Hashable:
    """What the cost of a function of one matrix depends on in an argument: sizes, strides and dtypes."""
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    if isinstance(given, RankMatrix):
        held = given.parameter.param, given.place, given.momentum_index
        return given.numel, *map(_look_of, held)
    if isinstance(given, tuple):
        return tuple(map(_look_of, given))
    if isinstance(given, slice):
        return given.start, given.stop, given.step
    if isinstance(given, RankBucket):
        return given.plan.gradient.dtype
    # In a walk, all groups have SETTINGS, and all calls share the workspace.
    return None if isinstance(given, Mapping | Workspace) else given


def _uneven_slices(bucket: Bucket) -> dict[int, int]:
    """How many elements of the bucket each dp position's slice has; empty if all have the same length."""
    sizes = np.array(getattr(bucket.storage_layout, "sizes", None) or (), dtype=int)
    places = np.flatnonzero(sizes)
    return dict(zip(places.tolist(), sizes[places].tolist(), strict=True))


def _travels_of(bucket: Bucket) -> Hashable:
    """The properties of a bucket that decide how it is communicated."""
    routes = tuple((len(it.hops), it.dtype) for it in (bucket.gradient, bucket.compute, bucket.parameter))
    layouts = (bucket.model_layout, bucket.storage_layout, bucket.compute_layout)
    return bucket.phases, bucket.axes, routes, tuple(type(layout) for layout in layouts)


@lru_cache(maxsize=1024)  # without data, all parameters of a shape are alike
def _parameter(shape: tuple[int, ...], dtype: torch.dtype, grad_dtype: torch.dtype) -> Tensor:
    return with_gradient(shape, dtype, grad_dtype, META)


def _step_of(plan: Plan, at: Coordinate, workspace: Workspace) -> PlanStep:
    """One rank's step over a part of a plan, with only the parameters of this part."""
    held = {matrix.param: (matrix, box) for matrix, box in held_parameters(plan, at)}
    parameters = [ParameterState(torch.empty(0, device=META), SETTINGS, {})] * (1 + max(held))
    for index, (matrix, box) in held.items():
        parameters[index] = ParameterState(
            _parameter(box.shape, matrix.dtype, matrix.grad_dtype), SETTINGS, {}
        )
    step = PlanStep(plan, at, parameters, workspace=workspace, present=frozenset(held))
    step.fill_state()
    return step
