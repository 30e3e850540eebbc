"""Scratch memory that every iteration reuses; it grows to the largest size that was needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every buffer starts at a multiple of this many bytes, so that kernels always see the same alignment."""


class Workspace:
    """Scratch memory, one block per device. Two threads must not share it."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[torch.device, Tensor] = {}

    def nbytes(self) -> int:
        return sum(block.numel() for block in self._blocks.values())

    def buffers(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Return uninitialized tensors in the block; they reuse the memory of the previous call's tensors."""
        lines = [-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) for shape in shapes]
        sizes = [count * ALIGNMENT for count in lines]
        block = self._block(sum(sizes), device)
        pieces = block[: sum(sizes)].split(sizes)
        return [
            piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        ]

    def _block(self, nbytes: int, device: torch.device) -> Tensor:
        block = self._blocks.get(device)
        if block is None or block.numel() < nbytes:
            self._blocks.pop(device, None)
            del block  # free the smaller block before the larger one is allocated
            block = self._blocks[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return block
