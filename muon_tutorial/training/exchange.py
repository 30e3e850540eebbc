"""Sums along an axis, and averaged gradients.

Asks for collectives through the engine, like everything else here that communicates. Every function must be
called by all ranks of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..engine.collective import Label
from ..engine.travel import all_reduce
from ..step.reduce_gradients import average_others
from ..worlds.live import LiveWorld


def sum_over(world: LiveWorld, axis: str, tensor: Tensor, label: str) -> Tensor:
    """The sum of the ranks' tensors along ``axis``; the same bits on all of them."""
    return world.run(all_reduce(tensor, axis, world.at, Label(label)))


def average_gradients(world: LiveWorld, parameters: Sequence[Tensor]) -> None:
    """Average the gradients over dp in place, as DDP would."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    world.run(average_others(given, world.at, "gradient all_reduce"))
