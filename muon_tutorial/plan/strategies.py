"""Builders that turn matrices and a grid into a plan. The same step runs every plan.

``docs/optimizer.md`` compares the strategies in a table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal, TypeAlias, TypeVar

import torch

from ..errors import StrategyError
from .assign import longest_first, newton_schulz_cost
from .bucket import (
    Bucket,
    BucketEntry,
    DistMeta,
    by_buffer,
    fill_buckets,
    largest_piece,
    leading,
    padded,
)
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

T = TypeVar("T")
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

    def bucket(run: Sequence[Matrix]) -> Bucket:
        entries = _virtual_entries(run, grid, [range(grid.size("dp"))] * len(run))
        return _kept_in_the_model(entries, LocalShards(), LocalShards(), Route((), WIRE))

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        weights = _weights(run, grid)
        size = limit.all if sum(weights) <= limit.all else limit.each
        return [[bucket(its)] for its in fill_buckets(run, weights, size)]

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

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        owners = [place_of[matrix.index] for matrix in run]

        def bucket(its: Sequence[int]) -> Bucket:
            places = _pick(owners, its)
            make = _all_reduced if back == "all_reduce" and len(set(places)) > 1 else _all_gathered
            return make(_pick(run, its), grid, places)

        work = [costs[matrix.index] for matrix in run]
        jobs = _jobs(work, [range(place, place + 1) for place in owners], _weights(run, grid))
        return _in_rounds(jobs, limit, bucket)

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
    rounds, slices differ in length, so each slice is reduced to its rank, and that rank later broadcasts the
    slice's new weights.

    Args:
        cut: what dp cuts into equal slices. ``"list"`` cuts one list of all matrices, as published. Shapes
            are mixed in the list, so that few matrices lie on several ranks, and all slices have about equal
            work. ``"bucket"`` cuts each bucket by itself, as in Megatron-LM's optimizer.
        gather: ``"all"`` gathers whole buckets over dp, as in the published proof of concept. ``"boundary"``
            gathers only matrices that cross a slice boundary, and only on the ranks that store a part of one.
        round_bytes: how many bytes of one owner's gradients a rank may hold in all rounds in flight
            (``rounds.IN_FLIGHT``, 3) together, or three times the largest matrix if that is more. For
            ``cut="bucket"``, ``round_bytes`` is the size of a bucket.

    Raises:
        StrategyError: ``gather`` or ``cut`` is unknown.

    Source: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.3.
    """
    if gather not in ("all", "boundary"):
        raise StrategyError(f'zero1 knows gather="all" and gather="boundary"; got {gather!r}')
    if cut not in ("list", "bucket"):
        raise StrategyError(f'zero1 knows cut="list" and cut="bucket"; got {cut!r}')

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        if cut == "list":
            return sliced(_list_of(run, grid), limit)
        runs = fill_buckets(run, _weights(run, grid), round_bytes)
        return (bucket for its in runs for bucket in sliced(_List.of(its, grid), everything))

    everything = Limit(sys.maxsize, sys.maxsize)

    def sliced(flat: _List, limit: Limit) -> Rounds:
        run, workers = flat.matrices, flat.workers

        def bucket(its: Sequence[int]) -> Bucket:
            entries = _virtual_entries(_pick(run, its), grid, _pick(workers, its))
            return _sliced(entries, grid, flat.slices_of(its), gather)

        costs = [newton_schulz_cost(matrix.sides) for matrix in run]
        return _in_rounds(_jobs(costs, workers, _weights(run, grid)), limit, bucket)

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
    entry_of = partial(_unplaced, grid=grid) if tp == "repeat" else None
    return _plan("layerwise", matrices, grid, "local", _layerwise_rounds(grid, entry_of), round_bytes)


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
    matrices to share, and sends l/(nT) times ``gram``'s bytes, counting both ways. ``scripts/gram.py``
    measures these costs.

    If a matrix's long side is not cut, all tp ranks work on the whole matrix, and gather it first if tp cuts
    it. These ranks apply the group's own recipe with the usual bits. Matrices that stay cut use the Gram form
    in fp32, with the group's ``ns_coefficients`` or with the recipe ``"gram"`` or ``"minimax"``. Other
    recipes are refused. The bits *differ* from those of one process, because the sum rounds differently. In
    Frobenius norm, an update is within 5 % of the update with ``orthogonalize="gram"`` in one process. The
    update's error and largest singular value are within 0.05 of stock's. ``orthogonalizers/gram.py`` states
    these bounds, and ``tests/step/test_gram.py`` checks them.
    """

    def entry(matrix: Matrix) -> BucketEntry:
        whole, cut, sides = _unplaced(matrix, grid), matrix.cut("tp"), matrix.sides
        dim = -1 if cut is None else cut.dim - leading(matrix)  # rows, columns or neither
        if not whole.route.hops or dim not in (0, 1) or sides[dim] < sides[1 - dim]:
            return whole
        return replace(whole, route=Route((), WIRE), gram=SummedGram(dim, sides[1 - dim]))

    return _plan("gram", matrices, grid, "local", _layerwise_rounds(grid, entry), round_bytes)


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
    return _plan("owner", matrices, grid, "averaged", rounds, round_bytes, any_cut=True)


def owner_per_replica(matrices: Sequence[Matrix], grid: Grid, *, round_bytes: int = ROUND_BYTES) -> Plan:
    """Each matrix is gathered on exactly one rank of every replica; nothing travels between replicas.

    A replica is a group of ranks that together hold one copy of all parameters: under HSDP, one shard group.
    ``owner`` orthogonalizes a matrix once and sends its update to all replicas. Here every replica repeats
    the work, so nothing travels over the links between replicas, which may be slow.
    """
    axes = tuple(axis for axis in grid.axes if any(axis in matrix.axes for matrix in matrices))
    rounds = _owned_rounds(axes, grid, "longest_first")
    return _plan("owner_per_replica", matrices, grid, "averaged", rounds, round_bytes, any_cut=True)


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


def fingerprint(plan: Plan) -> list[str]:
    """Return lines that must be the same on all ranks: one for the plan, one per bucket, one per matrix."""
    routes = [_routes_text(bucket) for bucket in plan.buckets]
    return [f"strategy {plan.strategy} on {plan.grid}", *routes] + [
        f"{entry.matrix.name}: shape {entry.matrix.shape}, {entry.matrix.dtype}, "
        f"cut {_cut_text(entry.matrix)}, in bucket {bucket.index} at {entry.offset}, "
        f"worked on at {'×'.join(bucket.axes)} {entry.workers.start} to {entry.workers.stop - 1}"
        f"{'' if entry.gram is None else ', by its Gram matrix'}"
        for bucket in plan.buckets
        for entry in bucket.entries
    ]


def _routes_text(bucket: Bucket) -> str:
    """Write a bucket's routes, their collectives and dtypes, which show the strategy's options."""
    ways = {"gradient": bucket.gradient, "compute": bucket.compute, "parameter": bucket.parameter}
    said = (f"{name} {_route_text(route)}" for name, route in ways.items())
    return f"bucket {bucket.index}, round {bucket.round}, routes: {', '.join(said)}"


def _route_text(route: Route) -> str:
    ends = [(move.axes, type(move.src).__name__, type(move.dst).__name__) for move in route.hops]
    moves = [f"{'×'.join(axes)} {src}→{dst}" for axes, src, dst in ends]
    return f"{' then '.join(moves) or 'stays'} in {route.dtype}"


def _cut_text(matrix: Matrix) -> str:
    cuts = (f"{axis} along {cut.dim} {cut.sizes or ''}".strip() for axis, cut in matrix.cuts)
    return ", ".join(cuts) or "nowhere"


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
    any_cut: bool = False,
) -> Plan:
    cut = [(matrix.name, axis) for matrix in matrices for axis in matrix.axes if axis != "tp"]
    if cut and not any_cut:
        raise StrategyError(
            f"{cut[0][0]} is sharded along {cut[0][1]!r}: strategy {name!r} needs parameters that only "
            "'tp' cuts. Strategy \"owner\" supports FSDP2 and any other sharding"
        )
    others = [axis for axis in grid.axes if axis not in ("dp", "tp") and grid.size(axis) > 1]
    if others and expects == "local":
        raise StrategyError(
            f"strategy {name!r} averages gradients over 'dp' and gathers pieces over 'tp', but would not "
            f"average over {others[0]!r} of the grid {grid}. Name the mesh's axes 'dp' and 'tp'"
        )
    buckets: list[Bucket] = []
    buffers = by_buffer(matrices)
    limit = Limit.of(round_bytes, len(buffers))
    for buffer, run in enumerate(buffers):
        for abreast in rounds(run, limit):
            number = buckets[-1].round + 1 if buckets else 0
            for it in abreast:
                buckets.append(replace(it, index=len(buckets), buffer=buffer, round=number))
    return Plan(name, grid, tuple(buckets), expects)


def _weights(run: Sequence[Matrix], grid: Grid) -> list[int]:
    """For each matrix, return the gradient bytes of its largest tensor-parallel piece."""
    return [largest_piece(matrix, grid) * matrix.grad_dtype.itemsize for matrix in run]


def _jobs(costs: Sequence[int], workers: Sequence[range], weights: Sequence[int]) -> list[Job]:
    return [Job(*job) for job in zip(range(len(costs)), weights, costs, workers, strict=True)]


def _in_rounds(
    jobs: Sequence[Job], limit: Limit, bucket: Callable[[Sequence[int]], Bucket], sharing: int = 1
) -> Rounds:
    """Yield the buckets of each round: one bucket if the round is within the limit, otherwise one per owner.

    So no rank ever holds more than one owner's bucket. ``sharing`` consecutive positions count as one owner,
    because each of them holds ``1 / sharing`` of every weight.
    """
    fits = sum(job.weight for job in jobs) <= limit.all * sharing
    most = limit.all if fits else limit.each
    for its in [range(len(jobs))] if fits else fill_rounds(jobs, limit):
        owners: dict[tuple[int, int], list[int]] = {}
        for number in its:
            places = jobs[number].places
            owners.setdefault((places.start // sharing, (places.stop - 1) // sharing), []).append(number)
        together = sum(jobs[number].weight for number in its) <= most * sharing
        yield [bucket(its)] if together else [bucket(owners[places]) for places in sorted(owners)]


def _pick(of: Sequence[T], numbers: Sequence[int]) -> list[T]:
    return [of[number] for number in numbers]


def _virtual_entries(
    run: Sequence[Matrix], grid: Grid, workers: Sequence[range], offsets: Iterable[int] | None = None
) -> tuple[BucketEntry, ...]:
    """Make entries with their tensor-parallel routes; without ``offsets``, they lie one after the other."""
    sizes = [largest_piece(matrix, grid) for matrix in run]
    starts = accumulate(sizes, initial=0) if offsets is None else offsets
    rows = zip(run, starts, sizes, workers, strict=False)
    return tuple(BucketEntry(it, at, size, its, _tp_route(it, grid)) for it, at, size, its in rows)


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
    """Make a bucket whose virtual buffer dp cuts between steps, and whose gradients the step averages."""
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


def _all_reduced(run: Sequence[Matrix], grid: Grid, owners: Sequence[int]) -> Bucket:
    """Make a bucket that shares updates by all_reduce. A rank's buffer is zero outside its own matrices."""
    entries = _virtual_entries(run, grid, [range(place, place + 1) for place in owners])
    whole = VirtualBuffer(padded(sum(entry.size for entry in entries), 1))
    compute = _dp_route(grid, Replicate(), Partial(), whole.size, WIRE)
    return _kept_in_the_model(entries, whole, whole, compute, phases=("keep", "updates all_reduce"))


def _all_gathered(run: Sequence[Matrix], grid: Grid, owners: Sequence[int]) -> Bucket:
    """Make a bucket whose owners share updates by an all_gather. A single owner broadcasts instead."""
    dp, alone = grid.size("dp"), len(set(owners)) == 1
    sizes = [largest_piece(matrix, grid) for matrix in run]
    filled, before = _filled(sizes, owners, dp)
    segment = max(1, *filled)
    offsets = [(0 if alone else place * segment) + own for place, own in zip(owners, before, strict=True)]
    entries = _virtual_entries(run, grid, [range(place, place + 1) for place in owners], offsets)
    whole = VirtualBuffer(segment if alone else dp * segment)
    worked = SlicedBuffer("dp", whole.size, owner=owners[0] if alone else None)
    compute = _dp_route(grid, Replicate(), worked.cut, whole.size, WIRE)
    phases = ("keep", "update broadcast" if alone else "updates all_gather")
    return _kept_in_the_model(entries, whole, worked, compute, phases=phases)


@dataclass(frozen=True, slots=True)
class _List:
    """A sequence of matrices, cut over ``dp`` into slices of ``length`` elements.

    ``ends`` says where each matrix ends, in elements. ``workers`` lists the positions whose slices contain a
    part of the matrix.
    """

    matrices: Sequence[Matrix]
    dp: int
    length: int
    sizes: list[int]
    ends: list[int]
    workers: list[range]

    @classmethod
    def of(cls, run: Sequence[Matrix], grid: Grid) -> _List:
        sizes, dp = [largest_piece(matrix, grid) for matrix in run], grid.size("dp")
        length, ends = padded(sum(sizes), dp) // dp, [*accumulate(sizes)]
        runs = zip(ends, sizes, strict=True)
        workers = [range((end - size) // length, (end - 1) // length + 1) for end, size in runs]
        return cls(run, dp, length, sizes, ends, workers)

    def most_work(self) -> int:
        work = [0] * self.dp
        for matrix, places in zip(self.matrices, self.workers, strict=True):
            for place in places:
                work[place] += newton_schulz_cost(matrix.sides)
        return max(work)

    def slices_of(self, its: Sequence[int]) -> SlicedBuffer:
        """Return the layout of a bucket with these matrices, cut where the slices end."""
        if len(its) == len(self.matrices):
            return SlicedBuffer("dp", self.dp * self.length)
        held = [0] * self.dp
        for number in its:
            start, end = self.ends[number] - self.sizes[number], self.ends[number]
            for place in self.workers[number]:
                held[place] += min(end, (place + 1) * self.length) - max(start, place * self.length)
        owner = min(self.workers[its[0]].start, self.dp - 1)  # an empty matrix may come after the last slice
        if held[owner] == sum(held):
            return SlicedBuffer("dp", sum(held), owner=owner)
        return SlicedBuffer("dp", sum(held), tuple(held))


def _list_of(run: Sequence[Matrix], grid: Grid) -> _List:
    """Order the matrices in two ways, and return the order in which the busiest position has less work.

    The first way spreads the matrices of each shape evenly, so that all slices have about equal work. The
    second way fills each slice with the largest matrix that still fits, so that few matrices lie in two
    slices.
    """
    spread = _List.of(_spread(run), grid)
    filled = _List.of(_slice_by_slice(run, grid, spread.length), grid)
    return min(spread, filled, key=_List.most_work)


def _spread(run: Sequence[Matrix]) -> list[Matrix]:
    many, before = Counter(matrix.sides for matrix in run), Counter[tuple[int, int]]()
    keys = []
    for place, matrix in enumerate(run):
        keys.append(((2 * before[matrix.sides] + 1) / many[matrix.sides], place))
        before[matrix.sides] += 1
    return [run[place] for _, place in sorted(keys)]


def _slice_by_slice(run: Sequence[Matrix], grid: Grid, length: int) -> list[Matrix]:
    left: dict[int, list[Matrix]] = {}
    for matrix in reversed(run):
        left.setdefault(largest_piece(matrix, grid), []).append(matrix)
    sizes, found, room = sorted(left, reverse=True), list[Matrix](), 0
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
        worked = WholeMatrices(("dp",), "piece", "holders")
        compute = Route((Exchange(("dp",), entries, slices, worked),), WIRE)
    return _stored_in_slices(entries, grid, slices, worked, compute)


def _layerwise_rounds(grid: Grid, entry_of: Callable[[Matrix], BucketEntry] | None) -> RoundMaker:
    """Return a function that assigns matrices to owners over dp, the costliest first, and makes rounds.

    If ``entry_of`` is None, the tp ranks of a dp position share its matrices, and each matrix is gathered on
    one of them. Otherwise ``entry_of`` makes each matrix's entry with its route, and every tp rank of a dp
    position works on all of its matrices.
    """
    dp, tp = grid.size("dp"), grid.size("tp") if entry_of is None else 1
    loads = [0] * (dp * tp)

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        entries = [_unplaced(matrix, grid) if entry_of is None else entry_of(matrix) for matrix in run]
        costs = [entry.cost for entry in entries]
        shares = longest_first(costs, loads)
        for cost, share in zip(costs, shares, strict=True):
            loads[share] += cost
        owners = [share % dp * tp + share // dp for share in shares]  # even a few matrices use all of dp
        workers = [range(place, place + 1) for place in owners]
        jobs = _jobs(costs, workers, [tp * weight for weight in _weights(run, grid)])

        def bucket(its: Sequence[int]) -> Bucket:
            return _layerwise_bucket(_pick(entries, its), grid, _pick(owners, its), tp)

        return _in_rounds(jobs, limit, bucket, tp)

    return rounds


def _unplaced(matrix: Matrix, grid: Grid) -> BucketEntry:
    """Make an entry with its tensor-parallel route, but without an offset in a buffer and without workers."""
    return BucketEntry(matrix, 0, largest_piece(matrix, grid), range(0), _tp_route(matrix, grid))


def _layerwise_bucket(run: Sequence[BucketEntry], grid: Grid, owners: Sequence[int], tp: int) -> Bucket:
    """Make a bucket whose virtual buffer is ordered by the owners' dp positions, and cut between owners.

    ``owners`` are dp positions, or ranks if ``tp`` ranks at each dp position share its matrices.
    """
    places, sizes = [owner // tp for owner in owners], [entry.size for entry in run]
    filled, before = _filled(sizes, places, grid.size("dp"))
    slices = SlicedBuffer("dp", sum(filled), tuple(filled))
    if len(set(places)) == 1:
        slices = SlicedBuffer("dp", sum(filled), owner=places[0])
    starts = [*accumulate(filled, initial=0)]
    offsets = [starts[place] + own for place, own in zip(places, before, strict=True)]
    rows = zip(run, offsets, owners, strict=True)
    entries = tuple(replace(it, offset=at, workers=range(owner, owner + 1)) for it, at, owner in rows)
    if tp == 1:
        return _stored_in_slices(entries, grid, slices, slices, Route((), WIRE))
    entries = tuple(replace(entry, route=Route((), WIRE)) for entry in entries)
    worked = WholeMatrices(("dp", "tp"), "matrix", "owner")
    compute = Route((Exchange(("tp",), entries, PiecesInSlices(slices), worked),), WIRE)
    phases = ("tp gather to owners", "tp scatter from owners")
    return _stored_in_slices(entries, grid, slices, worked, compute, worked.axes, phases)


def _filled(sizes: Sequence[int], owners: Sequence[int], positions: int) -> tuple[list[int], list[int]]:
    """Return how many elements each position owns, and where each matrix begins among these elements."""
    filled, before = [0] * positions, []
    for size, place in zip(sizes, owners, strict=True):
        before.append(filled[place])
        filled[place] += size
    return filled, before


def _owned_rounds(
    axes: tuple[str, ...],
    grid: Grid,
    assign: Literal["longest_first", "in_turn"] | Sequence[int],
) -> RoundMaker:
    """Return a function that makes rounds of one bucket each, whose owners are positions over ``axes``."""
    loads = [0] * grid.at(0).size(*axes)

    def rounds(run: Sequence[Matrix], limit: Limit) -> Rounds:
        costs = [newton_schulz_cost(matrix.sides) for matrix in run]
        owners = _owners(assign, run, costs, loads)
        for cost, position in zip(costs, owners, strict=True):
            loads[position] += cost
        workers = [range(position, position + 1) for position in owners]
        jobs = _jobs(costs, workers, [matrix.numel * WIRE.itemsize for matrix in run])
        for its in fill_rounds(jobs, limit):
            entries = [
                BucketEntry(run[number], 0, run[number].numel, workers[number], Route((), WIRE))
                for number in its
            ]
            yield [_owned(axes, tuple(entries))]

    return rounds


def _owned(axes: tuple[str, ...], entries: tuple[BucketEntry, ...]) -> Bucket:
    whole = WholeMatrices(axes, "matrix", "owner")
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
    run: Sequence[Matrix],
    costs: Sequence[int],
    loads: Sequence[int],
) -> list[int]:
    if assign == "longest_first":
        return longest_first(costs, loads)
    if assign == "in_turn":
        return [matrix.index % len(loads) for matrix in run]
    if isinstance(assign, str):
        raise StrategyError(f'owner knows assign="longest_first" and assign="in_turn"; got {assign!r}')
    owners = [assign[matrix.index] for matrix in run]
    for it, rank in zip(run, owners, strict=True):
        if not 0 <= rank < len(loads):
            raise StrategyError(f"{it.name} is assigned to {rank}, which is not one of {len(loads)} ranks")
    return owners


def _tp_route(matrix: Matrix, grid: Grid) -> Route:
    """Make the route from a tensor-parallel piece to the whole matrix.

    The route lists all lengths, because an even cut of a parameter may cut its matrices unevenly.
    """
    return _tp_route_of(matrix.shape, matrix.part, matrix.cuts, grid)


@lru_cache(maxsize=1024)  # most layers of a model have equal shapes
def _tp_route_of(shape: tuple[int, ...], part: Part | None, cuts: tuple[Cut, ...], grid: Grid) -> Route:
    alike = Matrix(0, "", shape, cuts, part=part)
    cut = alike.cut("tp")
    if cut is None or grid.size("tp") == 1:
        return Route((), WIRE)
    boxes = [alike.box(grid.at(grid.rank({"tp": place}))) for place in range(grid.size("tp"))]
    lengths = Shard(cut.dim, tuple(box.shape[cut.dim] if box.numel else 0 for box in boxes))
    return Route((Hop("tp", lengths, Replicate(), shape),), WIRE)


def _dp_route(grid: Grid, src: Placement, dst: Placement, size: int, dtype: torch.dtype) -> Route:
    """Make the route of a flat buffer along dp: one hop, or none if the placement does not change."""
    moves = grid.size("dp") > 1 and src != dst
    return Route((Hop("dp", src, dst, (size,)),) if moves else (), dtype)
