"""Builders that turn matrices and a grid into a plan. The same step runs every plan.

``docs/optimizer.md`` compares the strategies in a table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

import torch

from ..errors import StrategyError
from .assign import longest_first, newton_schulz_cost
from .bucket import Bucket, BucketEntry, DistMeta, by_buffer, fill_buckets, leading, padded
from .exchange import (
    Exchange,
    Layout,
    LocalShards,
    PiecesInSlices,
    SlicedBuffer,
    VirtualBuffer,
    WholeMatrices,
)
from .grid import Coordinate, Grid
from .layout import Hop, Partial, Placement, Replicate, Route, Shard
from .matrix import Cut, Matrix, Part, SummedGram
from .rounds import Job, Limit, fill_rounds
from .supported_shardings import check_sharding

WIRE = torch.bfloat16
ROUND_BYTES = 25_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a step does, as data: its buckets, their layouts, and the routes between them.

    ``expects`` says which gradients must be in ``p.grad``: the rank's own gradients (``"local"``), or
    gradients that are already averaged over dp (``"averaged"``).
    """

    strategy: str
    grid: Grid
    buckets: tuple[Bucket, ...]
    expects: Literal["local", "averaged"]

    def dist_meta(self, at: Coordinate) -> tuple[DistMeta, ...]:
        """Return the master plan for one rank: one entry per matrix, in the order of the buckets."""
        return tuple(meta for bucket in self.buckets for meta in bucket.dist_meta(at))

    def workers(self, matrix: int) -> tuple[int, ...]:
        """Return the ranks that orthogonalize the matrix with this index."""
        bucket, entry = next((b, e) for b in self.buckets for e in b.entries if e.matrix.index == matrix)
        return tuple(rank for rank in self.grid.ranks if bucket.works_on(entry, self.grid.at(rank)))


Builder = Callable[..., Plan]
"""``(matrices, grid, **options) -> Plan``, with ``matrices: Sequence[Matrix]`` and ``grid: Grid``."""


def replicated(matrices: Sequence[Matrix], grid: Grid, *, round_bytes: int = ROUND_BYTES) -> Plan:
    """Every rank keeps and orthogonalizes every matrix: the baseline. Only tensor-parallel pieces travel.

    With dp alone, this is the step of DDP with ``torch.optim.Muon``.

    Args:
        round_bytes: how many gradient bytes a rank may hold in all buckets in flight together.
    """

    def bucket(some: Sequence[BucketEntry]) -> Bucket:
        entries = tuple(replace(entry, workers=range(grid.size("dp"))) for entry in _placed(some))
        return _kept_in_the_model(entries, LocalShards(), LocalShards(), Route((), WIRE))

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        entries = _entries(run, grid)
        weights = _weights(entries)
        size = limit.all if sum(weights) <= limit.all else limit.each
        return [[bucket(some)] for some in fill_buckets(entries, weights, size)]

    return _plan("replicated", matrices, grid, "averaged", rounds, round_bytes)


def round_robin(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    order: Literal["size", "index"] = "size",
    back: Literal["all_reduce", "all_gather"] = "all_reduce",
    round_bytes: int = ROUND_BYTES,
) -> Plan:
    """The ``i``-th matrix is orthogonalized at dp position ``i % dp``; all ranks apply all updates.

    Args:
        order: ``"size"`` numbers matrices from the costliest on, as in KellerJordan/Muon; ``"index"`` numbers
            them in the optimizer's order, as in the first distributed Muon.
        back: how owners share their updates. ``"all_reduce"``, as published, sums buffers that are zero
            except for the owner's matrices. ``"all_gather"`` needs half the bytes. If a round is larger than
            ``round_bytes``, each owner broadcasts its updates.
        round_bytes: as in ``zero1``.

    Raises:
        StrategyError: ``back`` or ``order`` is unknown.

    Source: KellerJordan/modded-nanogpt, 2024, the first distributed Muon.
    """
    if back not in ("all_reduce", "all_gather"):
        raise StrategyError(f'round_robin knows back="all_reduce" and back="all_gather"; got {back!r}')
    if order not in ("size", "index"):
        raise StrategyError(f'round_robin knows order="size" and order="index"; got {order!r}')
    costs = {matrix.index: newton_schulz_cost(matrix.sides) for matrix in matrices}
    dealt = sorted(costs, key=lambda index: (-costs[index] if order == "size" else 0, index))
    place_of = {index: place % grid.size("dp") for place, index in enumerate(dealt)}

    def bucket(some: Sequence[BucketEntry]) -> Bucket:
        is_alone = len({entry.workers for entry in some}) == 1
        return (_all_gathered if back == "all_gather" or is_alone else _all_reduced)(some, grid)

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        entries = _owned_by(_entries(run, grid), [place_of[matrix.index] for matrix in run])
        return _in_rounds(entries, _weights(entries), limit, bucket)

    return _plan("round_robin", matrices, grid, "averaged", rounds, round_bytes)


def zero1(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    gather: Literal["all", "boundary"] = "all",
    cut: Literal["list", "bucket"] = "list",
    round_bytes: int = ROUND_BYTES,
) -> Plan:
    """Momentum is cut over dp in flat buffers; each rank orthogonalizes the matrices that its slice touches.

    A bucket goes through a dp gather, a tp gather, Newton–Schulz, a tp slice and a dp slice. With several
    rounds, slices differ in length. Short slices then travel in one all_to_all; each longer one is reduced to
    its rank, which later broadcasts the slice's new weights.

    Args:
        cut: what dp cuts into equal slices. ``"list"`` cuts one list of all matrices, as published. Shapes
            are mixed in the list, so that few matrices lie on several ranks, and all slices have about equal
            work. ``"bucket"`` cuts each bucket by itself, as in Megatron-LM's optimizer.
        gather: ``"all"`` gathers whole buckets over dp, as in the published proof of concept. ``"boundary"``
            gathers only matrices that cross a slice boundary, and only on the ranks that store a part of one.
        round_bytes: how many bytes of one owner's gradients a rank may hold in all rounds in flight
            (``rounds.IN_FLIGHT``, 3) together, or three times the largest matrix if that is more. This limits
            each owner, not a round. For ``cut="bucket"``, ``round_bytes`` is the size of a bucket.

    Raises:
        StrategyError: ``gather`` or ``cut`` is unknown.

    Source: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.3.
    """
    if gather not in ("all", "boundary"):
        raise StrategyError(f'zero1 knows gather="all" and gather="boundary"; got {gather!r}')
    if cut not in ("list", "bucket"):
        raise StrategyError(f'zero1 knows cut="list" and cut="bucket"; got {cut!r}')

    everything = Limit(sys.maxsize, sys.maxsize)

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        entries, dp = _entries(run, grid), grid.size("dp")
        if cut == "list":
            return sliced(_list_of(entries, dp), limit)
        cut_apart = fill_buckets(entries, _weights(entries), round_bytes)
        return (bucket for some in cut_apart for bucket in sliced(_List.of(some, dp), everything))

    def sliced(flat: _List, limit: Limit) -> Rounds:
        def bucket(some: Sequence[BucketEntry]) -> Bucket:
            return _sliced(_placed(some), grid, flat.slices_of(some), gather)

        return _in_rounds(flat.entries, _weights(flat.entries), limit, bucket)

    return _plan("zero1", matrices, grid, "local", rounds, round_bytes)


def layerwise(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    tp: Literal["share", "repeat"] = "share",
    round_bytes: int = ROUND_BYTES,
) -> Plan:
    """Each matrix belongs to one dp position, which stores its momentum and runs Newton–Schulz.

    Gradients are reduced to the owners, and the owners send the new parameters to all ranks. All ranks
    together send as many bytes as in ZeRO-1 with AdamW. Matrices are assigned so that the owners have
    about equal work, beginning with the costliest matrix.

    Args:
        tp: how the tp ranks at a dp position divide its matrices. With ``"share"``, each matrix is gathered
            to one of the ranks, which scatters the update back. With ``"repeat"``, each of these ranks
            gathers every matrix, and no update is sent back.
        round_bytes: as in ``zero1``.

    Raises:
        StrategyError: ``tp`` is unknown.

    Sources: Megatron-LM, ``core/optimizer/layer_wise_optimizer.py``; torchtitan's ``Owned`` parameters, pull
    request 3719.
    """
    if tp not in ("share", "repeat"):
        raise StrategyError(f'layerwise knows tp="share" and tp="repeat"; got {tp!r}')
    rounds = _layerwise_rounds(grid, sharing=grid.size("tp") if tp == "share" else 1)
    return _plan("layerwise", matrices, grid, "local", rounds, round_bytes)


def gram(matrices: Sequence[Matrix], grid: Grid, *, round_bytes: int = ROUND_BYTES) -> Plan:
    """Newton–Schulz without a gather: if tp cuts a matrix's long side, its shards are never put together.

    Suppose that X has n rows and l columns, and that tp cuts the columns. Each rank multiplies its columns by
    their transpose, which gives an n × n matrix. One all_reduce over tp sums these products to the Gram
    matrix XXᵀ. One such all_reduce, in fp32 and of upper triangles only, serves a whole bucket. Every tp rank
    then iterates on XXᵀ, and multiplies its own shard by the result. A tall matrix that tp cuts along its
    rows is treated in the same way, with XᵀX. Over dp, ``gram`` works like ``layerwise``.

    Compare this with gathering the matrix on T ranks that all repeat the iterations (``zero1``,
    ``layerwise``). With ``gram``, a rank sends 2(n + 1)/l times the bytes, and needs 4n²l/T + 34n³ operations
    for five iterations instead of 20n²l + 10n³. ``owner`` divides 20n²l + 10n³ by T if there are at least T
    matrices to share, and sends l/(nT) times ``gram``'s bytes, both ways together. ``scripts/gram.py``
    measures these costs.

    If a matrix's long side is not cut, all tp ranks work on the whole matrix, and gather it first if tp cuts
    it. These ranks apply the group's own recipe with the usual bits. Matrices that stay cut use the Gram form
    in fp32, with the group's ``ns_coefficients`` or with the recipe ``"gram"`` or ``"minimax"``. Other
    recipes are refused. The bits *differ* from those of one process, because the sum rounds differently. In
    Frobenius norm, an update is within 5 % of the update with ``orthogonalize="gram"`` in one process. The
    update's error and largest singular value are within 0.05 of stock's. ``orthogonalizers/gram.py`` states
    these bounds, and ``tests/step/test_gram.py`` checks them.
    """

    def keep_cut(entry: BucketEntry) -> BucketEntry:
        cut, sides = entry.matrix.cut("tp"), entry.matrix.sides
        dim = -1 if cut is None else cut.dim - leading(entry.matrix)  # rows, columns or neither
        if not entry.route.hops or dim not in (0, 1) or not 0 < sides[1 - dim] <= sides[dim]:
            return entry
        return replace(entry, route=Route((), WIRE), gram=SummedGram(dim, sides[1 - dim]))

    rounds = _layerwise_rounds(grid, sharing=1, change=keep_cut)
    return _plan("gram", matrices, grid, "local", rounds, round_bytes)


def owner(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    assign: Literal["longest_first", "in_turn"] | Sequence[int] = "longest_first",
    round_bytes: int = ROUND_BYTES,
) -> Plan:
    """Each matrix is gathered on exactly one rank, and its update is scattered back, over any sharding.

    A round takes one exchange in each direction.

    Args:
        assign: ``"longest_first"`` balances the Newton–Schulz cost of all matrices over the ranks,
            ``"in_turn"`` assigns them by index, and a sequence lists the rank of each matrix.
        round_bytes: how many bytes of whole matrices (in bf16, as they travel) a rank may own in all rounds
            in flight (``rounds.IN_FLIGHT``, 3) together, or three times the largest matrix if that is more. A
            rank also holds the pieces that it sends, and an update for each copy of a parameter.

    Raises:
        StrategyError: ``assign`` is unknown, or names ranks that are not on the grid.
    """
    rounds = _owned_rounds(grid.axes, grid, assign)
    return _plan("owner", matrices, grid, "averaged", rounds, round_bytes)


def owner_per_replica(matrices: Sequence[Matrix], grid: Grid, *, round_bytes: int = ROUND_BYTES) -> Plan:
    """Each matrix is gathered on exactly one rank of every replica; nothing travels between replicas.

    A replica is a group of ranks that together hold one copy of all parameters: under HSDP, one shard group.
    ``owner`` orthogonalizes a matrix once and sends its update to all replicas. Here every replica repeats
    the work, so nothing travels over the links between replicas, which may be slow.
    """
    axes = tuple(axis for axis in grid.axes if any(axis in matrix.axes for matrix in matrices))
    rounds = _owned_rounds(axes, grid, "longest_first")
    return _plan("owner_per_replica", matrices, grid, "averaged", rounds, round_bytes)


STRATEGIES: dict[str, Builder] = {
    "replicated": replicated,
    "round_robin": round_robin,
    "zero1": zero1,
    "layerwise": layerwise,
    "owner": owner,
    "owner_per_replica": owner_per_replica,
    "gram": gram,
}
"""The builders, by the names that the optimizer and the command line take."""


def find_builder(strategy: str | Builder) -> Builder:
    """Return the builder of that name, or raise ``StrategyError``. A builder is returned unchanged."""
    if callable(strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise StrategyError(f"unknown strategy {strategy!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[strategy]


def plan_imbalance(plan: Plan) -> float:
    """Return the busiest rank's Newton–Schulz work, as a multiple of a fair share. 1.0 is perfect balance.

    A fair share counts each matrix once. If all ranks repeat all work, the result is the number of ranks.
    """
    once = sum(newton_schulz_cost(entry.matrix.sides) for bucket in plan.buckets for entry in bucket.entries)
    return max(work_by_position(plan)) * plan.grid.world_size / once if once else 1.0


def work_by_position(plan: Plan) -> list[int]:
    """Return the Newton–Schulz operations of one iteration at each position. All buckets have the same group.

    Each entry's work is added at its first worker and subtracted after its last, and the sums are then
    accumulated. So an entry with a thousand workers takes as long as an entry with one.
    """
    positions = plan.grid.at(0).size(*plan.buckets[0].axes) if plan.buckets else 0
    change = [0] * (positions + 1)
    for bucket in plan.buckets:
        for entry in bucket.entries:
            change[entry.workers.start] += entry.cost
            change[entry.workers.stop] -= entry.cost
    return list(accumulate(change[:-1]))


Rounds: TypeAlias = Iterable[Sequence[Bucket]]
"""The buckets of each round, which run at the same time. ``_plan`` numbers them."""
RoundMaker: TypeAlias = Callable[[Sequence[Matrix], Limit], Rounds]
"""A function that divides the matrices of a buffer into rounds."""


def _plan(
    name: str,
    matrices: Sequence[Matrix],
    grid: Grid,
    expects: Literal["local", "averaged"],
    rounds: RoundMaker,
    round_bytes: int,
) -> Plan:
    check_sharding(name, matrices, grid, expects)
    buckets: list[Bucket] = []
    buffers = by_buffer(matrices)
    limit = Limit.of(round_bytes, len(buffers))
    for buffer, run in enumerate(buffers):
        for abreast in rounds(run, limit):
            number = buckets[-1].round + 1 if buckets else 0
            for it in abreast:
                buckets.append(replace(it, index=len(buckets), buffer=buffer, round=number))
    return Plan(name, grid, tuple(buckets), expects)


def _entries(matrices: Sequence[Matrix], grid: Grid) -> list[BucketEntry]:
    """Make entries with their tensor-parallel routes, but without places in a buffer and without workers."""
    pieces = [_tp_pieces(matrix.shape, matrix.part, matrix.cuts, grid) for matrix in matrices]
    pairs = zip(matrices, pieces, strict=True)
    return [BucketEntry(matrix, 0, size, range(0), route) for matrix, (size, route) in pairs]


def _owned_by(entries: Sequence[BucketEntry], owners: Sequence[int]) -> list[BucketEntry]:
    """Give each entry its owner as its only worker."""
    pairs = zip(entries, owners, strict=True)
    return [replace(entry, workers=range(owner, owner + 1)) for entry, owner in pairs]


def _placed(entries: Sequence[BucketEntry], offsets: Iterable[int] | None = None) -> tuple[BucketEntry, ...]:
    """Give entries their offsets; without ``offsets``, they lie one after the other."""
    starts = accumulate((entry.size for entry in entries), initial=0) if offsets is None else offsets
    return tuple(replace(entry, offset=start) for entry, start in zip(entries, starts, strict=False))


def _weights(entries: Sequence[BucketEntry]) -> list[int]:
    """For each matrix, return the gradient bytes of its largest tensor-parallel piece."""
    return [entry.size * entry.matrix.grad_dtype.itemsize for entry in entries]


def _jobs(entries: Sequence[BucketEntry], weights: Sequence[int]) -> list[Job]:
    rows = enumerate(zip(entries, weights, strict=True))
    return [Job(number, weight, entry.cost, entry.workers) for number, (entry, weight) in rows]


def _in_rounds(
    entries: Sequence[BucketEntry],
    weights: Sequence[int],
    limit: Limit,
    bucket: Callable[[Sequence[BucketEntry]], Bucket],
    sharing: int = 1,
) -> Rounds:
    """Yield the buckets of each round: one bucket if the round is within the limit, otherwise one per owner.

    So a round never puts more than one owner's matrices on a rank. ``sharing`` consecutive positions count as
    one owner, because each of them holds ``1 / sharing`` of every weight.
    """
    fits = sum(weights) <= limit.all * sharing
    most = limit.all if fits else limit.each
    for numbers in [range(len(entries))] if fits else fill_rounds(_jobs(entries, weights), limit):
        owned: dict[tuple[int, int], list[BucketEntry]] = {}
        for number in numbers:
            places = entries[number].workers
            owner = places.start // sharing, (places.stop - 1) // sharing
            owned.setdefault(owner, []).append(entries[number])
        if sum(weights[number] for number in numbers) <= most * sharing:
            yield [bucket([entries[number] for number in numbers])]
        else:
            yield [bucket(owned[owner]) for owner in sorted(owned)]


def _kept_in_the_model(
    entries: tuple[BucketEntry, ...],
    held: Layout,
    worked: Layout,
    compute: Route,
    axes: tuple[str, ...] = ("dp",),
    phases: tuple[str, str] = ("keep", "keep"),
) -> Bucket:
    """Make a bucket whose gradients are already averaged. Gradients and parameters stay in the model."""
    first = entries[0].matrix
    return Bucket(
        axes=axes,
        entries=entries,
        model_layout=held,
        storage_layout=held,
        compute_layout=worked,
        gradient=Route((), first.grad_dtype),
        compute=compute,
        parameter=Route((), first.dtype),
        phases=phases,
    )


def _stored_in_slices(
    entries: tuple[BucketEntry, ...],
    grid: Grid,
    slices: SlicedBuffer,
    worked: Layout,
    compute: Route,
    axes: tuple[str, ...] = ("dp",),
    phases: tuple[str, str] = ("dp gather", "dp slice"),
) -> Bucket:
    """Make a bucket that is cut over dp between steps. The step averages its gradients."""
    first = entries[0].matrix
    return Bucket(
        axes=axes,
        entries=entries,
        model_layout=VirtualBuffer(slices.size),
        storage_layout=slices,
        compute_layout=worked,
        gradient=_dp_route(grid, Partial(), slices.cut, slices.size, first.grad_dtype),
        compute=compute,
        parameter=_dp_route(grid, slices.cut, Replicate(), slices.size, first.dtype),
        summands=grid.size("dp"),
        phases=phases,
    )


def _all_reduced(some: Sequence[BucketEntry], grid: Grid) -> Bucket:
    """Make a bucket that shares updates by all_reduce. A rank's buffer is zero outside its own matrices."""
    entries = _placed(some)
    whole = VirtualBuffer(padded(sum(entry.size for entry in entries), 1))
    compute = _dp_route(grid, Replicate(), Partial(), whole.size, WIRE)
    return _kept_in_the_model(entries, whole, whole, compute, phases=("keep", "updates all_reduce"))


def _all_gathered(some: Sequence[BucketEntry], grid: Grid) -> Bucket:
    """Make a bucket whose owners share updates by an all_gather. A single owner broadcasts instead."""
    owners, dp = [entry.workers.start for entry in some], grid.size("dp")
    filled, before = _filled(some, owners, dp)
    alone = len(set(owners)) == 1
    segment = max(1, *filled)
    offsets = [(0 if alone else place * segment) + own for place, own in zip(owners, before, strict=True)]
    entries = _placed(some, offsets)
    whole = VirtualBuffer(segment if alone else dp * segment)
    worked = SlicedBuffer("dp", whole.size, owner=owners[0] if alone else None)
    compute = _dp_route(grid, Replicate(), worked.cut, whole.size, WIRE)
    phases = ("keep", "update broadcast" if alone else "updates all_gather")
    return _kept_in_the_model(entries, whole, worked, compute, phases=phases)


@dataclass(frozen=True, slots=True)
class _List:
    """Matrices in a row, cut over ``dp`` into slices of ``length`` elements.

    An entry's offset says where it begins in the row. Its workers are the positions whose slices contain a
    part of the matrix.
    """

    entries: Sequence[BucketEntry]
    dp: int
    length: int

    @classmethod
    def of(cls, entries: Sequence[BucketEntry], dp: int) -> _List:
        length = padded(sum(entry.size for entry in entries), dp) // dp
        row = []
        for entry in _placed(entries):
            first, last = entry.offset, entry.offset + entry.size - 1
            row.append(replace(entry, workers=range(first // length, last // length + 1)))
        return cls(row, dp, length)

    def most_work(self) -> int:
        work = [0] * self.dp
        for entry in self.entries:
            for place in entry.workers:
                work[place] += entry.cost
        return max(work)

    def slices_of(self, some: Sequence[BucketEntry]) -> SlicedBuffer:
        """Return the layout of a bucket with these matrices, cut where the slices end."""
        if len(some) == len(self.entries):
            return SlicedBuffer("dp", self.dp * self.length)
        held = [0] * self.dp
        for entry in some:
            for place in entry.workers:
                end = min(entry.offset + entry.size, (place + 1) * self.length)
                held[place] += end - max(entry.offset, place * self.length)
        owner = min(some[0].workers.start, self.dp - 1)  # an empty matrix may come after the last slice
        if held[owner] == sum(held):
            return SlicedBuffer("dp", sum(held), owner=owner)
        return SlicedBuffer("dp", sum(held), tuple(held))


def _list_of(entries: Sequence[BucketEntry], dp: int) -> _List:
    """Order the matrices in two ways, and return the order in which the busiest position has less work.

    The first way spreads the matrices of each shape evenly, so that all slices have about equal work. The
    second way fills each slice with the largest matrix that still fits, so that few matrices lie in two
    slices.
    """
    spread = _List.of(_spread(entries), dp)
    filled = _List.of(_slice_by_slice(entries, spread.length), dp)
    return min(spread, filled, key=_List.most_work)


def _spread(entries: Sequence[BucketEntry]) -> list[BucketEntry]:
    many, before = Counter(entry.matrix.sides for entry in entries), Counter[tuple[int, int]]()
    keys = []
    for place, entry in enumerate(entries):
        sides = entry.matrix.sides
        keys.append(((2 * before[sides] + 1) / many[sides], place))
        before[sides] += 1
    return [entries[place] for _, place in sorted(keys)]


def _slice_by_slice(entries: Sequence[BucketEntry], length: int) -> list[BucketEntry]:
    left: dict[int, list[BucketEntry]] = {}
    for entry in reversed(entries):
        left.setdefault(entry.size, []).append(entry)
    sizes, found, room = sorted(left, reverse=True), list[BucketEntry](), 0
    while sizes:
        size = sizes[0] if room == 0 else next((size for size in sizes if size <= room), sizes[0])
        found.append(left[size].pop())
        room = (room - size) % length
        sizes = sizes if left[size] else [other for other in sizes if other != size]
    return found


def _sliced(
    entries: tuple[BucketEntry, ...],
    grid: Grid,
    slices: SlicedBuffer,
    gather: Literal["all", "boundary"],
) -> Bucket:
    """Make a bucket of ``zero1``, with the collectives that ``gather`` asks for."""
    worked: Layout = VirtualBuffer(slices.size)
    compute = _dp_route(grid, slices.cut, Replicate(), slices.size, WIRE)
    if slices.owner is not None and gather == "boundary":
        worked, compute = slices, Route((), WIRE)  # the only worker already has everything
    elif gather == "boundary":
        worked = WholeMatrices(("dp",), "piece")
        compute = Route((Exchange(("dp",), entries, slices, worked),), WIRE)
    return _stored_in_slices(entries, grid, slices, worked, compute)


def _layerwise_rounds(
    grid: Grid, sharing: int, change: Callable[[BucketEntry], BucketEntry] = lambda entry: entry
) -> RoundMaker:
    """Return a function that assigns matrices to owners over dp, the costliest first, and makes rounds.

    If ``sharing`` is the number of tp ranks, the tp ranks of a dp position share its matrices, and each
    matrix is gathered on one of them. If it is 1, every tp rank of a dp position works on all of its
    matrices. ``change`` may change the entries before they are assigned.
    """
    loads = [0] * (grid.size("dp") * sharing)

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        entries = [change(entry) for entry in _entries(run, grid)]
        shares = longest_first([entry.cost for entry in entries], loads)
        for entry, share in zip(entries, shares, strict=True):
            loads[share] += entry.cost
        dp = grid.size("dp")
        owners = [share % dp * sharing + share // dp for share in shares]  # even a few matrices use all of dp
        entries = _owned_by(entries, owners)
        weights = [sharing * weight for weight in _weights(entries)]
        return _in_rounds(entries, weights, limit, bucket, sharing)

    def bucket(some: Sequence[BucketEntry]) -> Bucket:
        return _layerwise_bucket(some, grid, sharing)

    return rounds


def _layerwise_bucket(some: Sequence[BucketEntry], grid: Grid, sharing: int) -> Bucket:
    """Make a bucket whose virtual buffer is ordered by the owners' dp positions, and cut between owners."""
    places = [entry.workers.start // sharing for entry in some]
    filled, before = _filled(some, places, grid.size("dp"))
    slices = SlicedBuffer("dp", sum(filled), tuple(filled))
    if len(set(places)) == 1:
        slices = SlicedBuffer("dp", sum(filled), owner=places[0])
    starts = [*accumulate(filled, initial=0)]
    entries = _placed(some, [starts[place] + own for place, own in zip(places, before, strict=True)])
    if sharing == 1:
        return _stored_in_slices(entries, grid, slices, slices, Route((), WIRE))
    entries = tuple(replace(entry, route=Route((), WIRE)) for entry in entries)
    worked = WholeMatrices(("dp", "tp"))
    compute = Route((Exchange(("tp",), entries, PiecesInSlices(slices), worked),), WIRE)
    phases = ("tp gather to owners", "tp scatter from owners")
    return _stored_in_slices(entries, grid, slices, worked, compute, worked.axes, phases)


def _filled(
    entries: Sequence[BucketEntry], owners: Sequence[int], positions: int
) -> tuple[list[int], list[int]]:
    """Return how many elements each position owns, and where each matrix begins among these elements."""
    filled, before = [0] * positions, []
    for entry, place in zip(entries, owners, strict=True):
        before.append(filled[place])
        filled[place] += entry.size
    return filled, before


def _owned_rounds(
    axes: tuple[str, ...],
    grid: Grid,
    assign: Literal["longest_first", "in_turn"] | Sequence[int],
) -> RoundMaker:
    """Return a function that makes rounds of one bucket each, whose owners are positions over ``axes``."""
    loads = [0] * grid.at(0).size(*axes)

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        entries = [BucketEntry(matrix, 0, matrix.numel, range(0), Route((), WIRE)) for matrix in run]
        owners = _owners(assign, entries, loads)
        for entry, position in zip(entries, owners, strict=True):
            loads[position] += entry.cost
        entries = _owned_by(entries, owners)
        jobs = _jobs(entries, [entry.size * WIRE.itemsize for entry in entries])
        for numbers in fill_rounds(jobs, limit):
            yield [_owned(axes, tuple(entries[number] for number in numbers))]

    return rounds


def _owned(axes: tuple[str, ...], entries: tuple[BucketEntry, ...]) -> Bucket:
    whole = WholeMatrices(axes)
    compute = Route((Exchange(axes, entries, LocalShards(), whole),), WIRE)
    phases = ("gather to owners", "scatter from owners")
    return _kept_in_the_model(entries, LocalShards(), whole, compute, axes, phases)


def one_by_one(plan: Plan) -> Plan:
    """Split an ``owner`` plan into rounds of one matrix, so that owners work one after the other."""
    owned = [(entry, bucket) for bucket in plan.buckets for entry in bucket.entries]
    buckets = []
    for number, (entry, bucket) in enumerate(sorted(owned, key=lambda pair: pair[0].matrix.index)):
        name, alone = entry.matrix.name, _owned(bucket.axes, (entry,))
        phases = f"gather {name} to its owner", f"scatter {name} from its owner"
        buckets.append(replace(alone, index=number, buffer=bucket.buffer, round=number, phases=phases))
    return replace(plan, buckets=tuple(buckets))


def _owners(
    assign: Literal["longest_first", "in_turn"] | Sequence[int],
    entries: Sequence[BucketEntry],
    loads: Sequence[int],
) -> list[int]:
    if assign == "longest_first":
        return longest_first([entry.cost for entry in entries], loads)
    if assign == "in_turn":
        return [entry.matrix.index % len(loads) for entry in entries]
    if isinstance(assign, str):
        raise StrategyError(f'owner knows assign="longest_first" and assign="in_turn"; got {assign!r}')
    owners = [assign[entry.matrix.index] for entry in entries]
    for entry, rank in zip(entries, owners, strict=True):
        if not 0 <= rank < len(loads):
            name = entry.matrix.name
            raise StrategyError(f"{name} is assigned to {rank}, which is not one of {len(loads)} ranks")
    return owners


@lru_cache(maxsize=1024)  # most layers of a model have equal shapes
def _tp_pieces(
    shape: tuple[int, ...], part: Part | None, cuts: tuple[Cut, ...], grid: Grid
) -> tuple[int, Route]:
    """Return the size of the largest tensor-parallel piece, and the route from a piece to the whole matrix.

    The route lists all lengths, because an even cut of a parameter may cut its matrices unevenly.
    """
    alike = Matrix(0, "", shape, cuts, part=part)
    boxes = [alike.box(grid.at(grid.rank({"tp": place}))) for place in range(grid.size("tp"))]
    largest, cut = max(box.numel for box in boxes), alike.cut("tp")
    if cut is None or grid.size("tp") == 1:
        return largest, Route((), WIRE)
    lengths = Shard(cut.dim, tuple(box.shape[cut.dim] for box in boxes))
    return largest, Route((Hop("tp", lengths, Replicate(), shape),), WIRE)


def _dp_route(grid: Grid, src: Placement, dst: Placement, size: int, dtype: torch.dtype) -> Route:
    """Make the route of a flat buffer along dp: one hop, or none if the placement does not change."""
    moves = grid.size("dp") > 1 and src != dst
    return Route((Hop("dp", src, dst, (size,)),) if moves else (), dtype)
