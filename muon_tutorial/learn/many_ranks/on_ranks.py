"""Lesson 14 on real ranks: each token travels to the rank that has its expert, and its answer comes back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import build_mesh
from ...errors import MismatchError
from ...launching.launch import launch
from ...worlds.live import gather_objects
from ..exercises.on_real_ranks import handed_over, watching


def tokens_of(place: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The tokens of the rank at a place of its group, each (place, number), and the expert of each."""
    numbers = torch.arange(3 + 2 * place)
    return torch.stack((torch.full_like(numbers, place), numbers), 1).float(), (numbers**2 + place) % ranks


def layer_of(place: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A place's tokens, the expert and the weight of each, and the matrix of the place's own expert."""
    tokens, expert_of = tokens_of(place, ranks)
    weights, matrix = 1 + torch.arange(len(tokens)) / 2, torch.tensor([[1.0, place], [2.0, -1.0]])
    return tokens.requires_grad_(), expert_of, weights.requires_grad_(), matrix.requires_grad_()


def answers_of(tokens: Tensor, matrix: Tensor) -> Tensor:
    """What an expert with this matrix makes of its tokens, one in each row."""
    return (tokens @ matrix).square()


def run_tokens(function: Callable[..., Any], dp: int, tp: int, backend: str, back: bool) -> list[Any]:
    """What ``function(tokens, expert_of, group)`` returns on each rank; each dp group has dp experts.

    ``back``: also the way back. The function gets weights and the expert, too, and gradients are returned.
    """
    asked: dict[str, Any] = {"args": (function, dp, tp, back), "backend": backend}
    return launch(_send_tokens, dp * tp, **asked, timeout=10.0)


def _send_tokens(rank: int, function: Callable[..., Any], dp: int, tp: int, back: bool) -> Any:
    group = build_mesh({"dp": dp, "tp": tp}).get_group("dp")
    others = watching(_refuse_tokens, "all_gather", "all_gather_into_tensor", "all_reduce", "broadcast")
    with watching(partial(_check_splits, group), "all_to_all_single"), others:
        if not back:
            return function(*tokens_of(group.rank(), dp), group)
        tokens, expert_of, weights, matrix = layer_of(group.rank(), dp)
        found = function(tokens, expert_of, weights, partial(answers_of, matrix=matrix), group)
        can = isinstance(found, Tensor) and found.requires_grad and found.shape == tokens.shape
        if all(gather_objects(can, group)):  # otherwise some ranks would wait in backward for the others
            found.square().sum().backward()
    found = found.detach() if isinstance(found, Tensor) else found
    return found, [each.grad for each in (matrix, tokens, weights)]


def _refuse_tokens(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if handed_over(call, *given, **named).is_floating_point():
        raise ValueError(f"{call.__name__} sends tokens to ranks that need none: use all_to_all_single")
    return call(*given, **named)


def _check_splits(due: dist.ProcessGroup, call: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Make the call if all ranks of the group agree on the sizes; otherwise Gloo would end the process."""
    asked = inspect.signature(call).bind(*given, **named).arguments
    if (group := asked.get("group")) is None and due.size() < dist.get_world_size():
        raise ValueError("without group=group, all_to_all_single is a call of all ranks of the grid")
    group, rows = group or due, {}
    if asked["output"].shape[1:] != asked["input"].shape[1:]:
        raise ValueError("a row of the output is as long as a row of the input")
    for name in ("input", "output"):
        whole, sizes = len(asked[name]), asked.get(f"{name}_split_sizes")
        rows[name] = [whole // group.size()] * group.size() if sizes is None else list(map(int, sizes))
        if len(rows[name]) != group.size() or sum(rows[name]) != whole:
            said = f"split sizes {rows[name]} do not cut {whole} rows of {name} into one part for each rank"
            hint = "An empty part has size 0, and the output's sizes come first"
            raise ValueError(f"{said} of the group. {hint}")
    every, ranks = gather_objects(rows, group), dist.get_process_group_ranks(group)
    for sender, receiver in product(range(len(every)), repeat=2):
        sent, taken = every[sender]["input"][receiver], every[receiver]["output"][sender]
        if sent != taken:
            said = f"rank {ranks[sender]} sends rank {ranks[receiver]} rows: {sent}. That rank takes {taken}"
            raise MismatchError(f"{said} from it. Who told it how many come?")
    return call(*given, **named)
