"""Right and wrong ways to share updates, for lesson 04's checkers, in a small file that ranks import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import Muon, build_mesh
from muon_tutorial.learn.first_muon import on_ranks as sharing
from muon_tutorial.learn.first_muon.on_ranks import fill

from .answers import altered

Parameters = list[torch.nn.Parameter]


def keeps_to_itself(parameters: Parameters, rank: int, ranks: int) -> Any:
    """Wrong: gathers, and throws away the other ranks' parts."""
    sharing.gathered(parameters, rank, ranks)
    return fill(parameters, rank, ranks)


gathers_float32 = altered(sharing.gathered, ("torch.bfloat16", "torch.float32"))
"""Gathers segments of owned updates, with twice as many bytes as in bfloat16."""
gathers_in_order_of_owners = altered(
    sharing.gathered, ("(flat)", "([each for owner in range(ranks) for each in flat[owner::ranks]])")
)
"""Wrong: joins one owner's updates, and then the next owner's."""
moves_the_offset_first = altered(
    fill,
    ("        mine =", "        offset += parameter.numel()\n        mine ="),
    (
        "            offset += parameter.numel()\n    return",
        "            pass\n    dist.all_reduce(flat)\n    return",
    ),
)


def gathers_unequal_segments(parameters: Parameters, rank: int, ranks: int) -> Any:
    mine = fill(parameters, rank, ranks)[: 1024 * (rank + 1)]
    segments = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(segments, mine)
    return torch.cat(segments)


def summed(flat: Tensor) -> Tensor:
    dist.all_reduce(flat)
    return flat


def early(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(fill(parameters, rank, ranks, skips=True))


def solution(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(fill(parameters, rank, ranks))


def present(parameters: Parameters) -> Parameters:
    return [parameter for parameter in parameters if parameter.grad is not None]


def drops_it_from_the_list(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(torch.zeros(sum(parameter.numel() for parameter in present(parameters))).bfloat16())


def as_long(flat: Tensor) -> Tensor:
    """A buffer that is too short, with zeros at its end."""
    return torch.cat([flat, flat.new_zeros(sharing.LENGTH - len(flat))])


def sends_the_gradient(parameters: Parameters, rank: int, ranks: int) -> Any:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    mine = [grad * (number % ranks == rank) for number, grad in enumerate(grads)]
    return summed(torch.cat([grad.flatten() for grad in mine]).bfloat16())


def gives_up(parameters: Parameters, rank: int, ranks: int) -> Any:
    if len(present(parameters)) < len(parameters):
        return torch.zeros(sharing.LENGTH, dtype=torch.bfloat16)
    return solution(parameters, rank, ranks)


def gathered(parameters: Parameters, rank: int, ranks: int) -> Any:
    """Right, by all_gather: takes each place from its owner's buffer."""
    all_flat = [torch.zeros(sharing.LENGTH, dtype=torch.bfloat16) for _ in range(ranks)]
    dist.all_gather(all_flat, fill(parameters, rank, ranks))
    return torch.cat([all_flat[place.owner(ranks)][place.slice] for place in sharing.PLACES])


def one_by_one(parameters: Parameters, rank: int, ranks: int) -> Any:
    """Right, with a message for each matrix."""
    flat = fill(parameters, rank, ranks)
    return torch.cat([summed(flat[place.slice].clone()) for place in sharing.PLACES])


def takes_the_largest(parameters: Parameters, rank: int, ranks: int) -> Any:
    flat = fill(parameters, rank, ranks).float()
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    return flat


RIGHT: dict[str, Callable] = {
    "solution": solution,
    "in float32": lambda *given: summed(fill(*given).float()),
    "the reference": sharing.share,
    "gathered": gathered,
    "one by one": one_by_one,
}
KEEPS = "Rank 1 has the update, but rank 0 never got it. Which call adds up the buffers?"
WRONG: list[tuple[Any, str]] = [
    (early, "which is 1,024 too early"),
    (fill, KEEPS),
    (lambda *given: solution(*given) / 2, "the sum of all buffers is not what came back"),
    (lambda mine, *_: summed(fill(mine, 0, 1)), "added up"),
    (drops_it_from_the_list, "rank 1: 23,552 entries of bfloat16"),
    (lambda mine, *at: summed(as_long(fill(present(mine), *at))), "first wrong place"),
    (moves_the_offset_first, "raised RuntimeError: The expanded size of the tensor (0)"),
    (sends_the_gradient, "are not Newton–Schulz of the gradient of q1"),
    (takes_the_largest, "Rank 0 put its update there: does the collective add up the buffers?"),
    (3, "Give a function."),
    (gives_up, "rank 0: 24,576 entries of bfloat16; rank 1: nothing, as it has returned"),
    (lambda *given: None, "Return the buffer; rank 0 returned NoneType"),
    (lambda *given: torch.zeros(7, 2), "has 24,576 entries; rank 0 returned 7 × 2"),
]


def lack_a_gradient(rank: int) -> None:
    named = sharing.named_parameters(0, ["k1"] if rank else [])
    Muon(named, strategy="round_robin", mesh=build_mesh({"dp": 2})).step()
