"""A solution of lesson 03's build: the collectives of a ring. Each rank sends to the next one only."""

from __future__ import annotations

import torch
import torch.distributed as dist


def pass_on(x, rank, ranks):
    came = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % ranks)
    dist.recv(came, (rank - 1) % ranks)
    assert sending is not None
    sending.wait()
    return came


def all_gather(piece, rank, ranks):
    pieces = {rank: piece}
    for turn in range(ranks - 1):
        pieces[(rank - turn - 1) % ranks] = pass_on(pieces[(rank - turn) % ranks], rank, ranks)
    return [pieces[place] for place in range(ranks)]


def reduce_scatter(pieces, rank, ranks):
    total = pieces[(rank - 1) % ranks]
    for turn in range(2, ranks + 1):
        total = pass_on(total, rank, ranks) + pieces[(rank - turn) % ranks]
    return total


def all_reduce(pieces, rank, ranks):
    return all_gather(reduce_scatter(pieces, rank, ranks), rank, ranks)


def broadcast(x, rank, ranks, root):
    place = (rank - root) % ranks
    if place:
        x = torch.empty_like(x)
        dist.recv(x, (rank - 1) % ranks)
    if place < ranks - 1:
        dist.send(x, (rank + 1) % ranks)
    return x


def all_to_all(pieces, rank, ranks):
    came = {rank: pieces[rank]}
    going = [pieces[(rank + far) % ranks] for far in range(1, ranks)]  # the nearest rank's piece is first
    for turn in range(1, ranks):
        going = list(pass_on(torch.stack(going), rank, ranks))
        came[(rank - turn) % ranks] = going.pop(0)
    return [came[place] for place in range(ranks)]
