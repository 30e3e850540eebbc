"""Lesson 07 on real ranks: pieces of two weights of odd sizes, a pass through both, and training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ... import Grid, Matrix, Plan, Shard, build_mesh, zero1
from ...launching.launch import launch
from ..exercises.on_real_ranks import check_alike, watching
from ..my_muon.reference import local_shape
from ..pictures.holdings import name_contents

CutKind = Literal["column", "row"]
ShapeOf = Callable[[tuple[int, int], str, int, int], Any]
Layers = Callable[[Tensor, Tensor, Tensor, Any], Any]
KINDS: tuple[CutKind, CutKind] = ("column", "row")
DIM: dict[str, int] = {"column": 0, "row": 1}
UP, DOWN = (10, 8), (6, 10)
BATCH = 4


def cut(weight: Tensor, kind: str, tp_rank: int, tp: int, shape_of: ShapeOf = local_shape) -> Tensor:
    """A copy of one tp coordinate's piece of a weight, with the lengths that ``shape_of`` returns."""
    dim, shape = DIM[kind], (weight.shape[0], weight.shape[1])
    lengths = [shape_of(shape, kind, other, tp)[dim] for other in range(tp_rank + 1)]
    return weight.narrow(dim, sum(lengths[:tp_rank]), lengths[tp_rank]).clone()


@dataclass(frozen=True, slots=True)
class LinearNumbers:
    """A run's inputs: a batch per dp coordinate, and the whole weights of two Linears."""

    batches: tuple[Tensor, ...]
    up: Tensor
    down: Tensor

    def alone(self, dp_rank: int) -> Tensor:
        """The output for one batch, (batch, out), with the whole weights in one process."""
        return torch.relu(self.batches[dp_rank] @ self.up.T) @ self.down.T

    def gradients(self, dp_rank: int, place: int = 0, tp: int = 1) -> tuple[Tensor, ...]:
        """Of x, and of one rank's pieces of up and down, by autograd and without a message; dy is y."""
        up, down = cut(self.up, "column", place, tp), cut(self.down, "row", place, tp)
        own = [each.requires_grad_() for each in (self.batches[dp_rank].clone(), up, down)]
        return torch.autograd.grad(torch.relu(own[0] @ up.T) @ down.T, own, self.alone(dp_rank))


def make_numbers(kind: Literal["whole", "ordinary"], dp: int, seed: int, batch: int = BATCH) -> LinearNumbers:
    """Data and weights: ordinary random numbers, or small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if kind == "whole":
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    up, down = draw(*UP), draw(*DOWN)
    return LinearNumbers(tuple(draw(batch, UP[1]) for _ in range(dp)), up, down)


def both_layers(x: Tensor, up: Tensor, down: Tensor, tp_group: Any) -> Tensor:
    """The reference: this rank's pieces of both layers, and one all_reduce. The whole tp group must call."""
    hidden = torch.relu(x @ up.T)  # (batch, my hidden features): complete sums
    y = hidden @ down.T  # (batch, out): partial sums
    dist.all_reduce(y, group=tp_group)
    return y


@dataclass(frozen=True, slots=True)
class LayersRun:
    """What the function returned on every rank, and the inputs; ``parts``: into how many a batch is cut."""

    dp: int
    tp: int
    given: LinearNumbers
    outputs: tuple[Any, ...]
    parts: int = 1

    def own(self, rank: int, batch: Tensor) -> Tensor:
        """A rank's tokens of its batch, or its part of the batch's outputs."""
        return batch.chunk(self.parts)[rank % self.parts]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each rank's output, and the output that one process has for the same tokens."""
        alone = (self.own(rank, self.given.alone(rank // self.tp)) for rank in range(len(self.outputs)))
        return list(zip(self.outputs, alone, strict=True))

    def same_bits(self) -> bool:
        return all(torch.equal(one, other) for one, other in self.pairs())


def run_layers(function: Layers, dp: int, tp: int, backend: str = "gloo", parts: int = 1) -> LayersRun:
    """Call ``function(x, my piece of up, my piece of down, tp group)`` on every rank, with whole numbers."""
    run = LayersRun(dp, tp, make_numbers("whole", dp, 0, BATCH * parts), (), parts)
    outputs = launch(call_layers, dp * tp, args=(function, run), backend=backend, timeout=10.0)
    return replace(run, outputs=tuple(outputs))


def run_backward(function: Callable[..., Any], dp: int, tp: int, backend: str = "gloo") -> LayersRun:
    """Call ``function(x, my pieces, tp group, dp group, dy)`` on every rank; y's squares / 2 are the loss."""

    def back(*given: Any) -> Any:
        return function(*given, build_mesh({"dp": dp, "tp": tp}).get_group("dp"), both_layers(*given))

    return run_layers(back, dp, tp, backend)


def call_layers(rank: int, function: Layers, run: LayersRun) -> Any:
    """One rank's part: cut both weights, and call the function with the pieces and the rank's tokens."""
    place, tp_group = rank % run.tp, build_mesh({"dp": run.dp, "tp": run.tp}).get_group("tp")
    up, down = cut(run.given.up, "column", place, run.tp), cut(run.given.down, "row", place, run.tp)
    x, due = run.own(rank, run.given.batches[rank // run.tp]), {"all_gather", "reduce_scatter"}

    def alike(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        asked, name = inspect.signature(original).bind(*given, **named).arguments, original.__name__
        check_alike(asked.get("output", asked.get("tensor")), asked.get("group"))  # else Gloo may abort
        if run.parts > 1 and name not in due:
            raise ValueError(f"{name} sends more than needed: one all_gather and one reduce_scatter suffice")
        due.discard(name)
        return original(*given, **named)

    with watching(alike, "all_reduce", "all_gather", "reduce_scatter"):
        return function(x.clone(), up, down, tp_group)


def say_layers(run: LayersRun, kind: str) -> str:
    near = all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in run.pairs())
    return f"{kind + ' numbers':17} the same output: {near!s:6} the same bits: {run.same_bits()}"


def my_parameters(rank: int, tp: int, seed: int, shape_of: ShapeOf = local_shape) -> list[torch.nn.Parameter]:
    """This rank's pieces of both weights, each with attributes that say how it was cut."""
    whole, parameters = make_numbers("ordinary", 0, seed), []
    for weight, kind in zip((whole.up, whole.down), KINDS, strict=True):
        parameter: Any = torch.nn.Parameter(cut(weight, kind, rank % tp, tp, shape_of))
        parameter.partition_dim = DIM[kind]
        parameter.partition_sizes = Shard(DIM[kind]).lengths(weight.shape[DIM[kind]], tp)
        parameters.append(parameter)
    return parameters


def fill_gradients(parameters: Sequence[torch.nn.Parameter], rank: int, tp: int, step: int) -> None:
    """Set the gradients of one step; each dp coordinate has its own data."""
    whole = make_numbers("ordinary", 0, 1000 * (rank // tp + 1) + step)
    for parameter, gradient, kind in zip(parameters, (whole.up, whole.down), KINDS, strict=True):
        parameter.grad = cut(gradient, kind, rank % tp, tp)


@dataclass(frozen=True, slots=True)
class KeptByRank:
    """What one rank keeps after training: its pieces of the weights, and of their momentum."""

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]


def kept_by(muon: Any) -> KeptByRank:
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    momentum = tuple(muon.state[parameter]["momentum_buffer"].detach() for parameter in parameters)
    return KeptByRank(tuple(parameter.detach() for parameter in parameters), momentum)


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the two weights, in one bucket."""
    up = Matrix(0, "up", UP, (("tp", Shard(DIM["column"])),))
    down = Matrix(1, "down", DOWN, (("tp", Shard(DIM["row"])),))
    return zero1([up, down], Grid.of(dp=dp, tp=tp))


def slice_length(dp: int, tp: int) -> int:
    """How many entries each rank keeps of the flat buffer at its tp coordinate, padding included."""
    [bucket] = plan_of(dp, tp).buckets
    return bucket.length(bucket.model_layout, plan_of(dp, tp).grid.at(0)) // dp


def who_holds(row: int, column: int, dp: int, tp: int, length: int) -> tuple[list[int], int]:
    """The reference: the ranks that hold the weight ``up[row, column]``, and the rank with its momentum.

    ``length`` is the number of entries in a rank's slice of the buffer, in which ``up`` comes first.
    """
    most = -(-UP[0] // tp)  # rows of the first piece
    tp_rank, my_row = divmod(row, most)
    dp_rank = (my_row * UP[1] + column) // length
    return [other * tp + tp_rank for other in range(dp)], dp_rank * tp + tp_rank


def letters_of(kept: Sequence[KeptByRank]) -> tuple[list[str], list[str], list[str]]:
    """Letters for the contents of each rank's first weight, its second weight, and its whole momentum."""
    pieces = [mine.weights[number] for number in (0, 1) for mine in kept]
    momentum = [torch.cat([part.flatten() for part in mine.momentum]) for mine in kept]
    letters, ranks = name_contents([*pieces, *momentum]), len(kept)
    return letters[:ranks], letters[ranks : 2 * ranks], letters[2 * ranks :]
