"""Right and wrong ways to share answers, for lesson 04's checkers. Light to import: every rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon_tutorial import Muon, build_mesh
from muon_tutorial.learn.lesson04 import on_ranks as sharing

Parameters = list[torch.nn.Parameter]


def fill(parameters: Parameters, rank: int, ranks: int, skips: bool) -> Tensor:
    """A rank's buffer before the sum; ``skips`` leaves the offset where a gradient is missing."""
    flat, offset = torch.zeros(sharing.LENGTH, dtype=torch.bfloat16), 0
    for number, parameter in enumerate(parameters):
        if number % ranks == rank:
            if parameter.grad is None and skips:
                continue
            if parameter.grad is not None:
                flat[offset : offset + parameter.numel()] = sharing.orthogonalize(parameter.grad).flatten()
        offset += parameter.numel()
    return flat


def summed(flat: Tensor) -> Tensor:
    dist.all_reduce(flat)
    return flat


def early(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(fill(parameters, rank, ranks, skips=True))


def solution(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(fill(parameters, rank, ranks, skips=False))


def in_float32(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(fill(parameters, rank, ranks, skips=False).float())


def keeps_to_itself(parameters: Parameters, rank: int, ranks: int) -> Any:
    return fill(parameters, rank, ranks, skips=False)


def averages(parameters: Parameters, rank: int, ranks: int) -> Any:
    return solution(parameters, rank, ranks) / 2


def everybody_does_all(parameters: Parameters, rank: int, ranks: int) -> Any:
    return summed(fill(parameters, 0, 1, skips=False))


def drops_it_from_the_list(parameters: Parameters, rank: int, ranks: int) -> Any:
    present = [parameter for parameter in parameters if parameter.grad is not None]
    return summed(torch.zeros(sharing.count(present), dtype=torch.bfloat16))


def deals_out_what_is_there(parameters: Parameters, rank: int, ranks: int) -> Any:
    return solution([parameter for parameter in parameters if parameter.grad is not None], rank, ranks)


def moves_the_offset_first(parameters: Parameters, rank: int, ranks: int) -> Any:
    flat, offset = torch.zeros(sharing.LENGTH, dtype=torch.bfloat16), 0
    for number, parameter in enumerate(parameters):
        offset += parameter.numel()
        if number % ranks == rank and parameter.grad is not None:
            flat[offset : offset + parameter.numel()] = sharing.orthogonalize(parameter.grad).flatten()
    return summed(flat)


def sends_the_gradient(parameters: Parameters, rank: int, ranks: int) -> Any:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    mine = [grad * (number % ranks == rank) for number, grad in enumerate(grads)]
    return summed(torch.cat([grad.flatten() for grad in mine]).bfloat16())


def gives_up(parameters: Parameters, rank: int, ranks: int) -> Any:
    if any(parameter.grad is None for parameter in parameters):
        return torch.zeros(sharing.LENGTH, dtype=torch.bfloat16)
    return solution(parameters, rank, ranks)


def gathered(parameters: Parameters, rank: int, ranks: int) -> Any:
    """Right, by all_gather: each place from the buffer of its owner."""
    all_flat = [torch.zeros(sharing.LENGTH, dtype=torch.bfloat16) for _ in range(ranks)]
    dist.all_gather(all_flat, fill(parameters, rank, ranks, skips=False))
    return torch.cat([all_flat[place.owner(ranks)][place.slice] for place in sharing.PLACES])


def one_by_one(parameters: Parameters, rank: int, ranks: int) -> Any:
    """Right, with a message for each matrix."""
    flat = fill(parameters, rank, ranks, skips=False)
    return torch.cat([summed(flat[place.slice].clone()) for place in sharing.PLACES])


def with_a_flag(parameters: Parameters, rank: int, ranks: int) -> Any:
    """Right, and counts missing gradients besides, as the package does."""
    flat = solution(parameters, rank, ranks)
    dist.all_reduce(torch.tensor([float(parameter.grad is None) for parameter in parameters]))
    return flat


def takes_the_largest(parameters: Parameters, rank: int, ranks: int) -> Any:
    flat = fill(parameters, rank, ranks, skips=False).float()
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    return flat


def nothing(parameters: Parameters, rank: int, ranks: int) -> Any:
    return None


def another_shape(parameters: Parameters, rank: int, ranks: int) -> Any:
    return torch.zeros(7, 2)


def stub(parameters: Parameters, rank: int, ranks: int) -> Any:
    return ...


def lack_a_gradient(rank: int) -> None:
    names = list(sharing.SHAPES)
    named = list(zip(names, sharing.parameters(0, ["k1"] if rank else []), strict=True))
    Muon(named, strategy="round_robin", mesh=build_mesh({"dp": 2})).step()
