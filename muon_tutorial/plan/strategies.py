"""Builders that turn matrices and a grid into a plan. Strategies differ in data, not in code.

=============  =============================================================================================
replicated     no hops along dp; every rank orthogonalizes everything (DDP with ``torch.optim.Muon``)
zero1          flat buckets cut over dp; dp gather → tp gather → Newton–Schulz → tp slice → dp slice
               (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.3)
=============  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import StrategyError
from .bucket import Bucket, DistMeta, Entry, Matrix, fill_buckets, largest_piece, padded
from .grid import Coordinate, Grid
from .layout import Hop, Partial, Placement, Replicate, Route, Shard

WIRE = torch.bfloat16
BUCKET_BYTES = 25_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a step does, as data: which buckets, along which axis, held how.

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


Builder = Callable[..., Plan]
"""``(matrices, grid, **options) -> Plan``, with ``matrices: Sequence[Matrix]`` and ``grid: Grid``."""


def replicated(matrices: Sequence[Matrix], grid: Grid, *, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """Every rank keeps and orthogonalizes every matrix: the baseline. Only tensor-parallel pieces travel."""
    return _plan("replicated", matrices, grid, bucket_bytes, Replicate(), "averaged")


def zero1(
    matrices: Sequence[Matrix],
    grid: Grid,
    *,
    gather: Literal["all"] = "all",
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Momentum cut over dp in flat buckets; each rank orthogonalizes the matrices its slice touches.

    Args:
        gather: ``"all"`` gathers whole buckets over dp, as the published proof of concept does.
        bucket_bytes: most gradient bytes in a bucket, per tensor-parallel rank; 25 MB unless told.

    Raises:
        StrategyError: ``gather`` is not known.
    """
    if gather != "all":
        raise StrategyError(f'zero1 knows gather="all"; got {gather!r}')
    return _plan("zero1", matrices, grid, bucket_bytes, Shard(0), "local")


STRATEGIES: dict[str, Builder] = {"replicated": replicated, "zero1": zero1}


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


def _plan(
    name: str,
    matrices: Sequence[Matrix],
    grid: Grid,
    bucket_bytes: int,
    storage: Placement,
    expects: Literal["local", "averaged"],
) -> Plan:
    runs = fill_buckets(matrices, grid, bucket_bytes)
    buffers: dict[tuple[int, torch.dtype, torch.dtype], int] = {}
    buckets = []
    for index, run in enumerate(runs):
        key = run[0].group, run[0].dtype, run[0].grad_dtype
        buffer = buffers.setdefault(key, len(buffers))
        buckets.append(_bucket(index, buffer, run, grid, storage, expects))
    return Plan(name, grid, tuple(buckets), expects)


def _bucket(
    index: int,
    buffer: int,
    run: Sequence[Matrix],
    grid: Grid,
    storage: Placement,
    expects: Literal["local", "averaged"],
) -> Bucket:
    dp = grid.size("dp")
    sizes = [largest_piece(matrix, grid.size("tp")) for matrix in run]
    size = padded(sum(sizes), dp)
    entries = tuple(
        Entry(
            matrix,
            sum(sizes[:i]),
            sizes[i],
            _workers(storage, sum(sizes[:i]), sizes[i], size, dp),
            _tp_route(matrix, grid),
        )
        for i, matrix in enumerate(run)
    )
    handed: Placement = Partial() if expects == "local" else Replicate()
    return Bucket(
        index=index,
        buffer=buffer,
        axis="dp",
        size=size,
        entries=entries,
        storage=storage,
        gradient=_route(grid, "dp", handed, storage, size, run[0].grad_dtype),
        compute=_route(grid, "dp", storage, Replicate(), size, WIRE),
        parameter=_route(grid, "dp", storage, Replicate(), size, run[0].dtype),
        summands=dp if expects == "local" else 1,
    )


def _workers(storage: Placement, offset: int, size: int, total: int, parts: int) -> range:
    """Positions whose slice of the buffer touches the matrix; all of them where the buffer is not cut."""
    if not isinstance(storage, Shard) or size == 0:
        return range(parts)
    slice_size = total // parts
    return range(offset // slice_size, (offset + size - 1) // slice_size + 1)


def _tp_route(matrix: Matrix, grid: Grid) -> Route:
    hop = Hop("tp", matrix.cut, Replicate(), matrix.shape)
    return Route((hop,) if grid.size("tp") > 1 and matrix.cut != Replicate() else (), WIRE)


def _route(grid: Grid, axis: str, src: Placement, dst: Placement, size: int, dtype: torch.dtype) -> Route:
    """The route of a flat buffer along one axis: one hop, or none where nothing changes."""
    moves = grid.size(axis) > 1 and src != dst
    return Route((Hop(axis, src, dst, (size,)),) if moves else (), dtype)
