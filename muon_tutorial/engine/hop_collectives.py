"""Hops: a function for each change of placement along one axis, and one for an exchange over several axes.

Each function is a generator that asks for at most one collective, or for one per slice if the slices of a
flat buffer are large and of different lengths. All hops but reduce_scatter and reduce have their opposite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError
from ..plan.exchange import BufferSlice, Exchange, Parcels, SharedPart
from ..plan.grid import Coordinate
from ..plan.layout import Hop, HopPieces, Move, Owned, Partial, Replicate, Shard
from .collective import IDLE, Collective, Label, Walk
from .padding import pad_piece, pad_pieces, unpad
from .pieces import Pieces


def take(x: Any, hop: Move, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    """Change a tensor's placement along one axis, or the layout of many matrices over several axes.

    All ranks of the group must run it. Returns this rank's new tensor, which is empty if another rank owns
    the whole tensor.
    """
    if isinstance(hop, Exchange):
        return (yield from _exchange(x, hop, dtype, at, label))
    change = type(hop.src), type(hop.dst)
    if change not in _MOVES:
        raise RequestError(f"{label}: there is no hop from {hop.src} to {hop.dst} along {hop.axis!r}")
    return (yield from _MOVES[change](x, hop, dtype, at, label))


def _exchange(
    x: Tensor | Pieces, exchange: Exchange, dtype: torch.dtype, at: Coordinate, label: Label
) -> Walk:
    parcels = exchange.parcels(at)
    asks = not exchange.silent and len(parcels.sends) > 1
    if asks and exchange.passes_by(at):
        yield IDLE
        asks = False
    if not asks:
        return x if isinstance(x, Pieces) else _keep_parts(x, parcels)
    packed, kept = x.pack(parcels) if isinstance(x, Pieces) else (_pack(x, parcels.leaving), [])
    answer = yield Collective(
        "all_to_all",
        exchange.axes,
        dtype,
        packed,
        sum(parcels.receives),
        label,
        sends=parcels.sends,
        receives=parcels.receives,
        starts=parcels.starts,
    )
    del packed  # frees memory for the new buffer
    if isinstance(x, Pieces):
        return Pieces.unpack(answer, parcels.coming, zip(parcels.kept_as, kept, strict=True))
    unpacked = _keep_parts(x, parcels)
    _unpack(answer, unpacked, parcels.coming)
    return unpacked


def _keep_parts(x: Tensor, parcels: Parcels) -> Tensor:
    """Make a buffer in the new layout with the parts that this rank keeps, and zeros elsewhere."""
    buffer = x.new_zeros(parcels.length)
    _unpack(_pack(x, parcels.kept), buffer, parcels.kept_as)
    return buffer


def _pack(x: Tensor, parts: Sequence[SharedPart]) -> Tensor:
    """Pack boxes of a flat buffer, one after the other. On the meta device, one copy is enough."""
    if x.is_meta:
        packed = x.new_empty(sum(part.numel for part in parts))
        return packed.copy_(packed)
    return torch.cat([x.new_empty(0), *(view(x, part.held)[part.index].reshape(-1) for part in parts)])


def _unpack(
    arrived: Tensor,  # [sum of the parts' elements]
    buffer: Tensor,  # [elements of the layout]
    parts: Sequence[SharedPart],
) -> None:
    """The opposite of ``_pack``: write each box to its place in the buffer."""
    if arrived.is_meta:
        arrived.copy_(arrived)  # meta has no values, so one copy is enough
    else:
        for part, elements in zip(parts, arrived.split([part.numel for part in parts]), strict=True):
            view(buffer, part.held)[part.index] = elements.view(part.box.shape)


def _all_gather(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    pieces = hop.pieces(at)
    if pieces.uneven and len(hop.shape) == 1:  # padding could multiply a flat buffer's bytes
        return (yield from _send_slice_to_all(x, hop, pieces, dtype, label))
    send = pad_piece(x, pieces.size) if pieces.uneven else x.reshape(-1)
    answer = yield Collective("all_gather", (hop.axis,), dtype, send, pieces.parts * pieces.size, label)
    return unpad(answer, hop, pieces) if pieces.uneven else answer.reshape(hop.shape)


def _keep_own(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    """Keep this rank's slice of a tensor that all ranks hold, or all of it, or nothing, as ``hop`` says."""
    if isinstance(hop.dst, Owned):
        return x if at[hop.axis] == hop.dst.rank else x.new_empty(0)
    return x[hop.pieces(at).mine.slices] if isinstance(hop.dst, Shard) else x
    yield  # never reached, but makes this function a generator


def _gather_to_owner(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    assert isinstance(hop.dst, Owned)
    pieces, root = hop.pieces(at), hop.dst.rank
    receive = pieces.parts * pieces.size if at[hop.axis] == root else 0
    send = pad_piece(x, pieces.size) if pieces.uneven else x.reshape(-1)
    answer = yield Collective("gather", (hop.axis,), dtype, send, receive, label, root)
    if at[hop.axis] != root:
        return answer
    return unpad(answer, hop, pieces) if pieces.uneven else answer.reshape(hop.shape)


def _scatter_from_owner(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    assert isinstance(hop.src, Owned)
    pieces, root = hop.pieces(at), hop.src.rank
    send = None
    if at[hop.axis] == root:
        send = pad_pieces(x, pieces) if pieces.uneven else x.reshape(-1)
    answer = yield Collective("scatter", (hop.axis,), dtype, send, pieces.size, label, root)
    shape = pieces.mine.shape
    return answer[: math.prod(shape)].view(shape)


def _broadcast(x: Any, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    assert isinstance(hop.src, Owned)
    root, numel = hop.src.rank, math.prod(hop.shape)
    send = x.reshape(-1) if at[hop.axis] == root else None
    answer = yield Collective("broadcast", (hop.axis,), dtype, send, numel, label, root)
    return answer.view(hop.shape)


def _all_reduce(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    answer = yield Collective("all_reduce", (hop.axis,), dtype, x.reshape(-1), x.numel(), label)
    return answer.view(x.shape)


def _reduce_scatter(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    pieces = hop.pieces(at)
    if pieces.uneven and len(hop.shape) == 1:  # padding could multiply a flat buffer's bytes
        return (yield from _sum_slices_of_all(x, hop, pieces, dtype, label))
    send = pad_pieces(x, pieces) if pieces.uneven else x.reshape(-1)
    answer = yield Collective("reduce_scatter", (hop.axis,), dtype, send, pieces.size, label)
    shape = pieces.mine.shape
    return answer[: math.prod(shape)].view(shape)


def _reduce_to_owner(x: Tensor, hop: Hop, dtype: torch.dtype, at: Coordinate, label: Label) -> Walk:
    assert isinstance(hop.dst, Owned)
    root = hop.dst.rank
    receive = x.numel() if at[hop.axis] == root else 0
    answer = yield Collective("reduce", (hop.axis,), dtype, x.reshape(-1), receive, label, root)
    return answer.view(x.shape) if receive else answer


FEW, SMALL = 64, 2**20
"""Slices of different lengths are exchanged at once on at most ``FEW`` ranks, if ranks × the longest slice is
at most ``SMALL`` elements.

Such an exchange takes one round of messages, but an owner then holds all ranks' summands of its slice.
"""


def at_once(ranks: int, longest: int) -> bool:
    """Whether slices of different lengths are exchanged at once; the longest has ``longest`` elements."""
    return ranks <= FEW and ranks * longest <= SMALL


def _send_slice_to_all(x: Tensor, hop: Hop, pieces: HopPieces, dtype: torch.dtype, label: Label) -> Walk:
    """Gather slices of any length on all ranks, in one exchange if ``at_once``, else by broadcasts."""
    if at_once(pieces.parts, pieces.size):
        about = (hop.axis,), dtype, x, math.prod(hop.shape), label, None
        sends, same = (x.numel(),) * pieces.parts, (0,) * pieces.parts  # every position gets the whole slice
        return (yield Collective("all_to_all", *about, sends, pieces.lengths, same))
    whole = x.new_empty(hop.shape, dtype=dtype)
    for root, box in pieces.uneven.items():
        send = x.reshape(-1) if box == pieces.mine else None
        whole[box.slices] = yield Collective("broadcast", (hop.axis,), dtype, send, box.numel, label, root)
    return whole


def _sum_slices_of_all(x: Tensor, hop: Hop, pieces: HopPieces, dtype: torch.dtype, label: Label) -> Walk:
    """Sum into slices of any length, in one exchange if ``at_once``, else by a reduce of each slice."""
    mine = x.new_empty(0, dtype=dtype)
    if at_once(pieces.parts, pieces.size):
        receives = (pieces.mine.numel,) * pieces.parts
        about = (hop.axis,), dtype, x, sum(receives), label, None
        summands = yield Collective("all_to_all", *about, pieces.lengths, receives)
        first, *others = summands.view(pieces.parts, pieces.mine.numel)
        mine = first.clone()
        for other in others:  # in the order of ranks
            mine += other
        return mine
    for root, box in pieces.uneven.items():
        receive = box.numel if box == pieces.mine else 0
        answer = yield Collective("reduce", (hop.axis,), dtype, x[box.slices], receive, label, root)
        mine = answer if receive else mine
    return mine


_MOVES = {
    (Shard, Replicate): _all_gather,
    (Replicate, Shard): _keep_own,
    (Replicate, Partial): _keep_own,
    (Shard, Owned): _gather_to_owner,
    (Owned, Shard): _scatter_from_owner,
    (Replicate, Owned): _keep_own,
    (Owned, Replicate): _broadcast,
    (Partial, Replicate): _all_reduce,
    (Partial, Shard): _reduce_scatter,
    (Partial, Owned): _reduce_to_owner,
}


def view(buffer: Tensor, held: BufferSlice) -> Tensor:
    """View the box in a slice of a flat buffer, in the box's own shape."""
    shape = held.box.shape
    return buffer[held.offset : held.offset + math.prod(shape)].view(shape)
