"""Small things that all ranks of a training run must know: sums along an axis, and what each rank has to say.

Asks for collectives through the engine, like everything else here that communicates. Every function must be
called by all ranks of the grid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Label
from ..engine.travel import travel
from ..plan.layout import Hop, Partial, Placement, Replicate, Route, Shard
from ..step.parameter_state import local_part
from ..worlds.live import LiveWorld


def sum_over(world: LiveWorld, axis: str, tensor: Tensor, label: str) -> Tensor:
    """The sum of the ranks' tensors along ``axis``; the same bits on all of them."""
    return _change(world, axis, tensor, Partial(), tuple(tensor.shape), label)


def collect(world: LiveWorld, row: Tensor, label: str) -> Tensor:
    """Every rank's 1-D ``row``, in the order of the ranks: [ranks, len(row)]. Rows must be of one length."""
    rows = row
    for axis in reversed(world.grid.axes):
        rows = _change(world, axis, rows, Shard(0), (len(rows) * world.grid.size(axis),), label)
    return rows.view(-1, len(row))


def tell_all(world: LiveWorld, word: Any, device: torch.device) -> list[Any]:
    """What every rank says, by rank; a word is anything JSON can hold."""
    letters = torch.tensor(list(json.dumps(word).encode()), dtype=torch.uint8, device=device)
    lengths = collect(world, torch.tensor([len(letters)], device=device), "word lengths")[:, 0].tolist()
    padded = torch.nn.functional.pad(letters, (0, max(lengths) - len(letters)))
    rows = collect(world, padded, "words").cpu()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def average_gradients(world: LiveWorld, parameters: Sequence[Tensor]) -> None:
    """Average the gradients over dp in place, as DDP would, in one flat buffer."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    mean = sum_over(world, "dp", flat, "gradient all_reduce") / world.grid.size("dp")
    for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view(grad.shape))


def _change(
    world: LiveWorld, axis: str, tensor: Tensor, held: Placement, shape: tuple[int, ...], label: str
) -> Tensor:
    """From ``held`` to whole along the axis; ``shape`` is that of the whole tensor."""
    hops = (Hop(axis, held, Replicate(), shape),) if world.grid.size(axis) > 1 else ()
    return world.run(travel(tensor, Route(hops, tensor.dtype), world.at, Label(label)))
