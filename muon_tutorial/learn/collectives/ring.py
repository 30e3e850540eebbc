"""Collectives by hand: rings of messages between neighbours, as a lesson takes them apart.

Nothing but lessons and tests uses them: an optimizer asks for collectives, and ``live`` answers. Each is
called by all ranks of the default group, with a piece that is equally long on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_gather(mine: Tensor, rank: int, ranks: int) -> list[Tensor]:
    """Every rank's piece, in rank order: each passes on to the next rank what came last from the one before.

    Must be called by all ranks. Each sends ``ranks − 1`` pieces.
    """
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    pieces[rank] = mine
    for step in range(ranks - 1):
        sending: Any = dist.isend(pieces[(rank - step) % ranks], (rank + 1) % ranks)
        dist.recv(pieces[(rank - step - 1) % ranks], (rank - 1) % ranks)
        sending.wait()
    return pieces


def ring_reduce_scatter(pieces: list[Tensor], rank: int, ranks: int) -> Tensor:
    """This rank's piece, summed over all ranks; every rank brings all pieces, and they stay as they are.

    Must be called by all ranks. A sum travels on until its owner has it: each sends ``ranks − 1`` pieces.
    """
    total = pieces[(rank - 1) % ranks]
    for step in range(ranks - 1):
        sending: Any = dist.isend(total, (rank + 1) % ranks)
        arrived = torch.empty_like(total)
        dist.recv(arrived, (rank - 1) % ranks)
        sending.wait()
        total = arrived + pieces[(rank - step - 2) % ranks]
    return total


def ring_all_reduce(pieces: list[Tensor], rank: int, ranks: int) -> list[Tensor]:
    """The sum of all ranks' pieces, in order: a reduce_scatter, then an all_gather of what it has left."""
    return ring_all_gather(ring_reduce_scatter(pieces, rank, ranks), rank, ranks)


def all_reduce_with(
    reduce_scatter: Callable[..., Any], pieces: list[Tensor], rank: int, ranks: int
) -> list[Tensor]:
    """As ``ring_all_reduce``, with another first half."""
    return ring_all_gather(reduce_scatter(pieces, rank, ranks), rank, ranks)
