"""The table of hops: one change of placement along one axis, or one packed exchange over several.

Each is a generator that asks for at most one collective. The table is symmetric about its diagonal: what
leads out has its opposite beside it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.exchange import BufferSlice, Exchange, Parcels
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
    return (yield from _MOVES[type(hop.src), type(hop.dst)](x, hop, dtype, at, label))


def asks(hop: Move) -> bool:
    """Whether a move needs a request, or is free."""
    if isinstance(hop, Exchange):
        return not hop.silent
    assert isinstance(hop, Hop)
    return (type(hop.src), type(hop.dst)) not in _FREE


def _exchange(x: Tensor, exchange: Exchange, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    silent = exchange.silent or at.size(*exchange.axes) == 1
    leaving, coming = exchange.leaving(at), exchange.coming(at)
    sends, receives = _weigh(leaving, exchange, at), _weigh(coming, exchange, at)
    send = _pack(x, _in_order(leaving))
    if silent:
        arrived = send
    else:
        arrived = yield Collective(
            "all_to_all", exchange.axes, dtype, send, sum(receives), label, None, sends, receives
        )
    filled = x.new_zeros(exchange.dst.length(exchange.entries, at))
    _unpack(arrived, filled, _in_order(coming))
    return filled


def _pack(x: Tensor, pieces: list[tuple[BufferSlice, Box]]) -> Tensor:
    """The boxes, flat, one after the other. On the meta device nothing has values, and sizes are all there
    is."""
    if x.is_meta:
        return x.new_empty(sum(box.numel for _, box in pieces))
    boxes = (view(x, spot)[box.seen_from(spot.box).slices].reshape(-1) for spot, box in pieces)
    return torch.cat([x.new_empty(0), *boxes])


def _unpack(arrived: Tensor, filled: Tensor, pieces: list[tuple[BufferSlice, Box]]) -> None:
    """The opposite of ``_pack``: the boxes to their places."""
    if not arrived.is_meta:
        for flat, (spot, box) in zip(arrived.split([box.numel for _, box in pieces]), pieces, strict=True):
            view(filled, spot)[box.seen_from(spot.box).slices] = flat.view(box.shape)


def _weigh(parcels: Parcels, exchange: Exchange, at: Coordinate) -> tuple[int, ...]:
    """Elements for each position of the group; none where there is no parcel."""
    weights = [0] * at.size(*exchange.axes)
    for place, parcel in parcels.items():
        weights[place] = sum(box.numel for _, box in parcel)
    return tuple(weights)


def _in_order(parcels: Parcels) -> list[tuple[BufferSlice, Box]]:
    return [piece for place in sorted(parcels) for piece in parcels[place]]


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


def _all_to_all(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    here, parts = at[hop.axis], range(at.size(hop.axis))
    held, wanted = _box(hop, hop.src, at, here), _box(hop, hop.dst, at, here)
    outward = [held.overlap(_box(hop, hop.dst, at, part)) for part in parts]
    inward = [wanted.overlap(_box(hop, hop.src, at, part)) for part in parts]
    sends, receives = tuple(box.numel for box in outward), tuple(box.numel for box in inward)
    send = torch.cat([x[box.seen_from(held).slices].reshape(-1) for box in outward])
    answer = yield Collective(
        "all_to_all", (hop.axis,), dtype, send, sum(receives), label, None, sends, receives
    )
    whole = x.new_empty(wanted.shape)
    for flat, box in zip(answer.split(receives), inward, strict=True):
        whole[box.seen_from(wanted).slices] = flat.view(box.shape)
    return whole


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
    (Shard, Shard): _all_to_all,
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


def view(buffer: Tensor, spot: BufferSlice) -> Tensor:
    """The box that a flat buffer holds at a spot, in its own shape, sharing the buffer's storage."""
    return buffer[slice(*spot.interval)].view(spot.box.shape)
