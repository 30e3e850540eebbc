"""Small generators that walk a plan and *ask* for collectives. Communication never computes.

``gather`` and ``scatter`` are each other's mirror; ``orthogonalize`` is a gather, Newton–Schulz where a
matrix is whole, and a scatter. Who takes part follows from the route and the coordinate, never from the data
at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.bucket import Bucket, Entry
from ..plan.grid import Coordinate
from ..plan.layout import Box, Hop, Owned, Partial, Placement, Replicate, Route, Shard, shard_box
from .collective import IDLE, Collective, Label, Walk

NewtonSchulz = Callable[[Entry, Tensor], Tensor]


def gather(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """Walk the route out: from what storage holds to what the computation needs."""
    for hop in route.hops:
        x = yield from take(x, hop, route.dtype, at, label)
    return x


def scatter(x: Any, route: Route, at: Coordinate, label: Label) -> Walk:
    """Walk the route back: the same hops in opposite order, each the other way."""
    for hop in reversed(route.hops):
        x = yield from take(x, hop.inverse, route.dtype, at, label)
    return x


def orthogonalize(x: Tensor, bucket: Bucket, at: Coordinate, newton_schulz: NewtonSchulz) -> Walk:
    """From the kept slice of Newton–Schulz inputs to the kept slice of updates, both flat.

    dp gather → tp gather → Newton–Schulz → tp slice → dp slice, for the bucket's own routes.
    """
    whole = yield from gather(x, bucket.compute, at, Label("dp gather", f"bucket {bucket.index}"))
    updates = torch.zeros_like(whole)
    for entry in bucket.entries:
        if bucket.works_on(entry, at):
            matrix = yield from gather(
                unpack(whole, entry, at), entry.route, at, Label("tp gather", entry.matrix.name)
            )
            matrix = newton_schulz(entry, matrix)
            pack(
                updates,
                entry,
                at,
                (yield from scatter(matrix, entry.route, at, Label("tp slice", entry.matrix.name))),
            )
        else:
            yield from stand_by(entry.route)
    return (yield from scatter(updates, bucket.compute, at, Label("dp slice", f"bucket {bucket.index}")))


def unpack(buffer: Tensor, entry: Entry, at: Coordinate) -> Tensor:
    """The rank's own piece of a matrix, as a view of the flat buffer in two dimensions."""
    box = entry.box(at)
    return buffer[entry.offset : entry.offset + box.numel].view(box.shape)


def pack(buffer: Tensor, entry: Entry, at: Coordinate, piece: Tensor) -> None:
    """Write the rank's own piece of a matrix to its place in the flat buffer."""
    unpack(buffer, entry, at).copy_(piece)


def stand_by(route: Route) -> Walk:
    """Empty turns, as many as the route out and back would ask for, so that the order stays the same."""
    for hop in (*route.hops, *route.inverse.hops):
        if _asks(hop):
            yield IDLE


def take(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    """Change placement along one axis: at most one request, or a free slice.

    Must be walked by all ranks of the axis' group. Returns this rank's tensor under ``hop.dst``, or None
    where ``Owned`` by another rank.
    """
    return (yield from _MOVES[type(hop.src), type(hop.dst)](x, hop, dtype, at, label))


def _all_gather(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    parts, size = at.size(hop.axis), _largest(hop, hop.src, at)
    answer = yield Collective("all_gather", hop.axis, dtype, _flat(x, size), parts * size, label)
    return _assemble(answer, hop, hop.src, at)


def _slice(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    return x[_box(hop, hop.dst, at, at[hop.axis]).slices]
    yield  # a generator that asks for nothing


def _gather_to_owner(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    root, size = _owner(hop.dst), _largest(hop, hop.src, at)
    receive = at.size(hop.axis) * size if at[hop.axis] == root else 0
    answer = yield Collective("gather", hop.axis, dtype, _flat(x, size), receive, label, root)
    return _assemble(answer, hop, hop.src, at) if at[hop.axis] == root else None


def _scatter_from_owner(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    root, size = _owner(hop.src), _largest(hop, hop.dst, at)
    send = _parcel(x, hop, hop.dst, at) if at[hop.axis] == root else None
    answer = yield Collective("scatter", hop.axis, dtype, send, size, label, root)
    box = _box(hop, hop.dst, at, at[hop.axis])
    return answer[: box.numel].view(box.shape)


def _keep_if_owner(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    return x if at[hop.axis] == _owner(hop.dst) else None
    yield  # a generator that asks for nothing


def _broadcast(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    root = _owner(hop.src)
    numel = _box(hop, hop.dst, at, 0).numel
    send = _flat(x, numel) if at[hop.axis] == root else None
    answer = yield Collective("broadcast", hop.axis, dtype, send, numel, label, root)
    return answer.view(hop.shape)


def _all_to_all(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    here, parts = at[hop.axis], range(at.size(hop.axis))
    held, wanted = _box(hop, hop.src, at, here), _box(hop, hop.dst, at, here)
    outward = [held.overlap(_box(hop, hop.dst, at, part)) for part in parts]
    inward = [wanted.overlap(_box(hop, hop.src, at, part)) for part in parts]
    sends, receives = tuple(box.numel for box in outward), tuple(box.numel for box in inward)
    send = torch.cat([x[box.seen_from(held).slices].reshape(-1) for box in outward])
    answer = yield Collective(
        "all_to_all", hop.axis, dtype, send, sum(receives), label, None, sends, receives
    )
    whole = x.new_empty(wanted.shape)
    if answer is not None:
        for flat, box in zip(answer.split(receives), inward, strict=True):
            whole[box.seen_from(wanted).slices] = flat.view(box.shape)
    return whole


def _all_reduce(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    answer = yield Collective("all_reduce", hop.axis, dtype, _flat(x, x.numel()), x.numel(), label)
    return answer.view(x.shape)


def _reduce_scatter(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    size = _largest(hop, hop.dst, at)
    answer = yield Collective("reduce_scatter", hop.axis, dtype, _parcel(x, hop, hop.dst, at), size, label)
    box = _box(hop, hop.dst, at, at[hop.axis])
    return answer[: box.numel].view(box.shape)


_MOVES = {
    (Shard, Replicate): _all_gather,
    (Replicate, Shard): _slice,
    (Shard, Owned): _gather_to_owner,
    (Owned, Shard): _scatter_from_owner,
    (Replicate, Owned): _keep_if_owner,
    (Owned, Replicate): _broadcast,
    (Shard, Shard): _all_to_all,
    (Partial, Replicate): _all_reduce,
    (Partial, Shard): _reduce_scatter,
}
_FREE = {(Replicate, Shard), (Replicate, Owned)}


def _asks(hop: Hop) -> bool:
    return (type(hop.src), type(hop.dst)) not in _FREE


def _box(hop: Hop, placement: Placement, at: Coordinate, position: int) -> Box:
    return shard_box(hop.shape, placement, position, at.size(hop.axis))


def _owner(placement: object) -> int:
    assert isinstance(placement, Owned)
    return placement.rank


def _largest(hop: Hop, placement: Placement, at: Coordinate) -> int:
    """Elements of the largest piece: what every rank sends where pieces must be of one size."""
    return max(_box(hop, placement, at, position).numel for position in range(at.size(hop.axis)))


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
    boxes = [_box(hop, placement, at, part) for part in parts]
    if placement.dim == 0 and size * len(parts) == math.prod(hop.shape):
        return answer.view(hop.shape)
    slots = answer.split(size) if size else [answer] * len(parts)
    return torch.cat(
        [slot[: box.numel].view(box.shape) for slot, box in zip(slots, boxes, strict=True)], dim=placement.dim
    )
