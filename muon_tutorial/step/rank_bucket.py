"""One bucket on one rank: its parameters, and the part of each that the rank holds, computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..adjusted_lr_and_decay import ShardRange
from ..orthogonalizers.workspace import Workspace
from ..plan.bucket import Bucket, flat_frame
from ..plan.exchange import BufferSlice, Exchange, LocalShards, SlicedBuffer
from ..plan.grid import Coordinate
from ..plan.matrix import BucketEntry, Index
from .parameter_state import MomentumIndex, ParameterState

AROUND: ContextVar[Callable[..., Any]] = ContextVar(
    "AROUND", default=lambda function, *given: function(*given)
)
"""Calls on one matrix go through this function, which gets the function to call and its arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class RankMatrix:
    """One matrix of a bucket on one rank; ``sides`` are [rows, columns] of the whole matrix.

    The rank's piece of the matrix is at the index ``place`` in the rank's part of the parameter, and at
    ``model_slice`` in a flat buffer with the model's layout.

    The rank stores ``numel`` elements of the piece between steps. Four fields say where these elements lie:
    ``stored`` in the bucket's stored buffer, ``in_piece`` in the piece, ``shard_range`` in the whole matrix,
    and ``momentum_index`` in the parameter's momentum.

    ``work`` is the box that the rank orthogonalizes, or None.
    """

    entry: BucketEntry
    index: int
    name: str
    param: int
    sides: tuple[int, int]
    parameter: ParameterState
    place: Index
    model_slice: BufferSlice
    numel: int
    stored: slice
    in_piece: slice
    shard_range: ShardRange
    momentum_index: MomentumIndex
    work: BufferSlice | None


@dataclass(frozen=True, eq=False)
class RankBucket:
    """A bucket of the plan, with this rank's part of each matrix.

    ``model_numel`` is the number of elements in a flat buffer with the model's layout. All buckets of a rank
    share the ``workspace``.
    """

    plan: Bucket
    name: str
    at: Coordinate
    model_numel: int
    matrices: tuple[RankMatrix, ...]
    workspace: Workspace

    @cached_property
    def device(self) -> torch.device:
        return self.matrices[0].parameter.param.device

    @cached_property
    def is_owned(self) -> bool:
        """Whether one dp position stores the whole bucket."""
        storage = self.plan.storage_layout
        return isinstance(storage, SlicedBuffer) and storage.owner is not None

    @cached_property
    def stored_numel(self) -> int:
        """The number of elements of the bucket that this rank stores between steps."""
        return self.plan.length(self.plan.storage_layout, self.at)

    @cached_property
    def works(self) -> bool:
        """Whether this rank orthogonalizes any of the bucket's matrices."""
        return any(matrix.work is not None for matrix in self.matrices)

    @cached_property
    def contributing(self) -> frozenset[int]:
        """The indices of the matrices whose Newton–Schulz input comes partly from this rank.

        This is computed on first use, because it takes long with thousands of ranks, and predictions use few
        buckets.
        """
        first = next(iter(self.plan.compute.hops), None)
        if isinstance(first, Exchange):
            parcels = first.parcels(self.at)
            return frozenset(it.held.entry.matrix.index for it in (*parcels.leaving, *parcels.kept))
        keeps = first is None or first.silent
        entries = self.plan.entries
        return frozenset(e.matrix.index for e in entries if not keeps or self.plan.works_on(e, self.at))

    @cached_property
    def travels_in_pieces(self) -> bool:
        """Whether the compute route needs no flat buffer, because it is an exchange or empty."""
        hops = self.plan.compute.hops
        flat_hops = any(not isinstance(hop, Exchange) for hop in hops)
        return isinstance(self.plan.storage_layout, LocalShards) and not flat_hops

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        at: Coordinate,
        parameters: Sequence[ParameterState],
        momentum_index: dict[int, MomentumIndex],
        workspace: Workspace,
    ) -> RankBucket:
        """Join a bucket to a rank's parameters.

        ``momentum_index`` maps a matrix's index to where its elements lie in the momentum.
        """
        held = bucket.buffer_slices(bucket.model_layout, at)
        rows = zip(bucket.entries, held, bucket.stored_shards(at), bucket.work_slices(at), strict=True)
        return cls(
            bucket,
            f"bucket {bucket.index}",
            at,
            bucket.length(bucket.model_layout, at),
            tuple(
                RankMatrix(
                    entry=entry,
                    index=entry.matrix.index,
                    name=entry.matrix.name,
                    param=entry.matrix.param,
                    sides=entry.matrix.sides,
                    parameter=parameters[entry.matrix.param],
                    place=entry.matrix.slices(at),
                    model_slice=piece,
                    numel=shard.numel,
                    stored=slice(*shard.interval),
                    in_piece=slice(*shard.in_piece),
                    shard_range=ShardRange(
                        entry.matrix.sides, *flat_frame(entry.matrix, at), *shard.in_piece
                    ),
                    momentum_index=momentum_index[entry.matrix.index],
                    work=work,
                )
                for entry, piece, shard, work in rows
            ),
            workspace,
        )
