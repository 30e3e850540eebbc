"""Takes a rank's box of a matrix out of a flat buffer or ``Pieces``, and puts its update back."""

from __future__ import annotations

from torch import Tensor

from ..engine.hops import view
from ..engine.pieces import Pieces
from .rank_bucket import RankMatrix


def take_box(boxes: Tensor | Pieces, matrix: RankMatrix) -> Tensor:
    """The box that this rank works on, in its own shape; it is removed from ``Pieces``."""
    assert matrix.work is not None
    return boxes.take(matrix.work) if isinstance(boxes, Pieces) else view(boxes, matrix.work)


def keep_box(update: Tensor, boxes: Tensor | Pieces, matrix: RankMatrix) -> None:
    """The opposite of ``take_box``. A slice is copied, because a view would keep the whole matrix alive.

    A member of a stack does keep the stack alive, but that is only a few megabytes.
    """
    assert matrix.work is not None
    if isinstance(boxes, Pieces):
        boxes.put(matrix.index, update.clone() if matrix.entry.route.hops else update)
    else:
        view(boxes, matrix.work).copy_(update)
