"""Pads uneven pieces to the length of the largest, because collectives need equal pieces, and unpads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.layout import Hop, HopPieces, Shard


def pad_piece(x: Tensor, size: int) -> Tensor:
    """Flatten a piece and pad it with zeros to the length of the largest."""
    return pad(x.reshape(-1), (0, size - x.numel())) if x.numel() < size else x.reshape(-1)


def pad_pieces(x: Tensor, pieces: HopPieces) -> Tensor:
    """Return all positions' pieces, padded to the largest length, flat and one after the other."""
    rows = x.new_zeros(pieces.parts, pieces.size)
    for place, box in pieces.uneven.items():
        rows[place, : box.numel] = x[box.slices].reshape(-1)
    return rows.view(-1)


def unpad(
    answer: Tensor,  # [parts · size], or [parts, size]
    hop: Hop,
    pieces: HopPieces,
) -> Tensor:  # hop.shape
    """Put the whole tensor together from all positions' pieces: the opposite of ``pad_pieces``."""
    assert isinstance(hop.src, Shard)
    rows = answer.view(pieces.parts, pieces.size)
    boxes = pieces.uneven.items()
    return torch.cat([rows[place, : box.numel].view(box.shape) for place, box in boxes], hop.src.dim)
