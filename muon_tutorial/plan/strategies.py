"""Builders that turn matrices and a grid into a plan. Strategies differ in data, not in code.

- ``replicated``: every rank orthogonalizes everything (DDP with ``torch.optim.Muon``): the baseline.
- ``round_robin``: matrix ``i`` belongs to position ``i % dp``; the answers are shared by an all_reduce of a
buffer
  that is zero elsewhere, or by an all_gather (the first distributed Muon, KellerJordan/modded-nanogpt 2024).
- ``zero1``: flat buckets cut over dp; dp gather → tp gather → Newton–Schulz → tp slice → dp slice
  (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.3).
- ``layerwise``: each matrix lives at one dp position: gradients are summed there, parameters sent from
  there, and momentum never moves (Megatron-LM's layer-wise optimizer; ``Owned`` parameters in torchtitan).
- ``owner``: each matrix whole on exactly one rank and back, over any sharding, many in one exchange.
- ``owner_per_replica``: the same within every replica, so that nothing travels between replicas.
- ``gram``: layerwise, but a matrix whose long side tensor parallelism cuts is nowhere whole: one all_reduce
  of its Gram matrix takes the place of the tp gather. Equal to one process within a bound, not bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal

import torch

from ..errors import StrategyError
from .assign import longest_first, newton_schulz_cost
from .bucket import (
    Bucket,
    BucketEntry,
    DistMeta,
    TpGather,
    buffer_key,
    fill_buckets,
    largest_piece,
    leading,
    padded,
)
from .exchange import Exchange, Layout, LocalShards, SlicedBuffer, VirtualBuffer, WholeMatrices
from .grid import Coordinate, Grid
from .layout import Hop, Partial, Placement, Replicate, Route, Shard
from .matrix import Cut, Matrix, Part, SummedGram

WIRE = torch.bfloat16
BUCKET_BYTES = 25_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a step does, as data: which buckets, held how, moved along which routes.

    ``expects`` is what a step must find in ``p.grad``: the rank's own gradient, or one already averaged over
    dp.
    """

    strategy: str
    grid: Grid
    buckets: tuple[Bucket, ...]
    expects: Literal["local", "averaged"]

    def dist_meta(self, at: Coordinate) -> tuple[DistMeta, ...]:
        """The master plan as one rank reads it: one entry a matrix, in the order of the buckets."""
        return tuple(meta for bucket in self.buckets for meta in bucket.dist_meta(at))

    def __str__(self) -> str:
        """What to choose a strategy by: buckets, the balance of the work, and the largest buffer."""
        matrices = sum(len(bucket.entries) for bucket in self.buckets)
        gradients = "each rank's own" if self.expects == "local" else "already averaged"
        peak = max((peak_buffer(self, self.grid.at(rank)) for rank in self.grid.ranks[:64]), default=0)
        return (
            f"{self.strategy} on {self.grid}: {matrices} matrices in {len(self.buckets)} buckets, gradients "
            f"{gradients}; the busiest rank has {plan_imbalance(self):.2f} fair shares of Newton–Schulz; "
            f"largest flat buffer {peak:,} bytes"
        )

    def workers(self, matrix: int) -> tuple[int, ...]:
        """The ranks that orthogonalize a matrix, by its index."""
        coordinates = [self.grid.at(rank) for rank in self.grid.ranks]
        found = next((b, e) for b in self.buckets for e in b.entries if e.matrix.index == matrix)
        return tuple(at.rank for at in coordinates if found[0].works_on(found[1], at))


Builder = Callable[..., Plan]
"""``(matrices, grid, **options) -> Plan``, with ``matrices: Sequence[Matrix]`` and ``grid: Grid``."""


def replicated(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    tp_gather: TpGather = "matrix",
) -> Plan:
    """Every rank keeps and orthogonalizes every matrix: the baseline. Only tensor-parallel pieces travel.

    Args:
        bucket_bytes: most gradient bytes in a bucket, per tensor-parallel rank.
        tp_gather: as in ``zero1``.
    """

    def bucket(index: int, buffer: int, run: Sequence[Matrix]) -> Bucket:
        entries = _virtual_entries(run, grid, [range(grid.size("dp"))] * len(run))
        here, nothing = LocalShards(), Route((), run[0].grad_dtype)
        stay = Route((), run[0].dtype)
        return Bucket(index, buffer, ("dp",), entries, here, here, here, nothing, Route((), WIRE), stay)

    return _plan("replicated", matrices, grid, bucket_bytes, "averaged", bucket, tp_gather=tp_gather)


def round_robin(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    back: Literal["all_reduce", "all_gather"] = "all_reduce",
    bucket_bytes: int = BUCKET_BYTES,
    tp_gather: TpGather = "matrix",
) -> Plan:
    """Matrix ``i`` is orthogonalized at dp position ``i % dp``; everyone applies everything.

    Args:
        back: how the answers are shared: ``"all_reduce"`` of a buffer that is zero where the rank does not
        own
            (as published), or ``"all_gather"``, at half the bytes.

    Raises:
        StrategyError: ``back`` is not known.
    """
    if back not in ("all_reduce", "all_gather"):
        raise StrategyError(f'round_robin knows back="all_reduce" and back="all_gather"; got {back!r}')

    def bucket(index: int, buffer: int, run: Sequence[Matrix]) -> Bucket:
        owners = [matrix.index % grid.size("dp") for matrix in run]
        return (_summed if back == "all_reduce" else _collected)(index, buffer, run, grid, owners)

    return _plan("round_robin", matrices, grid, bucket_bytes, "averaged", bucket, tp_gather=tp_gather)


def zero1(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    gather: Literal["all", "boundary"] = "all",
    bucket_bytes: int = BUCKET_BYTES,
    tp_gather: TpGather = "matrix",
) -> Plan:
    """Momentum cut over dp in flat buckets; each rank orthogonalizes the matrices its slice touches.

    Args:
        gather: ``"all"`` gathers whole buckets over dp, as the published proof of concept does;
        ``"boundary"``
            only the matrices that straddle a slice boundary, to the ranks that keep a part of them.
        bucket_bytes: most gradient bytes in a bucket, per tensor-parallel rank; 25 MB unless told.
        tp_gather: over tp, one all_gather a ``"matrix"``, or one a ``"bucket"``: the same bytes in fewer
            requests, while all whole matrices of a bucket that a rank works on are in memory at once.

    Raises:
        StrategyError: ``gather`` or ``tp_gather`` is not known.
    """
    if gather not in ("all", "boundary"):
        raise StrategyError(f'zero1 knows gather="all" and gather="boundary"; got {gather!r}')

    def bucket(index: int, buffer: int, run: Sequence[Matrix]) -> Bucket:
        dp = grid.size("dp")
        sizes = [largest_piece(matrix, grid) for matrix in run]
        size = padded(sum(sizes), dp)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        step = size // dp  # workers: the positions whose slice touches the matrix
        workers = [range(a // step, (a + n - 1) // step + 1) for a, n in zip(starts, sizes, strict=True)]
        return _sliced(index, buffer, _virtual_entries(run, grid, workers), grid, size, gather)

    return _plan("zero1", matrices, grid, bucket_bytes, "local", bucket, tp_gather=tp_gather)


def layerwise(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    tp_gather: TpGather = "matrix",
) -> Plan:
    """Each matrix at one dp position: its momentum is kept there, and Newton–Schulz runs there.

    Gradients travel to the owners, summed, and stepped parameters from them to all: as many bytes as ZeRO-1
    with AdamW, together over the ranks. Slices are as long as what their owners have, so that nothing is
    padded but what tensor parallelism cut unevenly. Owners share each bucket's Newton–Schulz cost, longest
    first; along tp, every rank at the owner's position gathers the matrix and works on it.

    Sources: Megatron-LM, ``core/optimizer/layer_wise_optimizer.py``; torchtitan, pull request 3719.
    """
    bucket = _shared_out(grid, lambda matrix: _unplaced(matrix, grid))
    return _plan("layerwise", matrices, grid, bucket_bytes, "local", bucket, tp_gather=tp_gather)


def gram(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    least_aspect: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Newton–Schulz without a gather: where tp cuts a matrix's long side, its shards never meet.

    For X, n × l, cut along l, each rank multiplies its own columns into an n × n matrix. One all_reduce over
    tp adds these up to the Gram matrix XXᵀ: a bucket's together, fp32, upper triangles alone. Every rank of
    tp iterates on it, and multiplies its own shard by the outcome. A tall matrix cut along its rows goes the
    same way with XᵀX.

    Against a gather of the whole on T ranks, whose iterations each rank repeats (``zero1``, ``layerwise``): a
    rank sends 2(n + 1)/l times the bytes, so less from 2:1 on, and its work is 4n²l/T + 34n³ operations for
    five iterations in place of 20n²l + 10n³. ``owner`` divides all of that by T where there are at least T
    matrices to share out, and sends l/(nT) times ``gram``'s bytes, there and back. So ``owner`` sends less up
    to an aspect ratio of T, and computes less up to about 2T. ``scripts/gram.py`` measures.

    Over dp it works like ``layerwise``, and not like ``replicated``: a matrix whose work is divided over tp
    should not be worked on again at every dp position, nor its momentum kept at each. Gradients are local,
    the step averages them. With dp=1 there is no difference.

    A matrix that is cut along its short side, or through the numbers of a stack, is gathered as by
    ``layerwise``, and so is one that is not cut: their Gram matrix, l × l, would take more bytes and
    operations than the gather. They meet the group's own recipe, to the bit. What stays cut meets the Gram
    form, in fp32, of the group's ``ns_coefficients``, or of ``orthogonalize="gram"`` or ``"minimax"``; other
    recipes are refused. It is *not* bitwise the single process's: the sum rounds otherwise, by one part in
    10⁷ of the Gram matrix. An update is within 5 % of that of ``orthogonalize="gram"`` in one process, in
    Frobenius norm (measured: 0.8 % with Keller Jordan's coefficients, 2 % with minimax's), and its quality,
    error and largest singular value, within 0.05 of stock's: ``orthogonalizers/gram.py`` states these bounds,
    and ``tests/step/test_gram.py`` holds them. All ranks of tp iterate on the same bits.

    Args:
        least_aspect: the least length of the cut side over the other's that a matrix stays cut at: ``2.0``
            gathers squares too; below 1, matrices cut along their short side may stay cut.

    Raises:
        StrategyError: ``least_aspect`` is not positive.
    """
    if not least_aspect > 0:
        raise StrategyError(f"gram knows a least_aspect above 0; got {least_aspect!r}")

    def entry(matrix: Matrix) -> BucketEntry:
        whole = _unplaced(matrix, grid)
        summed = _summed_gram(matrix, least_aspect) if whole.route.hops else None
        return whole if summed is None else replace(whole, route=Route((), WIRE), gram=summed)

    return _plan("gram", matrices, grid, bucket_bytes, "local", _shared_out(grid, entry))


def owner(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    assign: Literal["longest_first", "in_turn"] | Sequence[int] = "longest_first",
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Each matrix whole on exactly one rank and back, over any sharding; one exchange a bucket each way.

    Args:
        assign: ``"longest_first"`` balances Newton–Schulz cost over the ranks, ``"in_turn"`` goes by index,
        and a
            sequence names the rank of each matrix.

    Raises:
        StrategyError: ``assign`` is not known, or names ranks that are not on the grid.
    """
    bucket = _owned(grid.axes, grid, assign)
    return _plan("owner", matrices, grid, bucket_bytes, "averaged", bucket, any_cut=True)


def owner_per_replica(matrices: Sequence[Matrix], grid: Grid, *, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """Each matrix whole on exactly one rank of every replica: nothing travels between replicas.

    A replica is a group of ranks that hold every matrix once between them: the ranks along the axes that cut
    any matrix (under HSDP, those of one shard group). ``owner`` orthogonalizes a matrix once and sends its
    update to all replicas; here every replica does the work again, and slow links between them stay idle.
    """
    axes = tuple(axis for axis in grid.axes if any(axis in matrix.axes for matrix in matrices))
    bucket = _owned(axes, grid, "longest_first")
    return _plan("owner_per_replica", matrices, grid, bucket_bytes, "averaged", bucket, any_cut=True)


STRATEGIES: dict[str, Builder] = {
    "replicated": replicated,
    "round_robin": round_robin,
    "zero1": zero1,
    "layerwise": layerwise,
    "owner": owner,
    "owner_per_replica": owner_per_replica,
    "gram": gram,
}
"""The builders, by the names that the optimizer and the command line know."""


def find_builder(strategy: str | Builder) -> Builder:
    """The builder of that name, or the builder itself.

    Raises:
        StrategyError: no strategy has that name.
    """
    if callable(strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise StrategyError(f"unknown strategy {strategy!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[strategy]


def fingerprint(plan: Plan) -> list[str]:
    """What ranks must agree on before they step: how each bucket travels, and a line a matrix, in order."""
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
    """What tells apart two options of one strategy: who asks for which collectives, in which dtype."""
    ways = {"gradient": bucket.gradient, "compute": bucket.compute, "parameter": bucket.parameter}
    said = (f"{name} {_route_text(route)}" for name, route in ways.items())
    packed = ", tp gathers together" if bucket.tp_gather == "bucket" else ""
    return f"bucket {bucket.index} travels so: {', '.join(said)}{packed}"


def _route_text(route: Route) -> str:
    moves = []
    for move in route.hops:
        assert isinstance(move, Hop | Exchange)
        axes = (move.axis,) if isinstance(move, Hop) else move.axes
        moves.append(f"{'×'.join(axes)} {type(move.src).__name__}→{type(move.dst).__name__}")
    return f"{' then '.join(moves) or 'stays'} in {route.dtype}"


def _cut_text(matrix: Matrix) -> str:
    return (
        ", ".join(f"{axis} along {cut.dim} {cut.sizes or ''}".strip() for axis, cut in matrix.cuts)
        or "nowhere"
    )


def plan_imbalance(plan: Plan) -> float:
    """The most Newton–Schulz work of any rank over a fair share, all buckets together: 1.0 is perfect.

    Work that several ranks repeat counts for each; where all do everything, this is the number of ranks.
    """
    once = sum(newton_schulz_cost(entry.matrix.sides) for bucket in plan.buckets for entry in bucket.entries)
    return max(work_by_position(plan)) * plan.grid.world_size / once if once else 1.0


def work_by_position(plan: Plan) -> list[int]:
    """Newton–Schulz work of one iteration at each position of the buckets' group, in operations.

    All buckets of a plan count their workers in one group: ``plan.buckets[0].axes``. Work is added at the
    first worker and taken away after the last, so that thousands of them cost no more than one.
    """
    positions = plan.grid.at(0).size(*plan.buckets[0].axes) if plan.buckets else 0
    change = [0] * (positions + 1)
    for bucket in plan.buckets:
        for entry in bucket.entries:
            change[entry.workers.start] += entry.cost
            change[entry.workers.stop] -= entry.cost
    return list(accumulate(change[:-1]))


def peak_buffer(plan: Plan, at: Coordinate) -> int:
    """Bytes of the largest flat buffer that a rank holds for any bucket."""
    flat = (
        bucket.length(layout, at) * route.dtype.itemsize
        for bucket in plan.buckets
        for layout, route in (
            (bucket.model_layout, bucket.gradient),
            (bucket.storage_layout, bucket.compute),
            (bucket.compute_layout, bucket.compute),
            (bucket.model_layout, bucket.parameter),
        )
    )
    return max([*flat, *(bucket.gram_bytes(at) for bucket in plan.buckets)], default=0)


def _plan(
    name: str,
    matrices: Sequence[Matrix],
    grid: Grid,
    bucket_bytes: int,
    expects: Literal["local", "averaged"],
    bucket: Callable[[int, int, Sequence[Matrix]], Bucket],
    any_cut: bool = False,
    tp_gather: TpGather = "matrix",
) -> Plan:
    if tp_gather not in ("matrix", "bucket"):
        raise StrategyError(f'{name} knows tp_gather="matrix" and tp_gather="bucket"; got {tp_gather!r}')
    if not any_cut:
        _check_only_tp_cuts(name, matrices)
    if expects == "local":
        _check_only_dp_and_tp(name, grid)
    weights = [largest_piece(matrix, grid) * matrix.grad_dtype.itemsize for matrix in matrices]
    runs = list(fill_buckets(matrices, weights, bucket_bytes))
    buffers = list(dict.fromkeys(buffer_key(run[0]) for run in runs))
    buckets = [bucket(index, buffers.index(buffer_key(run[0])), run) for index, run in enumerate(runs)]
    return Plan(name, grid, tuple(replace(it, tp_gather=tp_gather) for it in buckets), expects)


def _check_only_tp_cuts(name: str, matrices: Sequence[Matrix]) -> None:
    for matrix in matrices:
        others = [axis for axis in matrix.axes if axis != "tp"]
        if others:
            raise StrategyError(
                f"{matrix.name} is sharded along {others[0]!r}: strategy {name!r} takes parameters that are "
                "whole along all axes but 'tp'. Strategy \"owner\" takes FSDP2's and any others"
            )


def _check_only_dp_and_tp(name: str, grid: Grid) -> None:
    others = [axis for axis in grid.axes if axis not in ("dp", "tp") and grid.size(axis) > 1]
    if others:
        raise StrategyError(
            f"strategy {name!r} averages gradients over 'dp' and gathers pieces over 'tp'; nobody would "
            f"average over {others[0]!r} of the grid {grid}. Name the axes of the mesh 'dp' and 'tp'"
        )


def _virtual_entries(run: Sequence[Matrix], grid: Grid, workers: Sequence[range]) -> tuple[BucketEntry, ...]:
    """Entries one after the other in the virtual buffer, each with its tensor-parallel route."""
    sizes = [largest_piece(matrix, grid) for matrix in run]
    return tuple(
        BucketEntry(matrix, sum(sizes[:i]), sizes[i], workers[i], _tp_route(matrix, grid))
        for i, matrix in enumerate(run)
    )


def _summed(index: int, buffer: int, run: Sequence[Matrix], grid: Grid, owners: Sequence[int]) -> Bucket:
    """Out: every rank keeps the buffer, zeros where it is not the owner. Back: the sum over ranks."""
    entries = _virtual_entries(run, grid, [range(place, place + 1) for place in owners])
    size = padded(sum(entry.size for entry in entries), 1)
    compute = _route(grid, "dp", Replicate(), Partial(), size, WIRE)
    return Bucket(
        index=index,
        buffer=buffer,
        axes=("dp",),
        entries=entries,
        model_layout=VirtualBuffer(size),
        storage_layout=VirtualBuffer(size),
        compute_layout=VirtualBuffer(size),
        gradient=Route((), run[0].grad_dtype),
        compute=compute,
        parameter=Route((), run[0].dtype),
        phases=("keep", "updates all_reduce"),
    )


def _collected(index: int, buffer: int, run: Sequence[Matrix], grid: Grid, owners: Sequence[int]) -> Bucket:
    """Out: every rank keeps its own segment of the buffer. Back: all segments, one after the other."""
    dp = grid.size("dp")
    sizes = [largest_piece(matrix, grid) for matrix in run]
    segment, ends = max(1, *_filled(sizes, owners, dp)), [0] * dp
    entries = []
    for matrix, size, place in zip(run, sizes, owners, strict=True):
        offset = place * segment + ends[place]
        entries.append(BucketEntry(matrix, offset, size, range(place, place + 1), _tp_route(matrix, grid)))
        ends[place] += size
    whole = VirtualBuffer(dp * segment)
    return Bucket(
        index=index,
        buffer=buffer,
        axes=("dp",),
        entries=tuple(entries),
        model_layout=whole,
        storage_layout=whole,
        compute_layout=SlicedBuffer("dp", whole.size),
        gradient=Route((), run[0].grad_dtype),
        compute=_route(grid, "dp", Replicate(), Shard(0), whole.size, WIRE),
        parameter=Route((), run[0].dtype),
        phases=("keep", "updates all_gather"),
    )


def _sliced(
    index: int,
    buffer: int,
    entries: tuple[BucketEntry, ...],
    grid: Grid,
    size: int,
    gather: Literal["all", "boundary"],
) -> Bucket:
    """The virtual buffer, cut over dp between steps."""
    first, slices = entries[0].matrix, SlicedBuffer("dp", size)
    worked: Layout = VirtualBuffer(size)
    compute = _route(grid, "dp", Shard(0), Replicate(), size, WIRE)
    if gather == "boundary":
        worked = WholeMatrices(("dp",), "piece", "holders")
        compute = Route((Exchange(("dp",), entries, slices, worked),), WIRE)
    return Bucket(
        index=index,
        buffer=buffer,
        axes=("dp",),
        entries=entries,
        model_layout=VirtualBuffer(size),
        storage_layout=slices,
        compute_layout=worked,
        gradient=_route(grid, "dp", Partial(), Shard(0), size, first.grad_dtype),
        compute=compute,
        parameter=_route(grid, "dp", Shard(0), Replicate(), size, first.dtype),
        summands=grid.size("dp"),
    )


def _shared_out(
    grid: Grid, entry_of: Callable[[Matrix], BucketEntry]
) -> Callable[[int, int, Sequence[Matrix]], Bucket]:
    """Makes buckets whose matrices live with owners over dp, the costliest given out first."""
    loads = [0] * grid.size("dp")

    def bucket(index: int, buffer: int, run: Sequence[Matrix]) -> Bucket:
        entries = [entry_of(matrix) for matrix in run]
        costs = [entry.cost for entry in entries]
        owners = longest_first(costs, loads)
        for cost, place in zip(costs, owners, strict=True):
            loads[place] += cost
        return _lived_in(index, buffer, entries, grid, owners)

    return bucket


def _unplaced(matrix: Matrix, grid: Grid) -> BucketEntry:
    """A matrix that tensor parallelism gathers, before it has a place in a buffer and a worker."""
    return BucketEntry(matrix, 0, largest_piece(matrix, grid), range(0), _tp_route(matrix, grid))


def _lived_in(
    index: int, buffer: int, run: Sequence[BucketEntry], grid: Grid, owners: Sequence[int]
) -> Bucket:
    """The virtual buffer, one owner's matrices after the other's, and cut between owners."""
    first, sizes = run[0].matrix, [entry.size for entry in run]
    filled = _filled(sizes, owners, grid.size("dp"))
    ends = list(accumulate(filled, initial=0))
    entries = []
    for entry, place in zip(run, owners, strict=True):
        entries.append(replace(entry, offset=ends[place], workers=range(place, place + 1)))
        ends[place] += entry.size
    slices = SlicedBuffer("dp", sum(filled), tuple(filled))
    return Bucket(
        index=index,
        buffer=buffer,
        axes=("dp",),
        entries=tuple(entries),
        model_layout=VirtualBuffer(slices.size),
        storage_layout=slices,
        compute_layout=slices,
        gradient=_route(grid, "dp", Partial(), slices.cut, slices.size, first.grad_dtype),
        compute=Route((), WIRE),
        parameter=_route(grid, "dp", slices.cut, Replicate(), slices.size, first.dtype),
        summands=grid.size("dp"),
        phases=("keep", "keep"),
    )


def _filled(sizes: Sequence[int], owners: Sequence[int], positions: int) -> list[int]:
    """Elements that each position owns of a bucket."""
    filled = [0] * positions
    for size, place in zip(sizes, owners, strict=True):
        filled[place] += size
    return filled


def _owned(
    axes: tuple[str, ...], grid: Grid, assign: Literal["longest_first", "in_turn"] | Sequence[int]
) -> Callable[[int, int, Sequence[Matrix]], Bucket]:
    """Makes buckets: own pieces out to owners in the group over ``axes``, whole matrices back."""
    loads = [0] * grid.at(0).size(*axes)

    def bucket(index: int, buffer: int, run: Sequence[Matrix]) -> Bucket:
        costs = [newton_schulz_cost(matrix.sides) for matrix in run]
        owners = _owners(assign, run, costs, loads)
        for cost, position in zip(costs, owners, strict=True):
            loads[position] += cost
        entries = tuple(
            BucketEntry(matrix, 0, matrix.numel, range(position, position + 1), Route((), WIRE))
            for matrix, position in zip(run, owners, strict=True)
        )
        whole = WholeMatrices(axes, "matrix", "owner")
        return Bucket(
            index=index,
            buffer=buffer,
            axes=axes,
            entries=entries,
            model_layout=LocalShards(),
            storage_layout=LocalShards(),
            compute_layout=whole,
            gradient=Route((), run[0].grad_dtype),
            compute=Route((Exchange(axes, entries, LocalShards(), whole),), WIRE),
            parameter=Route((), run[0].dtype),
            phases=("gather to owners", "scatter from owners"),
        )

    return bucket


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
    strange = [
        (matrix.name, rank) for matrix, rank in zip(run, owners, strict=True) if not 0 <= rank < len(loads)
    ]
    if strange:
        raise StrategyError(
            f"{strange[0][0]} is assigned to {strange[0][1]}, which is not one of {len(loads)} ranks"
        )
    return owners


def _tp_route(matrix: Matrix, grid: Grid) -> Route:
    """From one rank's tensor-parallel piece to the whole matrix. A matrix that is part of a parameter may be
    cut unevenly by an even cut of the parameter, so the lengths are stated."""
    return _tp_route_of(matrix.shape, matrix.part, matrix.cuts, grid)


@lru_cache(maxsize=1024)  # most layers of a model are alike
def _tp_route_of(shape: tuple[int, ...], part: Part | None, cuts: tuple[Cut, ...], grid: Grid) -> Route:
    alike = Matrix(0, "", shape, cuts, part=part)
    cut = alike.cut("tp")
    if cut is None or grid.size("tp") == 1:
        return Route((), WIRE)
    boxes = [alike.box(grid.at(grid.rank({"tp": place}))) for place in range(grid.size("tp"))]
    lengths = Shard(cut.dim, tuple(box.shape[cut.dim] if box.numel else 0 for box in boxes))
    return Route((Hop("tp", lengths, Replicate(), shape),), WIRE)


def _summed_gram(matrix: Matrix, least_aspect: float) -> SummedGram | None:
    """The Gram matrix of a matrix that tp cuts along rows or columns, if that side is long enough."""
    cut, sides = matrix.cut("tp"), matrix.sides
    assert cut is not None
    dim = cut.dim - leading(matrix)
    if dim not in (0, 1) or sides[dim] < least_aspect * sides[1 - dim]:
        return None
    return SummedGram(dim, sides[1 - dim])


def _route(grid: Grid, axis: str, src: Placement, dst: Placement, size: int, dtype: torch.dtype) -> Route:
    """The route of a flat buffer along one axis: one hop, or none where nothing changes."""
    moves = grid.size(axis) > 1 and src != dst
    return Route((Hop(axis, src, dst, (size,)),) if moves else (), dtype)
