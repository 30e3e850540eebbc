"""Small things that all ranks of a training run must know: sums along an axis, and what each rank has to say.

Asks for collectives through the engine, like everything else here that communicates. Every function must be
called by all ranks of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..engine.collective import Label
from ..engine.travel import all_reduce, travel
from ..plan.layout import Hop, Replicate, Route, Shard
from ..step.reduce_gradients import average_others
from ..worlds.live import LiveWorld


def sum_over(world: LiveWorld, axis: str, tensor: Tensor, label: str) -> Tensor:
    """The sum of the ranks' tensors along ``axis``; the same bits on all of them."""
    return world.run(all_reduce(tensor, axis, world.at, Label(label)))


def collect(world: LiveWorld, row: Tensor, label: str) -> Tensor:
    """Every rank's 1-D ``row``, in the order of the ranks: [ranks, len(row)]. Rows must be of one length."""
    rows = row
    for axis in reversed(world.grid.axes):
        hop = Hop(axis, Shard(0), Replicate(), (len(rows) * world.grid.size(axis),))
        route = Route((hop,) if world.grid.size(axis) > 1 else (), rows.dtype)
        rows = world.run(travel(rows, route, world.at, Label(label)))
    return rows.view(-1, len(row))


def average_gradients(world: LiveWorld, parameters: Sequence[Tensor]) -> None:
    """Average the gradients over dp in place, as DDP would."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    world.run(average_others(given, world.at, "gradient all_reduce"))
