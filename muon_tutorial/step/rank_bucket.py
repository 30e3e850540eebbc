"""One bucket on one rank: its parameters beside the plan's geometry for this coordinate, worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..decay_and_add import ShardRange
from ..plan.bucket import Bucket, flat_frame
from ..plan.exchange import BufferSlice
from ..plan.grid import Coordinate
from ..plan.matrix import BucketEntry
from .parameter_state import ParameterState

MomentumIndex = slice | tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankMatrix:
    """One matrix of a bucket on one rank: its name, its parameter's index, [rows, columns] of the whole.

    ``place`` is the index of this rank's piece within its part of the parameter, ``held`` the same piece in a
    flat buffer laid out as the model holds it. ``stored`` are the elements of the bucket's buffer that the
    rank stores of the matrix, ``in_piece`` the same elements within the piece, ``shard_range`` the same
    within the whole matrix, and ``momentum_index`` within the parameter's momentum. ``work`` is where the
    rank orthogonalizes the matrix, or None.
    """

    entry: BucketEntry
    name: str
    param: int
    sides: tuple[int, int]
    parameter: ParameterState
    place: tuple[slice, ...]
    held: BufferSlice
    stored: slice
    in_piece: slice
    shard_range: ShardRange
    momentum_index: MomentumIndex
    work: BufferSlice | None


@dataclass(frozen=True, slots=True, eq=False)
class RankBucket:
    """A bucket of the plan, with its matrices as this rank holds, stores and works on them.

    ``held`` is how many elements a flat buffer has that is laid out as the model holds the matrices.
    """

    plan: Bucket
    name: str
    at: Coordinate
    held: int
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
            f"bucket {bucket.index}",
            at,
            bucket.length(bucket.model_layout, at),
            tuple(
                RankMatrix(
                    entry=entry,
                    name=entry.matrix.name,
                    param=entry.matrix.param,
                    sides=entry.matrix.sides,
                    parameter=parameters[entry.matrix.param],
                    place=entry.matrix.slices(at),
                    held=piece,
                    stored=slice(*shard.in_buffer),
                    in_piece=slice(*shard.in_piece),
                    shard_range=ShardRange(
                        entry.matrix.sides, *flat_frame(entry.matrix, at), *shard.in_piece
                    ),
                    momentum_index=momentum_index[entry.matrix.index],
                    work=work,
                )
                for entry, piece, shard, work in rows
            ),
        )
