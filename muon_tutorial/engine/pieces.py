"""A bucket's boxes, matrix by matrix, for routes that need no flat buffer.

Outgoing parts are packed directly from the matrices, received parts are used where they arrived, and parts
that stay are not moved: no buffer holds the whole bucket in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan.exchange import BufferSlice, Cargo, Index, Parcels

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class InParts:
    """A box of ``shape`` in parts: each part and its index in the box."""

    shape: Shape
    parts: tuple[tuple[Tensor, Index], ...]

    def box(self) -> Tensor:
        """The box: its only part, or all parts put together. On meta, one ``copy_`` stands for all."""
        first = self.parts[0][0]
        if first.shape == self.shape:
            return first
        box = first.new_empty(self.shape)
        if box.is_meta:
            return box.copy_(box)
        for part, index in self.parts:
            box[index] = part
        return box


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The boxes that this rank holds, by the index of their matrix.

    Taking a box removes it, so that its memory is free as soon as it has been used. Empty boxes need not be
    put.
    """

    dtype: torch.dtype
    device: torch.device
    _boxes: dict[int, Tensor | InParts] = field(default_factory=dict)

    def put(self, matrix: int, box: Tensor) -> None:
        """Store a matrix's box, in its own shape."""
        self._boxes[matrix] = box

    def take(self, held: BufferSlice) -> Tensor:
        """Remove and return a matrix's box, in its own shape."""
        if 0 in held.box.shape:  # an empty box need not be put
            return torch.empty(held.box.shape, dtype=self.dtype, device=self.device)
        box = self._boxes.pop(held.entry.matrix.index)
        return box.box() if isinstance(box, InParts) else box

    def pack(self, parcels: Parcels) -> tuple[Tensor, list[Tensor]]:  # [elements that leave], own boxes
        """Remove all boxes; returns the parts that leave, flat, one after the other, and those that stay,
        each contiguous like those that arrive.

        A part that both stays and leaves is stored once, among those that leave. A box that stays whole is
        not copied. Other parts that stay are copied, so that they do not keep their whole box alive.
        """
        numel = sum(math.prod(shape) for *_, shape in parcels.leaving)
        packed = torch.empty(numel, dtype=self.dtype, device=self.device)
        start = 0
        for held, index, shape in () if packed.is_meta else parcels.leaving:
            stop = start + math.prod(shape)
            packed[start:stop].view(shape).copy_(self._box(held)[index])
            start = stop
        stays = [
            self._part(*part) if begin is None else packed[begin : begin + math.prod(part[2])].view(part[2])
            for part, begin in zip(parcels.kept, parcels.kept_at, strict=True)
        ]
        self._boxes.clear()
        return packed.copy_(packed) if packed.is_meta else packed, stays  # stands for the copies of all boxes

    def _part(self, held: BufferSlice, index: Index, shape: Shape) -> Tensor:
        box = self._box(held)
        if box.shape == shape:
            return box.contiguous()
        return box[index].clone(memory_format=torch.contiguous_format)

    def _box(self, held: BufferSlice) -> Tensor:
        box = self._boxes[held.entry.matrix.index]
        assert isinstance(box, Tensor)
        return box

    @classmethod
    def unpack(
        cls, arrived: Tensor, cargo: Cargo, kept: Iterable[tuple[Tensor, tuple[BufferSlice, Index, Shape]]]
    ) -> Pieces:
        """The opposite of ``pack``: boxes made of the parts that arrived and those that stayed."""
        sizes = [math.prod(shape) for *_, shape in cargo]
        came = [*zip(arrived.split(sizes), cargo, strict=True), *kept]
        parts: dict[int, list[tuple[Tensor, Index]]] = {}
        shapes: dict[int, Shape] = {}
        for part, (held, index, shape) in came:
            matrix = held.entry.matrix.index
            parts.setdefault(matrix, []).append((part.view(shape), index))
            shapes[matrix] = held.box.shape
        boxes: Mapping[int, Tensor | InParts] = {
            matrix: InParts(shapes[matrix], tuple(its)) for matrix, its in parts.items()
        }
        return cls(arrived.dtype, arrived.device, dict(boxes))
