"""What ranks do in notebook 06: agree on groups, hold pieces of two weights, train them.

Real ranks import this module, so it imports nothing that only draws or displays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import MismatchError
from ...plan.layout import Shard
from ...worlds.live import gather_objects

Kind = Literal["column", "row"]
ShapeOf = Callable[[tuple[int, int], str, int, int], Any]

KINDS: tuple[Kind, Kind] = ("column", "row")
DIM: dict[Kind, int] = {"column": 0, "row": 1}
UP, DOWN = (10, 8), (6, 10)
BATCH = 4


def groups(dp: int, tp: int) -> tuple[list[list[int]], list[list[int]]]:
    """The dp groups (columns) and the tp groups (rows) of a grid of ranks.

    >>> groups(2, 3)
    ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]])
    """
    dp_groups = [list(range(place, dp * tp, tp)) for place in range(tp)]
    tp_groups = [list(range(place * tp, (place + 1) * tp)) for place in range(dp)]
    return dp_groups, tp_groups


def say_ranks(ranks: Iterable[int]) -> str:
    """A group in words.

    >>> say_ranks((0, 3)), say_ranks([4])
    ('ranks 0, 3', 'rank 4')
    """
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def agree(wanted: Sequence[Sequence[int]]) -> None:
    """Compare the groups that the ranks are about to make. All ranks must call.

    Raises:
        MismatchError: names the first group that differs, and who wants what.
    """
    found = gather_objects([list(ranks) for ranks in wanted])
    for number, row in enumerate(zip_longest(*found), start=1):
        wants: dict[str, list[int]] = {}
        for rank, ranks in enumerate(row):
            wants.setdefault(str(ranks or "no group"), []).append(rank)
        if len(wants) > 1:
            said = "; on ".join(f"{say_ranks(who)}: {what}" for what, who in wants.items())
            raise MismatchError(
                f"call {number} of new_group is not the same on all ranks. On {said}.\n"
                "Make the same groups, in the same order, on every rank."
            )


def local_shape(shape: tuple[int, int], kind: str, place: int, tp: int) -> tuple[int, int]:
    """The shape of the piece of a Linear's weight that one place along tp holds.

    >>> [local_shape((10, 8), "column", place, 3) for place in range(3)]
    [(4, 8), (4, 8), (2, 8)]
    """
    lengths = list(shape)
    dim: int = DIM[kind]  # type: ignore[index]
    lengths[dim] = Shard(dim).run(shape[dim], place, tp)[1]
    return lengths[0], lengths[1]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a run works on: a batch for each place along dp, and the whole weights of two Linears."""

    batches: tuple[Tensor, ...]
    up: Tensor
    down: Tensor


def make_numbers(kind: Literal["whole", "ordinary"], dp: int, seed: int) -> Numbers:
    """Data and weights: ordinary random numbers, or small whole ones, whose sums need no rounding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if kind == "whole":
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    up, down = draw(*UP), draw(*DOWN)
    return Numbers(tuple(draw(BATCH, UP[1]) for _ in range(dp)), up, down)


def cut(weight: Tensor, kind: Kind, place: int, tp: int, shape_of: ShapeOf = local_shape) -> Tensor:
    """A copy of what one place along tp holds of a weight, by the lengths that ``shape_of`` says."""
    dim, shape = DIM[kind], (weight.shape[0], weight.shape[1])
    lengths = [shape_of(shape, kind, other, tp)[dim] for other in range(place + 1)]
    return weight.narrow(dim, sum(lengths[:place]), lengths[place]).clone()


def my_parameters(rank: int, tp: int, seed: int) -> list[torch.nn.Parameter]:
    """This rank's pieces of both weights, each saying how it was cut."""
    whole, place = make_numbers("ordinary", 0, seed), rank % tp
    return [
        _parameter(weight, kind, place, tp) for weight, kind in ((whole.up, KINDS[0]), (whole.down, KINDS[1]))
    ]


def _parameter(weight: Tensor, kind: Kind, place: int, tp: int) -> torch.nn.Parameter:
    parameter: Any = torch.nn.Parameter(cut(weight, kind, place, tp))
    parameter.partition_dim = DIM[kind]
    parameter.partition_sizes = Shard(DIM[kind]).lengths(weight.shape[DIM[kind]], tp)
    return parameter


def fill_gradients(parameters: Sequence[torch.nn.Parameter], rank: int, tp: int, step: int) -> None:
    """The gradients of one step: those of a place along dp, whose data nobody else has."""
    whole = make_numbers("ordinary", 0, 1000 * (rank // tp + 1) + step)
    for parameter, gradient, kind in zip(parameters, (whole.up, whole.down), KINDS, strict=True):
        parameter.grad = cut(gradient, kind, rank % tp, tp)


@dataclass(frozen=True, slots=True)
class Kept:
    """What one rank keeps after training: its pieces of the weights, and of their momentum."""

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]

    @property
    def numbers(self) -> int:
        """How many numbers of momentum it keeps."""
        return sum(part.numel() for part in self.momentum)


def kept_by(muon: Any) -> Kept:
    """What the optimizer of this rank keeps."""
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    momentum = tuple(muon.state[parameter]["momentum_buffer"].detach() for parameter in parameters)
    return Kept(tuple(parameter.detach() for parameter in parameters), momentum)
