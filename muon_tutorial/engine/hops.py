"""The table of hops: one change of placement along one axis, or one packed exchange over several.

Each is a generator that asks for at most one collective. Beside each hop in the table stands its opposite;
only the reduce_scatter has none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import RequestError
from ..plan.exchange import BufferSlice, Cargo, Exchange
from ..plan.grid import Coordinate
from ..plan.layout import Box, Hop, Move, Owned, Partial, Placement, Replicate, Shard, shard_box
from .collective import Collective, Label, Walk


def take(x: Any, hop: Move, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    """Change placement along one axis, or layout over several: at most one request.

    Must be walked by all ranks of the group. Returns this rank's tensor afterwards, or None where ``Owned``
    by another rank.
    """
    if isinstance(hop, Exchange):
        return (yield from _exchange(x, hop, dtype, at, label))
    assert isinstance(hop, Hop)
    change = type(hop.src), type(hop.dst)
    if change not in _MOVES:
        raise RequestError(f"{label}: there is no hop from {hop.src} to {hop.dst} along {hop.axis!r}")
    return (yield from _MOVES[change](x, hop, dtype, at, label))


def asks(hop: Move) -> bool:
    """Whether a move needs a request, or is free."""
    if isinstance(hop, Exchange):
        return not hop.silent
    assert isinstance(hop, Hop)
    return (type(hop.src), type(hop.dst)) not in _FREE


def _exchange(x: Tensor, exchange: Exchange, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    parcels = exchange.parcels(at)
    packed = _pack(x, parcels.leaving)
    if not exchange.silent and at.size(*exchange.axes) > 1:
        sends, receives = parcels.sends, parcels.receives
        packed = yield Collective(
            "all_to_all", exchange.axes, dtype, packed, sum(receives), label, None, sends, receives
        )
    unpacked = x.new_zeros(parcels.length)
    _unpack(packed, unpacked, parcels.coming)
    return unpacked


def _pack(x: Tensor, cargo: Cargo) -> Tensor:
    """Boxes of a flat buffer, one after the other. On the meta device only their size matters."""
    if x.is_meta:
        return x.new_empty(sum(box.numel for _, box in cargo))
    boxes = (view(x, held)[box.slices].reshape(-1) for held, box in cargo)
    return torch.cat([x.new_empty(0), *boxes])


def _unpack(arrived: Tensor, buffer: Tensor, cargo: Cargo) -> None:
    """The opposite of ``_pack``: each box to its place in the buffer."""
    if not arrived.is_meta:
        for flat, (held, box) in zip(arrived.split([box.numel for _, box in cargo]), cargo, strict=True):
            view(buffer, held)[box.slices] = flat.view(box.shape)


def _all_gather(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    parts, size = at.size(hop.axis), _largest(hop, hop.src, at)
    answer = yield Collective("all_gather", (hop.axis,), dtype, _flat(x, size), parts * size, label)
    return _assemble(answer, hop, hop.src, at)


def _slice(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    return x[_box(hop, hop.dst, at, at[hop.axis]).slices]
    yield  # a generator that asks for nothing


def _keep(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    return x
    yield  # a generator that asks for nothing


def _gather_to_owner(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    root, size = _owner(hop.dst), _largest(hop, hop.src, at)
    receive = at.size(hop.axis) * size if at[hop.axis] == root else 0
    answer = yield Collective("gather", (hop.axis,), dtype, _flat(x, size), receive, label, root)
    return _assemble(answer, hop, hop.src, at) if at[hop.axis] == root else None


def _scatter_from_owner(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    root, size = _owner(hop.src), _largest(hop, hop.dst, at)
    send = _parcel(x, hop, hop.dst, at) if at[hop.axis] == root else None
    answer = yield Collective("scatter", (hop.axis,), dtype, send, size, label, root)
    box = _box(hop, hop.dst, at, at[hop.axis])
    return answer[: box.numel].view(box.shape)


def _keep_if_owner(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    return x if at[hop.axis] == _owner(hop.dst) else None
    yield  # a generator that asks for nothing


def _broadcast(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    root = _owner(hop.src)
    numel = _box(hop, hop.dst, at, 0).numel
    send = _flat(x, numel) if at[hop.axis] == root else None
    answer = yield Collective("broadcast", (hop.axis,), dtype, send, numel, label, root)
    return answer.view(hop.shape)


def _all_reduce(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    answer = yield Collective("all_reduce", (hop.axis,), dtype, _flat(x, x.numel()), x.numel(), label)
    return answer.view(x.shape)


def _reduce_scatter(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    size = _largest(hop, hop.dst, at)
    answer = yield Collective("reduce_scatter", (hop.axis,), dtype, _parcel(x, hop, hop.dst, at), size, label)
    box = _box(hop, hop.dst, at, at[hop.axis])
    return answer[: box.numel].view(box.shape)


_MOVES = {
    (Shard, Replicate): _all_gather,
    (Replicate, Shard): _slice,
    (Replicate, Partial): _keep,
    (Shard, Owned): _gather_to_owner,
    (Owned, Shard): _scatter_from_owner,
    (Replicate, Owned): _keep_if_owner,
    (Owned, Replicate): _broadcast,
    (Partial, Replicate): _all_reduce,
    (Partial, Shard): _reduce_scatter,
}
_FREE = {(Replicate, Shard), (Replicate, Partial), (Replicate, Owned)}


def _box(hop: Hop, placement: Placement, at: Coordinate, position: int) -> Box:
    return shard_box(hop.shape, placement, position, at.size(hop.axis))


def _owner(placement: object) -> int:
    assert isinstance(placement, Owned)
    return placement.rank


def _largest(hop: Hop, placement: Placement, at: Coordinate) -> int:
    """Elements of the largest piece: what every rank sends where pieces must be of one size."""
    assert isinstance(placement, Shard)
    rest = (length for dim, length in enumerate(hop.shape) if dim != placement.dim)
    return math.prod(rest) * placement.longest(hop.shape[placement.dim], at.size(hop.axis))


def _flat(x: Tensor, size: int) -> Tensor:
    flat = x.reshape(-1)
    return flat if flat.numel() == size else pad(flat, (0, size - flat.numel()))


def _parcel(x: Tensor, hop: Hop, placement: Placement, at: Coordinate) -> Tensor:
    """All positions' pieces, flat, one after the other, each as long as the largest."""
    assert isinstance(placement, Shard)
    size, parts = _largest(hop, placement, at), range(at.size(hop.axis))
    if placement.dim == 0 and size * len(parts) == x.numel():
        return x.reshape(-1)
    return torch.cat([_flat(x[_box(hop, placement, at, part).slices], size) for part in parts])


def _assemble(answer: Tensor, hop: Hop, placement: Placement, at: Coordinate) -> Tensor:
    """The whole tensor from all positions' pieces: the opposite of ``_parcel``."""
    assert isinstance(placement, Shard)
    size, parts = _largest(hop, placement, at), range(at.size(hop.axis))
    if placement.dim == 0 and size * len(parts) == math.prod(hop.shape):
        return answer.view(hop.shape)
    boxes = [_box(hop, placement, at, part) for part in parts]
    slots = answer.split(size) if size else [answer] * len(parts)
    return torch.cat(
        [slot[: box.numel].view(box.shape) for slot, box in zip(slots, boxes, strict=True)], dim=placement.dim
    )


def view(buffer: Tensor, held: BufferSlice) -> Tensor:
    """The box that a slice of a flat buffer holds, in its own shape, sharing the buffer's memory."""
    return buffer[slice(*held.interval)].view(held.box.shape)
