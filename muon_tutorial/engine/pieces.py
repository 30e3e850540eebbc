"""A bucket's matrices one by one, for routes that need no flat buffer to travel.

What a rank sends to others is packed from them, what it received is read where it arrived, and what it has
already stays where it is: nothing is laid out in a buffer of the whole bucket in between.
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
    """A box of ``shape`` in parts: each, and its index in the box."""

    shape: Shape
    parts: tuple[tuple[Tensor, Index], ...]

    def box(self) -> Tensor:
        """The box: where it is, if in one part, else put together. On the meta device one copy stands for
        all."""
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
    """Of each matrix that this rank has anything to do with, by its index, the box that it holds.

    Who takes a box gives it up here, so that its memory is free as soon as it has been used. Boxes without
    elements need not be put.
    """

    dtype: torch.dtype
    device: torch.device
    _boxes: dict[int, Tensor | InParts] = field(default_factory=dict)

    def put(self, matrix: int, box: Tensor) -> None:
        """Keep a matrix's box, in its own shape."""
        self._boxes[matrix] = box

    def take(self, held: BufferSlice) -> Tensor:
        """Give up a matrix's box, in its own shape."""
        if not held.box.numel:
            return torch.empty(held.box.shape, dtype=self.dtype, device=self.device)
        box = self._boxes.pop(held.entry.matrix.index)
        return box.box() if isinstance(box, InParts) else box

    def pack(self, parcels: Parcels) -> tuple[Tensor, list[Tensor]]:  # [elements that leave], own boxes
        """Give up all boxes; returns the parts of them that leave, flat, one after the other, and those that
        stay, each laid out in order, as what arrives is.

        A part that stays and leaves is held once, among those that leave; a box that stays whole is not
        copied; of others, what is left is not kept with the part.
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
        return packed.copy_(packed) if packed.is_meta else packed, stays  # one copy stands for all

    def _part(self, held: BufferSlice, index: Index, shape: Shape) -> Tensor:
        box = self._box(held)
        return (
            box.contiguous()
            if box.shape == shape
            else box[index].clone(memory_format=torch.contiguous_format)
        )

    def _box(self, held: BufferSlice) -> Tensor:
        box = self._boxes[held.entry.matrix.index]
        assert isinstance(box, Tensor)
        return box

    @classmethod
    def unpack(
        cls, arrived: Tensor, cargo: Cargo, kept: Iterable[tuple[Tensor, tuple[BufferSlice, Index, Shape]]]
    ) -> Pieces:
        """The opposite of ``pack``: the boxes in what arrived, and in what stayed."""
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
