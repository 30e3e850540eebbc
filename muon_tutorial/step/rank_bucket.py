"""One bucket on one rank: its parameters beside the plan's geometry for this coordinate, worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.collective import Label
from ..plan.bucket import Bucket, StoredShard, flat_frame
from ..plan.exchange import BufferSlice, Layout
from ..plan.grid import Coordinate
from ..plan.matrix import BucketEntry, Matrix
from ..weight_update import ShardRange
from .parameter_state import ParameterState

MomentumIndex = slice | tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankMatrix:
    """One matrix of a bucket on one rank.

    ``place`` is this rank's piece within its part of the parameter, ``held`` the same piece in a flat buffer
    laid out as the model holds it. ``stored`` are the elements of the bucket's buffer that the rank stores of
    the matrix, ``in_piece`` the same elements within the piece, ``shard_range`` the same within the whole
    matrix, and ``momentum_index`` within the parameter's momentum. ``work`` is where the rank orthogonalizes
    the matrix, or None.
    """

    entry: BucketEntry
    parameter: ParameterState
    place: tuple[slice, ...]
    held: BufferSlice
    stored: slice
    in_piece: slice
    shard_range: ShardRange
    momentum_index: MomentumIndex
    work: BufferSlice | None

    @property
    def momentum(self) -> Tensor:
        """What this rank stores of the matrix's momentum, sharing its memory."""
        return self.parameter.state["momentum_buffer"][self.momentum_index]


@dataclass(frozen=True, slots=True, eq=False)
class RankBucket:
    """A bucket of the plan, with its matrices as this rank holds, stores and works on them."""

    plan: Bucket
    at: Coordinate
    matrices: tuple[RankMatrix, ...]

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        at: Coordinate,
        parameters: Sequence[ParameterState],
        momentum_index: dict[int, MomentumIndex],
    ) -> RankBucket:
        """Join a bucket to a rank's parameters; ``momentum_index`` goes by the matrix's index."""
        held = bucket.buffer_slices(bucket.model_layout, at)
        rows = zip(bucket.entries, held, bucket.stored_shards(at), bucket.work_slices(at), strict=True)
        return cls(
            bucket,
            at,
            tuple(
                RankMatrix(
                    entry=entry,
                    parameter=parameters[entry.matrix.param],
                    place=entry.matrix.slices(at),
                    held=piece,
                    stored=slice(*shard.in_buffer),
                    in_piece=slice(*shard.in_piece),
                    shard_range=_range_of(shard, at),
                    momentum_index=momentum_index[entry.matrix.index],
                    work=work,
                )
                for entry, piece, shard, work in rows
            ),
        )

    def label(self, phase: str) -> Label:
        """The label of a request that serves the whole bucket."""
        return Label(phase, f"bucket {self.plan.index}")

    def zeros(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """A flat buffer of this rank's under a layout, where its parameters are."""
        device = self.matrices[0].parameter.data.device
        return torch.zeros(self.plan.length(layout, self.at), dtype=dtype, device=device)


def _range_of(shard: StoredShard, at: Coordinate) -> ShardRange:
    matrix: Matrix = shard.entry.matrix
    frame = flat_frame(matrix, at)
    (top, left), (rows, columns) = frame.offset, frame.shape
    return ShardRange(matrix.sides, (top, left), (rows, columns), *shard.in_piece)
