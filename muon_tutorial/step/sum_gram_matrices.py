"""Phases 3 to 5 for matrices that stay cut: sum their Gram matrices over tp, and iterate on the sums.

One all_reduce for a whole bucket replaces a gather and a slice for each matrix. The sum has the same bits on
every tp rank, so every tp rank computes the same products from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from ..engine.collective import IDLE, Label, Walk
from ..engine.pieces import Pieces
from ..engine.travel import all_reduce
from ..orthogonalizers.gram import gram_recipe, orthogonalize_shard, packed_gram
from ..plan.bucket import GRAM_DTYPE
from ..plan.matrix import SummedGram
from .orthogonalize import keep_box, take_box
from .rank_bucket import AROUND, RankBucket, RankMatrix

Cut = tuple[RankMatrix, SummedGram]


def orthogonalize_cut(bucket: RankBucket, boxes: Tensor | Pieces) -> Walk:
    """Orthogonalize the bucket's matrices that stay cut, and replace their inputs in ``boxes`` by updates.

    All ranks of the grid must run it. Ranks that work on none of these matrices yield ``IDLE``.
    """
    if not any(matrix.entry.gram for matrix in bucket.matrices):
        return
    cut = [(m, m.entry.gram) for m in bucket.matrices if m.entry.gram and m.work]
    if not cut:
        yield IDLE
        return
    inputs = [take_box(boxes, matrix) for matrix, _ in cut]
    label = Label("Gram all_reduce", bucket.name)
    summed = yield from all_reduce(own_grams(bucket, cut, inputs), "tp", bucket.at, label)
    for (matrix, gram), box, whole in zip(cut, inputs, _each(summed, cut), strict=True):
        keep_box(multiply_shard(bucket, matrix, gram, box, whole), boxes, matrix)


def own_grams(
    bucket: RankBucket,
    cut: Sequence[Cut],
    inputs: Sequence[Tensor],  # each [rows / T, columns] or [rows, columns / T]
) -> Tensor:  # [sum of side · (side + 1) / 2], fp32
    """Compute the Gram matrices of this rank's shards, packed, one after the other."""
    packed = inputs[0].new_empty(sum(gram.elements for _, gram in cut), dtype=GRAM_DTYPE)
    for (matrix, gram), box, own in zip(cut, inputs, _each(packed, cut), strict=True):
        with record_function(f"Gram matrix of {matrix.name}"):
            AROUND.get()(packed_gram, _shard(box, gram), gram.cut, own, bucket.workspace)
    return packed


def multiply_shard(
    bucket: RankBucket,
    matrix: RankMatrix,
    gram: SummedGram,
    box: Tensor,  # [rows / T, columns] or [rows, columns / T]
    summed: Tensor,  # [side · (side + 1) / 2], fp32
) -> Tensor:  # as box
    """Iterate on a matrix's summed Gram matrix, and multiply this rank's box by the result."""
    group = matrix.parameter.group
    given = gram.cut, summed, gram_recipe(group), group["eps"], bucket.workspace
    with record_function(f"Newton-Schulz of {matrix.name}"):
        update = AROUND.get()(orthogonalize_shard, _shard(box, gram), *given)
    return update.reshape(box.shape)


def _each(packed: Tensor, cut: Sequence[Cut]) -> tuple[Tensor, ...]:
    return torch.split(packed, [gram.elements for _, gram in cut])


def _shard(box: Tensor, gram: SummedGram) -> Tensor:
    """View this rank's box of a matrix as a shard, [rows, columns]. It may be empty."""
    along = box.numel() // gram.side
    return box.reshape((along, gram.side) if gram.cut == 0 else (gram.side, along))
