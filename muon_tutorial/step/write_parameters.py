"""Parameters decay, step against the update and (phase 7) are written back to where the model holds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decay_and_add import ShardRange, decay_and_add
from ..engine.collective import Label, Walk
from ..engine.hops import view
from ..engine.travel import travel
from ..learning_rate import adjusted_lr
from .rank_bucket import RankBucket


def update_parameters(bucket: RankBucket, updates: Tensor, present: Collection[int]) -> Tensor:
    """Decay and step the elements that this rank stores; returns them, flat, as ``updates`` is.

    ``present`` are the parameters that have a gradient: the others stay as they are.
    """
    stepped = torch.zeros_like(updates, dtype=bucket.plan.parameter.dtype)
    for matrix in bucket.matrices:
        here = stepped[matrix.stored]
        if here.numel():
            here.copy_(matrix.parameter.data[matrix.place].reshape(-1)[matrix.in_piece])
            if matrix.param in present:
                update, group = updates[matrix.stored], matrix.parameter.group
                apply_update(here, update, group, matrix.sides, matrix.shard_range)
    return stepped


def apply_update(
    parameter: Tensor,
    update: Tensor,
    group: Mapping[str, Any],
    sides: Sequence[int],
    shard: ShardRange | None = None,
) -> None:
    """Decay a matrix, or the ``shard`` of it that is given, and step it, with a group's settings.

    ``sides`` are [rows, columns] of the full matrix as it is stored: they scale the learning rate, which goes
    by outputs and inputs, so that a group that stores its weights ``transposed``, (in, out), swaps them.
    """
    lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    sides = sides[::-1] if group.get("transposed") else sides
    adjusted = adjusted_lr(lr, group["adjust_lr_fn"], sides)
    decay_and_add(parameter, update, lr, adjusted, group["weight_decay"], shard)


def publish_parameters(bucket: RankBucket, stepped: Tensor) -> Walk:
    """From the stepped parameters that this rank stores to the parameters as the model holds them.

    For ``zero1`` the bucket's route is an all_gather over dp. Must be walked by all ranks of the grid.
    """
    label = Label("parameter all_gather", bucket.name)
    whole = yield from travel(stepped, bucket.plan.parameter, bucket.at, label)
    write_parameters(bucket, whole)


def write_parameters(bucket: RankBucket, whole: Tensor) -> None:
    """Copy a flat buffer, [bucket.held], into the model's parameters."""
    for matrix in bucket.matrices:
        piece = view(whole, matrix.held)
        if piece.numel():
            matrix.parameter.data[matrix.place] = piece
