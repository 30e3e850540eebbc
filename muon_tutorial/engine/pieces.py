"""A bucket's matrices one by one, for routes that need no flat buffer to travel.

What a rank sends is packed from them, and what it received is read where it arrived: neither is laid out in a
buffer of the whole bucket in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan.exchange import BufferSlice, Cargo, Index

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A box of ``shape`` in a flat tensor, in parts: where each starts, its index in the box, its shape."""

    flat: Tensor
    shape: Shape
    parts: tuple[tuple[int, Index, Shape], ...]

    def box(self) -> Tensor:
        """The box: where it arrived, if in one part, else put together. On the meta device one copy stands
        for all."""
        if len(self.parts) == 1 and self.parts[0][2] == self.shape:
            return self._part(0)
        box = self.flat.new_empty(self.shape)
        if box.is_meta:
            return box.copy_(box)
        for number, (_, index, _) in enumerate(self.parts):
            box[index] = self._part(number)
        return box

    def _part(self, number: int) -> Tensor:
        start, _, shape = self.parts[number]
        return self.flat[start : start + math.prod(shape)].view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Of each matrix that this rank has anything to do with, by its index, the box that it holds.

    Who takes a box gives it up here, so that its memory is free as soon as it has been used. Boxes without
    elements need not be put.
    """

    dtype: torch.dtype
    device: torch.device
    _boxes: dict[int, Tensor | Arrived] = field(default_factory=dict)

    def put(self, matrix: int, box: Tensor) -> None:
        """Keep a matrix's box, in its own shape."""
        self._boxes[matrix] = box

    def take(self, held: BufferSlice) -> Tensor:
        """Give up a matrix's box, in its own shape."""
        if not held.box.numel:
            return torch.empty(held.box.shape, dtype=self.dtype, device=self.device)
        box = self._boxes.pop(held.entry.matrix.index)
        return box.box() if isinstance(box, Arrived) else box

    def pack(self, cargo: Cargo) -> Tensor:
        """Give up all boxes; returns the parts of them that leave, flat, one after the other."""
        numel = sum(math.prod(shape) for *_, shape in cargo)
        packed = torch.empty(numel, dtype=self.dtype, device=self.device)
        start = 0
        for held, index, shape in () if packed.is_meta else cargo:
            box, stop = self._boxes[held.entry.matrix.index], start + math.prod(shape)
            assert isinstance(box, Tensor)
            packed[start:stop].view(shape).copy_(box[index])
            start = stop
        self._boxes.clear()
        return packed.copy_(packed) if packed.is_meta else packed  # one copy stands for all

    @classmethod
    def unpack(cls, arrived: Tensor, cargo: Cargo) -> Pieces:
        """The opposite of ``pack``: the boxes in what arrived."""
        parts: dict[int, list[tuple[int, Index, Shape]]] = {}
        shapes: dict[int, Shape] = {}
        start = 0
        for held, index, shape in cargo:
            matrix = held.entry.matrix.index
            parts.setdefault(matrix, []).append((start, index, shape))
            shapes[matrix] = held.box.shape
            start += math.prod(shape)
        boxes: Mapping[int, Tensor | Arrived] = {
            matrix: Arrived(arrived, shapes[matrix], tuple(its)) for matrix, its in parts.items()
        }
        return cls(arrived.dtype, arrived.device, dict(boxes))
