"""Compares what ranks are about to save: values that several ranks hold must be the same on all of them."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..step.agreement import say_ranks
from .plain_data import checksum
from .rank_contents import Offset, TensorInPieces

_REMEDY = (
    "Different parameters (experts, pipeline stages) need different names: pass rename=. A plain tensor that "
    "is a part of a tensor-parallel parameter needs the attributes partition_dim and partition_sizes"
)


class TensorOutline(NamedTuple):
    """The facts about a tensor that ranks compare: whole shape, dtype, and each box's shape and checksum."""

    shape: tuple[int, ...]
    dtype: str
    boxes: dict[Offset, tuple[tuple[int, ...], int]]


class SaveSummary(NamedTuple):
    folder: str
    groups: dict[str, dict[str, Any]]
    outlines: dict[str, TensorOutline]
    buffers: set[str]
    extra: int = 0  # a checksum


def outline(tensor: TensorInPieces, is_buffer: bool) -> TensorOutline:
    """Describe a tensor by the pieces on this rank. Buffers get no checksum, because they may differ."""
    boxes = {
        offset: (tuple(piece.shape), 0 if is_buffer else _checksum(piece))
        for offset, piece in tensor.pieces.items()
    }
    return TensorOutline(tensor.shape, str(tensor.dtype), boxes)


def check_alike(summaries: Sequence[SaveSummary]) -> None:
    """Raise an error if ranks disagree on what they are about to save; warn if ``extra`` differs."""
    said: dict[str, tuple[int, Any]] = {}

    def compare(what: str, value: Any, rank: int, remedy: str = "", shown: bool = True) -> None:
        first, its = said.setdefault(what, (rank, value))
        if its != value:
            values = f"is {its} on rank {first} and {value} on rank {rank}"
            found = values if shown else f"differs between ranks {first} and {rank}"
            raise CheckpointError(f"{what} {found}. {remedy}".rstrip(". "))

    for rank, summary in enumerate(summaries):
        compare("the folder", summary.folder, rank)
        for name, record in summary.groups.items():
            compare(f"the optimizer of {name}", (record["optimizer"], record["state"]), rank)
            for key, value in record["group"].items():
                compare(f"{key} of {name}", value, rank)
        for key, found in summary.outlines.items():
            compare(f"the shape and dtype of {key}", (found.shape, found.dtype), rank, _REMEDY)
            for offset, box in found.boxes.items():
                compare(f"{key}, from {offset} on,", box, rank, _REMEDY, shown=False)
    _check_buffers(summaries)
    fine = (checksum({}), summaries[0].extra)
    if others := [rank for rank, its in enumerate(summaries) if its.extra not in fine]:
        warnings.warn(
            f"extra is not the same on {say_ranks([0, *others])}; only rank 0's is saved, and every rank "
            "will load that one. If each rank needs its own, gather them, and pass all in rank 0's extra",
            stacklevel=2,
        )


def _check_buffers(summaries: Sequence[SaveSummary]) -> None:
    """Refuse buffers of the same name on ranks that share no parameter: such ranks have different models.

    Buffers of data-parallel ranks may differ (running means). The first rank's buffers are saved.
    """
    first: dict[str, int] = {}
    for rank, summary in enumerate(summaries):
        for name in sorted(summary.buffers):
            other = summaries[first.setdefault(name, rank)]
            ours, theirs = (its.outlines.keys() - its.buffers for its in (summary, other))
            if ours and theirs and not ours & theirs:
                raise CheckpointError(
                    f"ranks {first[name]} and {rank} both have a buffer {name}, but no common parameter. "
                    f"{_REMEDY}"
                )


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
