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

from ..plan.exchange import BufferSlice, Cargo, Index

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

    def keep(self, cargo: Cargo) -> list[Tensor]:
        """The parts of boxes that do not travel, laid out in order, as what arrives is.

        What is left of their boxes is not kept with them.
        """
        kept = []
        for held, index, shape in cargo:
            box = self._boxes[held.entry.matrix.index]
            assert isinstance(box, Tensor)
            kept.append(
                box.contiguous()
                if box.shape == shape
                else box[index].clone(memory_format=torch.contiguous_format)
            )
        return kept

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
    def unpack(
        cls, arrived: Tensor, cargo: Cargo, kept: Iterable[tuple[Tensor, tuple[BufferSlice, Index, Shape]]]
    ) -> Pieces:
        """The opposite of ``pack`` and ``keep``: the boxes in what arrived, and in what was kept."""
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
