"""Lesson 06 on real ranks: agree on groups, hold pieces of two weights, train them, and say what is kept.

The weights have sizes that most tp do not divide. Each dp position has data of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from ... import Grid, Matrix, Plan, Shard, zero1
from ...errors import MismatchError
from ...worlds.live import gather_objects
from ..exercises.on_real_ranks import say_failure
from ..pictures.holdings import name_contents

__all__ = ["say_failure"]  # the notebook uses it, too

CutKind = Literal["column", "row"]
ShapeOf = Callable[[tuple[int, int], str, int, int], Any]
KINDS: tuple[CutKind, CutKind] = ("column", "row")
DIM: dict[CutKind, int] = {"column": 0, "row": 1}
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
    """The shape of the piece of a Linear's weight that one tp position holds.

    >>> [local_shape((10, 8), "column", place, 3) for place in range(3)]
    [(4, 8), (4, 8), (2, 8)]
    """
    lengths = list(shape)
    dim: int = DIM[kind]  # type: ignore[index]
    lengths[dim] = Shard(dim).run(shape[dim], place, tp)[1]
    return lengths[0], lengths[1]


@dataclass(frozen=True, slots=True)
class LinearNumbers:
    """What a run works on: a batch for each dp position, and the whole weights of two Linears."""

    batches: tuple[Tensor, ...]
    up: Tensor
    down: Tensor


def make_numbers(kind: Literal["whole", "ordinary"], dp: int, seed: int) -> LinearNumbers:
    """Data and weights: ordinary random numbers, or small whole ones, whose sums need no rounding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if kind == "whole":
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    up, down = draw(*UP), draw(*DOWN)
    return LinearNumbers(tuple(draw(BATCH, UP[1]) for _ in range(dp)), up, down)


def cut(weight: Tensor, kind: CutKind, place: int, tp: int, shape_of: ShapeOf = local_shape) -> Tensor:
    """A copy of what one tp position holds of a weight, by the lengths that ``shape_of`` says."""
    dim, shape = DIM[kind], (weight.shape[0], weight.shape[1])
    lengths = [shape_of(shape, kind, other, tp)[dim] for other in range(place + 1)]
    return weight.narrow(dim, sum(lengths[:place]), lengths[place]).clone()


def my_parameters(rank: int, tp: int, seed: int) -> list[torch.nn.Parameter]:
    """This rank's pieces of both weights, each saying how it was cut."""
    whole, place = make_numbers("ordinary", 0, seed), rank % tp
    parameters = []
    for weight, kind in zip((whole.up, whole.down), KINDS, strict=True):
        parameter: Any = torch.nn.Parameter(cut(weight, kind, place, tp))
        parameter.partition_dim = DIM[kind]
        parameter.partition_sizes = Shard(DIM[kind]).lengths(weight.shape[DIM[kind]], tp)
        parameters.append(parameter)
    return parameters


def fill_gradients(parameters: Sequence[torch.nn.Parameter], rank: int, tp: int, step: int) -> None:
    """The gradients of one step: those of a dp position, whose data nobody else has."""
    whole = make_numbers("ordinary", 0, 1000 * (rank // tp + 1) + step)
    for parameter, gradient, kind in zip(parameters, (whole.up, whole.down), KINDS, strict=True):
        parameter.grad = cut(gradient, kind, rank % tp, tp)


@dataclass(frozen=True, slots=True)
class KeptByRank:
    """What one rank keeps after training: its pieces of the weights, and of their momentum."""

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]

    @property
    def numbers(self) -> int:
        """How many numbers of momentum it keeps."""
        return sum(part.numel() for part in self.momentum)


def kept_by(muon: Any) -> KeptByRank:
    """What the optimizer of this rank keeps."""
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    momentum = tuple(muon.state[parameter]["momentum_buffer"].detach() for parameter in parameters)
    return KeptByRank(tuple(parameter.detach() for parameter in parameters), momentum)


HEADS = 12


def say_answers(answers: Sequence[Sequence[Sequence[int]]]) -> str:
    """Who answered in the groups of each rank, a line a rank."""
    lines = ["rank   who answered in its dp group, and in its tp group"]
    return "\n".join([*lines, *(f"{rank:4}   {mine[0]} and {mine[1]}" for rank, mine in enumerate(answers))])


def say_outputs(kind: str, outputs: Sequence[Tensor], alone: Sequence[Tensor], tp: int) -> str:
    """The output of every rank beside that of one process, for the data of its dp position."""
    pairs = [(output, alone[rank // tp]) for rank, output in enumerate(outputs)]
    close = all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)
    same = all(torch.equal(one, other) for one, other in pairs)
    return f"{kind + ' numbers':17} the same output: {close!s:6} the same bits: {same}"


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the two weights, in one bucket."""
    matrices = [
        Matrix(0, "up", UP, (("tp", Shard(DIM["column"])),)),
        Matrix(1, "down", DOWN, (("tp", Shard(DIM["row"])),)),
    ]
    return zero1(matrices, Grid.of(dp=dp, tp=tp))


def letters_of(kept: Sequence[KeptByRank]) -> tuple[list[str], list[str], list[str]]:
    """A letter for each rank's piece of the first weight, of the second, and of the first one's momentum."""
    pieces = [mine.weights[number] for number in (0, 1) for mine in kept]
    letters, ranks = name_contents([*pieces, *(mine.momentum[0] for mine in kept)]), len(kept)
    return letters[:ranks], letters[ranks : 2 * ranks], letters[2 * ranks :]


def say_kept(kept: Sequence[KeptByRank], tp: int) -> str:
    """What each rank keeps, a line a rank: the same letter means the same bytes."""
    up, down, _ = letters_of(kept)
    lines = ["rank   dp  tp   up  down   numbers of momentum: of up, of down"]
    for rank, mine in enumerate(kept):
        counts = [part.numel() for part in mine.momentum]
        place = f"{rank:4}   {rank // tp:2}  {rank % tp:2}"
        lines.append(f"{place}   {up[rank]:>2}  {down[rank]:>4}   {counts[0]:27}  {counts[1]:7}")
    return "\n".join(lines)


def say_fused(tp: int) -> str:
    """How many rows of q, k and v each tp position gets of a fused weight that is cut as one."""
    lines = [f"q, k and v of {HEADS} rows each, in one weight of {3 * HEADS} rows, column parallel:"]
    for place in range(tp):
        start, length = Shard(0).run(3 * HEADS, place, tp)
        counts = [max(0, min(start + length, (n + 1) * HEADS) - max(start, n * HEADS)) for n in range(3)]
        lines.append(f"  place {place}: {counts[0]:2} rows of q, {counts[1]:2} of k, {counts[2]:2} of v")
    return "\n".join(lines)
