"""Phases 2 to 6: gather every matrix, orthogonalize it by Newton–Schulz, and cut its update as before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..engine.collective import ABREAST, Label, Walk
from ..engine.hop_collectives import view
from ..engine.pieces import Pieces
from ..engine.travel import stand_by, travel
from ..newton_schulz import zeropower_via_newtonschulz
from ..orthogonalizers.iterate import orthogonalize as orthogonalize_by
from ..orthogonalizers.named import STOCK, find_recipe
from ..orthogonalizers.orthogonalize_option import name_for
from ..orthogonalizers.stack_sizes import run_length
from ..orthogonalizers.workspace import Workspace
from .rank_bucket import AROUND, RankBucket, RankMatrix


def orthogonalize(bucket: RankBucket, boxes: Tensor | Pieces) -> Walk:
    """Turn this rank's stored Newton–Schulz inputs into updates: both flat, or both ``Pieces``.

    Updates replace their inputs in ``boxes``, so do not use ``boxes`` afterwards. All ranks of the grid must
    run this. A rank yields ``IDLE`` requests for a matrix on which it does not work.
    """
    there, back = (Label(phase, bucket.name) for phase in bucket.plan.phases)
    boxes = yield from travel(boxes, bucket.plan.compute, bucket.at, there)  # 2: [stored] → [worked on]
    if isinstance(boxes, Tensor) and not bucket.works:
        boxes = boxes.new_empty(0)  # Free the buffer while other ranks work.
    yield ABREAST  # First let the round's other buckets go to their owners.
    if any(matrix.entry.gram is not None for matrix in bucket.matrices):
        from .sum_gram_matrices import orthogonalize_cut

        yield from orthogonalize_cut(bucket, boxes)  # phases 3 to 5, for matrices that stay cut
    stacked = orthogonalize_stacks(bucket, boxes)
    for matrix in bucket.matrices:
        if matrix.entry.gram is not None or matrix.index in stacked:
            continue
        route, name = matrix.entry.route, matrix.name
        if matrix.work is None:
            yield from stand_by(route)
            continue
        mine = take_box(boxes, matrix)
        whole = yield from travel(mine, route, bucket.at, Label("tp gather", name))  # 3: [rows, columns]
        del mine
        with record_function(f"Newton-Schulz of {name}"):
            whole = newton_schulz_update(whole, matrix.sides, matrix.parameter.group, bucket.workspace)  # 4
        update = yield from travel(whole, route.inverse, bucket.at, Label("tp slice", name))  # 5: own box
        del whole
        keep_box(update, boxes, matrix)
        del update
    yield ABREAST  # First compute the round's other buckets, instead of waiting for this bucket's owner.
    if isinstance(boxes, Tensor) and not bucket.works:
        boxes = boxes.new_zeros(bucket.plan.length(bucket.plan.compute_layout, bucket.at))
    # 6: [worked on] → [stored]
    return (yield from travel(boxes, bucket.plan.compute.inverse, bucket.at, back))


def orthogonalize_stacks(bucket: RankBucket, boxes: Tensor | Pieces) -> frozenset[int]:
    """Orthogonalize small matrices of equal shape together, if that does not change their bits.

    Takes only matrices that are already whole on this rank, and returns their indices.
    """
    alike: dict[tuple[tuple[int, int], int], list[RankMatrix]] = {}
    for matrix in bucket.matrices:
        if matrix.work is not None and matrix.entry.gram is None and not matrix.entry.route.hops:
            alike.setdefault((matrix.sides, id(matrix.parameter.group)), []).append(matrix)
    done: list[int] = []
    for its in alike.values():
        most = stack_size(its[0].sides, its[0].parameter.group, bucket.device)
        if most > 1:
            for begin in range(0, len(its), most):
                _orthogonalize_stack(bucket, boxes, its[begin : begin + most])
            done += [matrix.index for matrix in its]
    return frozenset(done)


def _orthogonalize_stack(bucket: RankBucket, boxes: Tensor | Pieces, its: Sequence[RankMatrix]) -> None:
    names = ", ".join(matrix.name for matrix in its)
    stack = torch.stack([take_box(boxes, matrix).reshape(matrix.sides) for matrix in its])
    with record_function(f"Newton-Schulz of {names}"):
        updates = newton_schulz_update(stack, stack.shape, its[0].parameter.group, bucket.workspace)
    for matrix, update in zip(its, updates, strict=True):
        assert matrix.work is not None
        keep_box(update.view(matrix.work.box.shape), boxes, matrix)


def take_box(boxes: Tensor | Pieces, matrix: RankMatrix) -> Tensor:
    """Return the box that this rank works on, in its shape; remove it if ``boxes`` are ``Pieces``."""
    assert matrix.work is not None
    return boxes.take(matrix.work) if isinstance(boxes, Pieces) else view(boxes, matrix.work)


def keep_box(update: Tensor, boxes: Tensor | Pieces, matrix: RankMatrix) -> None:
    """Write an update to the place where ``take_box`` found its input. A view of a whole matrix is copied."""
    assert matrix.work is not None
    if isinstance(boxes, Pieces):
        boxes.put(matrix.index, update.clone() if matrix.entry.route.hops else update)
    else:
        view(boxes, matrix.work).copy_(update)


def stack_size(sides: Sequence[int], group: Mapping[str, Any], device: torch.device) -> int:
    """Return how many matrices of ``sides`` a recipe can stack with the same bits; 1: it must not stack."""
    name = name_for(group.get("orthogonalize", STOCK), *sides[-2:])
    if name == STOCK or len(sides) > 2:
        return 1
    rows, columns = sides
    return run_length(rows, columns, find_recipe(name), device)


def newton_schulz_update(
    whole: Tensor,  # [rows, columns], [matrices, rows, columns], or a parameter's own dimensions
    sides: Sequence[int],
    group: Mapping[str, Any],
    workspace: Workspace | None = None,
) -> Tensor:  # shape of ``whole``
    """Run Newton–Schulz with a group's settings on ``whole``, reshaped to ``sides``. The shape is kept.

    A ``workspace`` lets a recipe use the same memory in every step.
    """
    matrix = whole if whole.shape == sides else whole.reshape(*sides)
    name = name_for(group.get("orthogonalize", STOCK), *sides[-2:])
    around = AROUND.get()
    if name == STOCK:
        steps = group["ns_steps"], group["ns_coefficients"]
        update = around(zeropower_via_newtonschulz, matrix, *steps, group["eps"])
    else:
        update = around(orthogonalize_by, matrix, find_recipe(name), group["eps"], workspace)
    return update if update.shape == whole.shape else update.reshape(whole.shape)
