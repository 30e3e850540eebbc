"""Lesson 09: one matrix's trip, changes of placement, and the collectives that they ask for."""

from __future__ import annotations

import torch

from ... import Coordinate, Grid, Hop, LocalWorld, Owned, Partial, Plan, Replicate, Route, Shard
from ...engine.collective import Label, Walk
from ...engine.hop_collectives import take
from ...plan.layout import Placement
from .recording import PHASES, StepRecording

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


def say_trip(plan: Plan, recording: StepRecording, name: str) -> str:
    """A matrix's trip as a table: each phase's hops, and what its first worker holds of it afterwards."""
    rank, bucket = recording.workers(name)[0], plan.buckets[0]
    [entry] = (each for each in bucket.entries if each.matrix.name == name)
    out: list[Route] = [bucket.gradient, bucket.compute, entry.route]
    routes = [None, *out, None, entry.route.inverse, bucket.compute.inverse, bucket.parameter]
    dtypes = [route.dtype for route in (bucket.gradient, *out, entry.route, *out[:0:-1], bucket.parameter)]
    lines = [
        "Partial(): a summand on each rank. Replicate(): whole on all. Shard(1): a matrix, cut by columns.",
        "dp's Shard(0): the flat buffer, cut into slices.",
    ]
    lines += [f"{f'rank {rank} holds of {name}:':>70}", f"{'':52}{'entries':>9}{'bytes':>7}  from ranks"]
    moments = zip(recording.diaries[rank].tiles[name], dtypes, routes, strict=True)
    for moment, (tiles, dtype, route) in enumerate(moments):
        found = (hop for hop in (route.hops if route else ()) if isinstance(hop, Hop))
        hops = ", ".join(f"{hop.axis}: {_name(hop.src)} → {_name(hop.dst)}" for hop in found)
        entries = sum(rows * columns for *_, rows, columns in tiles)
        brought = " ".join(map(str, sorted({tile[0] for tile in tiles})))
        what = f"{moment} {PHASES[moment - 1]}" if moment else "0 start"
        lines.append(f"{what:26}{hops:26}{entries:9,}{entries * dtype.itemsize:7,}  {brought}")
    return "\n".join(lines)


def _name(side: Placement) -> str:
    number = side.dim if isinstance(side, Shard) else side.rank if isinstance(side, Owned) else ""
    return f"{type(side).__name__}({number})"
