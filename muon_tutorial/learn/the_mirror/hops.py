"""Lesson 09: changes of placement, and the collectives that they ask for."""

from __future__ import annotations

import torch

from ... import Coordinate, Grid, Hop, LocalWorld, Owned, Partial, Replicate, Shard
from ...engine.collective import Label, Walk
from ...engine.hops import take
from ...plan.layout import Placement

HOPS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Replicate()),
    (Shard(0), Owned(1)),
    (Replicate(), Owned(1)),
    (Partial(), Replicate()),
    (Partial(), Owned(1)),
    (Partial(), Shard(0)),
)
"""Changes of placement. The reverse change undoes each of them, except those from ``Partial``."""


def asks_for(src: Placement, dst: Placement) -> str:
    """The collective that a hop asks for on two ranks; "nothing" if there is none.

    It is found by running the hop. Only a sum to one owner is not run: it is known to be a reduce.
    """
    if isinstance(src, Partial) and isinstance(dst, Owned):
        return "reduce"
    hop, grid, kinds = Hop("dp", src, dst, (4, 4)), Grid.of(dp=2), list[str]()

    def walk(at: Coordinate) -> Walk:
        whole = isinstance(src, Replicate | Partial) or src == Owned(at.rank)
        held = torch.ones(4 if whole else 2, 4)
        return (yield from take(held, hop, torch.float32, at, Label("hop")))

    world = LocalWorld(grid, observers=[lambda request, at: kinds.append(request.kind)])
    world.run([walk(grid.at(rank)) for rank in grid.ranks])
    return kinds[0] if kinds else "nothing"


def say_hops() -> str:
    """A table of hops between two ranks: the collective that each asks for, and that of its inverse."""
    lines = [f"{'from':<14}{'to':<14}{'out':<16}back"]
    for src, dst in HOPS:
        back = "no way back: the summands are gone" if isinstance(src, Partial) else asks_for(dst, src)
        lines.append(f"{_name(src):<14}{_name(dst):<14}{asks_for(src, dst):<16}{back}")
    return "\n".join(lines)


def _name(side: Placement) -> str:
    number = side.dim if isinstance(side, Shard) else side.rank if isinstance(side, Owned) else ""
    return f"{type(side).__name__}({number})"
