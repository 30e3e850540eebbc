"""A bucket's boxes, matrix by matrix, for routes that need no flat buffer.

Parts to send are packed directly from the matrices, received parts are used where they arrived, and parts
that stay are not moved. So no buffer holds the whole bucket in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan.exchange import BufferSlice, Parcels, SharedPart


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The boxes that this rank holds, by the index of their matrix. A box may be in several parts.

    ``take`` puts a box's parts together and removes them, so that their memory is free as soon as the box has
    been used. Empty boxes may be missing.
    """

    dtype: torch.dtype
    device: torch.device
    _parts: dict[int, list[tuple[tuple[slice, ...], Tensor]]] = field(default_factory=dict)

    def put(self, matrix: int, box: Tensor) -> None:
        """Store a matrix's box, in the box's shape."""
        self._parts[matrix] = [((), box)]

    def take(self, held: BufferSlice) -> Tensor:
        """Remove and return a matrix's box, in the box's shape."""
        shape = held.box.shape
        if 0 in shape:  # empty boxes may be missing
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        parts = self._parts.pop(held.entry.matrix.index)
        _, first = parts[0]
        if first.shape == shape:
            return first
        box = first.new_empty(shape)
        if box.is_meta:
            return box.copy_(box)
        for index, part in parts:
            box[index] = part
        return box

    def pack(self, parcels: Parcels) -> tuple[Tensor, list[Tensor]]:  # [elements that leave], own boxes
        """Remove all boxes, and return the parts that leave, packed flat, and a list of the parts that stay.

        Parts that stay are contiguous. A part that both stays and leaves is returned as a view of the packed
        tensor. A box that stays whole is not copied. Other parts that stay are copied, so that they do not
        keep their whole box alive.
        """
        numel = sum(part.numel for part in parcels.leaving)
        packed = torch.empty(numel, dtype=self.dtype, device=self.device)
        start = 0
        for part in () if packed.is_meta else parcels.leaving:
            stop = start + part.numel
            packed[start:stop].view(part.box.shape).copy_(self._box(part)[part.index])
            start = stop
        stays = [
            self._own(part) if begin is None else packed[begin : begin + part.numel].view(part.box.shape)
            for part, begin in zip(parcels.kept, parcels.kept_at, strict=True)
        ]
        self._parts.clear()
        # On meta, this one copy stands for the copies of all parts.
        return packed.copy_(packed) if packed.is_meta else packed, stays

    def _own(self, part: SharedPart) -> Tensor:
        box = self._box(part)
        if box.shape == part.box.shape:
            return box.contiguous()
        return box[part.index].clone(memory_format=torch.contiguous_format)

    def _box(self, part: SharedPart) -> Tensor:
        [(_, box)] = self._parts[part.held.entry.matrix.index]
        return box

    @classmethod
    def unpack(
        cls,
        arrived: Tensor,  # [elements that arrive]
        coming: Sequence[SharedPart],
        kept: Iterable[tuple[SharedPart, Tensor]],
    ) -> Pieces:
        """Make boxes of the parts that arrived and the parts that stayed: the opposite of ``pack``."""
        pieces = cls(arrived.dtype, arrived.device)
        came = zip(coming, arrived.split([part.numel for part in coming]), strict=True)
        for part, elements in (*came, *kept):
            parts = pieces._parts.setdefault(part.held.entry.matrix.index, [])
            parts.append((part.index, elements.view(part.box.shape)))
        return pieces
