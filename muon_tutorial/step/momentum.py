"""Updates the momentum, and says which part of each momentum a rank stores between steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.pieces import Pieces
from ..errors import UsageError
from ..plan.bucket import flat_frame
from ..plan.exchange import BufferSlice, SlicedBuffer
from ..plan.grid import Coordinate
from ..plan.matrix import held_box
from ..plan.strategies import Plan
from .parameter_state import (
    MomentumIndex,
    ParameterState,
    gradient_dtype,
    placed_alike,
    placed_as,
    write_back,
)
from .rank_bucket import AROUND, RankBucket, RankMatrix

Elements = tuple[tuple[tuple[int, int], tuple[int, int], tuple[int, int]], ...]
"""For each matrix: the offset and shape of its piece, and which run of its elements the rank stores."""


def update_momentum(
    bucket: RankBucket,
    gradient: Tensor | None,  # [stored]
    present: Collection[int],
    scale: Tensor | None = None,  # []
) -> Tensor | Pieces:  # [stored]
    """Update the momentum that this rank stores; return the Newton–Schulz inputs, in the dtype that travels.

    ``gradient`` is flat, or None to read gradients from the model and multiply them by ``scale``. Inputs are
    also flat, or ``Pieces`` if the compute route needs no flat buffer. Inputs that no rank needs are left
    out. ``present`` are the parameters that have a gradient; the inputs of all others are zero.
    """
    where: dict[str, Any] = {"dtype": bucket.plan.compute.dtype, "device": bucket.device}
    inputs: Tensor | Pieces = Pieces(**where)
    if not bucket.travels_in_pieces:
        inputs = torch.zeros(bucket.stored_numel if bucket.contributing else 0, **where)
    around = AROUND.get()
    for matrix in bucket.matrices:
        ns_input, is_needed = None, matrix.index in bucket.contributing
        if matrix.numel and matrix.param in present:
            ns_input = around(move_momentum, bucket, matrix, gradient, scale, is_needed)
        if not is_needed:
            continue
        if isinstance(inputs, Pieces):  # a copy, so that the momentum is not overwritten
            make = torch.zeros if ns_input is None else torch.empty
            box = make(matrix.model_slice.box.shape, **where)
            inputs.put(matrix.index, box if ns_input is None else box.copy_(ns_input))
        elif ns_input is not None:
            inputs[matrix.stored] = ns_input.reshape(-1)
    return inputs


def move_momentum(
    bucket: RankBucket,
    matrix: RankMatrix,
    gradient: Tensor | None,  # [stored]
    scale: Tensor | None,  # []
    is_needed: bool,
) -> Tensor | None:  # the momentum's shape
    """Update a matrix's momentum. Return its Newton–Schulz input if a rank needs it, otherwise None."""
    own = stored_gradient(bucket, matrix, gradient, scale)
    group, stored = matrix.parameter.group, matrix.parameter.momentum
    momentum = stored[matrix.momentum_index]
    nesterov = group["nesterov"] and is_needed
    ns_input = momentum_update(momentum, own.view(momentum.shape), group["momentum"], nesterov)
    write_back(stored, matrix.momentum_index, momentum)
    return ns_input if is_needed else None


def stored_gradient(
    bucket: RankBucket, matrix: RankMatrix, flat: Tensor | None, scale: Tensor | None = None
) -> Tensor:
    """Return this rank's part of a matrix's averaged gradient, flat; zeros if there is no gradient.

    ``flat`` is the result of phase 1. If ``flat`` is None, the gradient is read from the model and multiplied
    by ``scale``. Without ``scale``, the result may share the gradient's memory.
    """
    if flat is not None:
        return flat[matrix.stored]
    grad, dtype = matrix.parameter.grad, bucket.plan.gradient.dtype
    if grad is None or not matrix.numel:  # FSDP2's empty shards may have any empty shape
        return torch.zeros(matrix.numel, dtype=dtype, device=bucket.device)
    mine = grad[matrix.place].to(dtype).reshape(-1)
    return mine if scale is None else mine * scale.to(dtype)


def momentum_update(
    buffer: Tensor,  # any shape
    grad: Tensor,  # same shape
    momentum: float,
    nesterov: bool,
) -> Tensor:  # the same shape
    """Move the momentum towards the gradient, in place, and return the input of Newton–Schulz.

    The momentum is an exponential moving average (``lerp``), as in ``torch.optim.Muon``. The gradient is cast
    to the buffer's dtype. Without Nesterov, the buffer itself is returned, so do not write to the result.

    >>> import torch
    >>> buffer, grad = torch.zeros(1, 2), torch.ones(1, 2)
    >>> momentum_update(buffer, grad, 0.75, nesterov=True)
    tensor([[0.4375, 0.4375]])
    >>> buffer
    tensor([[0.2500, 0.2500]])
    """
    grad = grad if grad.dtype is buffer.dtype else grad.to(buffer.dtype)
    buffer.lerp_(grad, 1 - momentum)
    return grad.lerp(buffer, momentum) if nesterov else buffer


@dataclass(frozen=True, slots=True, eq=False)
class MomentumShard:
    """The part of one parameter's momentum that one rank stores.

    If ``flat``, dp cuts the momentum into slices, and the part is a run of elements, with the parameter's
    matrices one after the other. Otherwise the part has the shape of the parameter on this rank. If the
    parameter is a DTensor, the part is a DTensor, too, because ``torch.distributed.checkpoint`` would take a
    plain tensor for a replica.
    """

    parameter: ParameterState
    shards: tuple[BufferSlice, ...]
    flat: bool

    @property
    def shape(self) -> tuple[int, ...]:
        numel = sum(shard.numel for shard in self.shards)
        return (numel,) if self.flat else tuple(self.parameter.data.shape)

    def index(self, shard: BufferSlice, at: Coordinate) -> MomentumIndex:
        """Return the index of one matrix's elements in the momentum."""
        matrix = shard.entry.matrix
        if not self.flat:
            return matrix.slices(at)
        start = sum(other.numel for other in self.shards if other.entry.matrix.index < matrix.index)
        return slice(start, start + shard.numel)

    def fill(self, at: Coordinate) -> None:
        """Put the momentum into the parameter's state: zeros, or this rank's part of a loaded momentum.

        A ``flat`` momentum could be mistaken for the momentum of another rank or another step, because their
        sizes are equal. So the state also records which elements the momentum contains, and how many steps
        were done. For a plain parameter that is cut, it records the number of this rank's ``piece``.

        Raises:
            UsageError: a loaded momentum does not fit this rank's part or the whole parameter.
        """
        state = self.parameter.state
        saved = state.get("momentum_buffer")
        matrix = self.shards[0].entry.matrix
        piece, loaded = at.position(*matrix.axes), state.pop("piece", None)
        if matrix.cuts and not self.flat and not isinstance(self.parameter.param, DTensor):
            is_piece = saved is not None and tuple(saved.shape) == self.shape
            if is_piece and loaded not in (None, piece):  # states of older versions have none
                raise UsageError(
                    f"{matrix.name}: this is the momentum of piece {loaded} of the parameter; {at} has piece "
                    f"{piece}: load each rank's own state, or use load_checkpoint()"
                )
            state["piece"] = piece
        where: Any = {"dtype": gradient_dtype(self.parameter.param), "device": self.parameter.param.device}
        mine = torch.zeros(self.shape, **where) if saved is None else self._cut(saved, at)
        state["momentum_buffer"] = mine if self.flat else placed_as(mine, self.parameter.param)
        if self.flat:
            state["kept"] = self.elements(at)
            state.setdefault("steps", 0)

    def elements(self, at: Coordinate) -> Elements:
        """Return the runs of elements in a flat momentum, one per matrix that is not empty."""
        frames = [(flat_frame(shard.entry.matrix, at), shard) for shard in self.shards if shard.numel]
        return tuple((*frame, shard.in_piece) for frame, shard in frames)

    def _cut(self, saved: Tensor, at: Coordinate) -> Tensor:
        """Return this rank's part of a loaded momentum. A DTensor with other placements is gathered first."""
        if isinstance(saved, DTensor):
            param = self.parameter.param
            is_stored_so = not self.flat and isinstance(param, DTensor) and placed_alike(saved, param)
            saved = saved.to_local() if is_stored_so else saved.full_tensor()
        matrix = self.shards[0].entry.matrix
        whole = matrix.shape if matrix.part is None else matrix.part.shape
        if tuple(saved.shape) == self.shape:
            theirs = self.parameter.state.get("kept")
            if self.flat and theirs is not None and theirs != self.elements(at):
                raise UsageError(
                    f"{matrix.name}: this momentum was saved by another rank, on another grid, or with other "
                    f"parameters: it holds {_say(theirs)}, but {at} keeps {_say(self.elements(at))}; load "
                    "each rank's own state, or use load_checkpoint(). Parameters cannot be added, removed or "
                    "moved between groups while ranks keep slices of their momentum"
                )
            return saved
        if tuple(saved.shape) != whole:
            raise UsageError(
                f"{matrix.name}: a momentum of shape {tuple(saved.shape)}, loaded or kept from other "
                f"parameters, is neither {self.shape}, the part of {at}, nor {whole}, the whole parameter"
            )
        local = saved[held_box(whole, matrix.cuts, at).slices]
        if not self.flat:
            return local.contiguous()
        runs = [local[s.entry.matrix.slices(at)].reshape(-1)[slice(*s.in_piece)] for s in self.shards]
        return torch.cat([saved.new_empty(0), *runs])


def momentum_shards(
    plan: Plan, at: Coordinate, parameters: Sequence[ParameterState]
) -> dict[int, MomentumShard]:
    """Return the part of each parameter's momentum that a rank stores, by the parameter's index."""
    shards: dict[int, list[BufferSlice]] = {}
    flat: dict[int, bool] = {}
    for bucket in plan.buckets:  # one parameter's matrices may lie in several buckets
        for shard in bucket.stored_shards(at):
            shards.setdefault(shard.entry.matrix.param, []).append(shard)
            flat[shard.entry.matrix.param] = isinstance(bucket.storage_layout, SlicedBuffer)
    for run in shards.values():
        run.sort(key=lambda shard: shard.entry.matrix.index)
    return {param: MomentumShard(parameters[param], tuple(shards[param]), flat[param]) for param in shards}


def _say(elements: Elements) -> str:
    """Describe each run of elements and its piece."""
    runs = [f"{run[0]} to {run[1]} of a {h} x {w} piece at {offset}" for offset, (h, w), run in elements]
    return "elements " + ", ".join(runs) if runs else "nothing"
