"""What a rank works on of a matrix, taken from a flat buffer or from one by one, and its update put back."""

from __future__ import annotations

from torch import Tensor

from ..engine.hops import view
from ..engine.pieces import Pieces
from .rank_bucket import RankBucket, RankMatrix


def take_box(boxes: Tensor | Pieces, matrix: RankMatrix) -> Tensor:
    """The box that this rank works on, in its own shape; ``Pieces`` give it up."""
    assert matrix.work is not None
    return boxes.take(matrix.work) if isinstance(boxes, Pieces) else view(boxes, matrix.work)


def keep_box(update: Tensor, boxes: Tensor | Pieces, matrix: RankMatrix) -> None:
    """The opposite of ``take_box``. A slice is copied: it would keep the whole matrix.

    A member of a stack keeps that, which is no more than some megabytes.
    """
    assert matrix.work is not None
    if isinstance(boxes, Pieces):
        boxes.put(matrix.index, update.clone() if matrix.entry.route.hops else update)
    else:
        view(boxes, matrix.work).copy_(update)


def kept_for_work(bucket: RankBucket, boxes: Tensor | Pieces) -> Tensor | Pieces:
    """What a rank keeps while its round computes: where it works on nothing of the bucket, no flat buffer."""
    if isinstance(boxes, Pieces) or bucket.works:
        return boxes
    return boxes.new_empty(0)


def ready_to_return(bucket: RankBucket, boxes: Tensor | Pieces) -> Tensor | Pieces:
    """The opposite of ``kept_for_work``: the buffer that the way back wants, zeros where nothing was done."""
    if isinstance(boxes, Pieces) or bucket.works:
        return boxes
    return boxes.new_zeros(bucket.plan.length(bucket.plan.compute_layout, bucket.at))
