"""Decays and steps the parameters, and sends them to the ranks whose model needs them (phase 7)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adjusted_lr_and_decay import ShardRange, adjusted_lr, decay_and_add
from ..engine.collective import Label, Walk
from ..engine.hop_collectives import view
from ..engine.pieces import Pieces
from ..engine.travel import travel
from ..orthogonalizers.named import STOCK
from ..orthogonalizers.orthogonalize_option import name_for
from ..plan.matrix import Index
from .parameter_state import write_back
from .rank_bucket import AROUND, RankBucket


def update_parameters(
    bucket: RankBucket, updates: Tensor | Pieces, present: Collection[int]
) -> Tensor | None:
    """Decay and step the elements that this rank stores; return them, flat, for ``publish_parameters``.

    If the parameter route is empty, parameters are stepped in place, and the result is None. ``present`` are
    the parameters that have a gradient. No other parameter changes.
    """
    if bucket.plan.parameter.hops:
        assert isinstance(updates, Tensor)
        return step_copies(bucket, updates, present)
    around = AROUND.get()
    for matrix in bucket.matrices:
        if not matrix.numel or matrix.param not in present:
            continue
        update = updates.take(matrix.model_slice) if isinstance(updates, Pieces) else updates[matrix.stored]
        group, data = matrix.parameter.group, matrix.parameter.data
        around(step_in_place, data, matrix.place, update, group, matrix.sides, matrix.shard_range)
    return None


def step_in_place(
    whole: Tensor,
    place: Index,
    update: Tensor,  # as many elements as whole[place]
    group: Mapping[str, Any],
    sides: Sequence[int],
    shard: ShardRange | None = None,
) -> None:
    """Call ``apply_update`` on ``whole[place]``, which may be columns or alternating rows."""
    here = whole[place]
    stepped = here.contiguous()  # torch rounds differently on strided memory
    apply_update(stepped, update, group, sides, shard)
    if not here.is_contiguous():
        here.copy_(stepped)
    write_back(whole, place, stepped)


def step_copies(
    bucket: RankBucket,
    updates: Tensor,  # [stored], bf16
    present: Collection[int],
) -> Tensor:  # [stored], the parameters' dtype
    """Return decayed and stepped copies of the elements that this rank stores, flat like ``updates``."""
    stepped = torch.zeros_like(updates, dtype=bucket.plan.parameter.dtype)
    for matrix in bucket.matrices:
        if matrix.numel:
            here = stepped[matrix.stored]
            here.copy_(matrix.parameter.data[matrix.place].reshape(-1)[matrix.in_piece])
            if matrix.param in present:
                update = updates[matrix.stored]
                apply_update(here, update, matrix.parameter.group, matrix.sides, matrix.shard_range)
    return stepped


def apply_update(
    parameter: Tensor,  # [rows, columns], or the elements of a shard in any shape
    update: Tensor,  # as many elements
    group: Mapping[str, Any],
    sides: Sequence[int],
    shard: ShardRange | None = None,
) -> None:
    """Decay and step a matrix, or a ``shard`` of it, with a group's settings.

    ``sides`` are [rows, columns] of the full matrix as it is stored. The learning rate is scaled by outputs
    and inputs, so the sides are swapped if the group's weights are ``transposed``, stored as (in, out).
    """
    lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    by_rows = name_for(group.get("orthogonalize", STOCK), *sides[-2:]) != STOCK
    sides = sides[::-1] if group.get("transposed") else sides
    adjusted = adjusted_lr(lr, group["adjust_lr_fn"], sides)
    decay_and_add(parameter, update, lr, adjusted, group["weight_decay"], shard, by_rows)


def publish_parameters(bucket: RankBucket, stepped: Tensor | None) -> Walk:
    """Send new parameters from the ranks that store them to all ranks whose model needs them.

    For ``zero1`` the bucket's parameter route is an all_gather over dp. If the route is empty, ``stepped`` is
    None, because the model already has the new parameters. All ranks of the grid must run it.
    """
    if stepped is None:
        return
    label = Label("parameter broadcast" if bucket.is_owned else "parameter all_gather", bucket.name)
    whole = yield from travel(stepped, bucket.plan.parameter, bucket.at, label)
    write_parameters(bucket, whole)


def write_parameters(bucket: RankBucket, whole: Tensor) -> None:
    """Copy a flat buffer, [bucket.model_numel], into the model's parameters."""
    for matrix in bucket.matrices:
        piece = view(whole, matrix.model_slice)
        if piece.numel():
            matrix.parameter.data[matrix.place] = piece
