"""Lesson 00 on real ranks: a matrix, gradients whose sums are exact, the reports of a step, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import Grid, Matrix, Muon, Plan, Shard, build_mesh, zero1
from ...plan.layout import shard_box
from ..inputs import measure

SHAPE = (48, 64)
TP_DIM = 1


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What one rank sends back from a step: its weight before and after, and the momentum it keeps."""

    before: Tensor
    momentum: Tensor
    after: Tensor


def plan_of(dp: int, tp: int) -> Plan:
    """The plan of the lesson: one matrix, cut by columns over tp, its momentum cut over dp."""
    return zero1([Matrix(0, "W", SHAPE, (("tp", Shard(TP_DIM)),))], Grid.of(dp=dp, tp=tp))


def weight(seed: int) -> Tensor:
    """The whole matrix, the same on every rank."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) / 8


def local_gradient(seed: int, dp_position: int) -> Tensor:
    """The whole gradient on the data of one dp position."""
    generator = torch.Generator().manual_seed(1000 * (seed + 1) + dp_position)
    return torch.randint(-64, 65, SHAPE, generator=generator) / 64


def mean_gradient(seed: int, dp: int) -> Tensor:
    return torch.stack([local_gradient(seed, position) for position in range(dp)]).sum(0) / dp


def my_columns(matrix: Tensor, rank: int, tp: int) -> Tensor:
    """A copy of the columns of ``matrix`` that a rank holds when tp cuts it."""
    return matrix[shard_box(tuple(matrix.shape), Shard(TP_DIM), rank % tp, tp).slices].clone()


def differing_bits(after: Sequence[Tensor], alone: Tensor, tp: int) -> list[int]:
    """For each copy of the weight, how many bits differ from the weight that a single process computed."""
    copies = (torch.cat(list(after[first : first + tp]), TP_DIM) for first in range(0, len(after), tp))
    differ = (copy.view(torch.int32) ^ alone.detach().view(torch.int32) for copy in copies)
    return [sum(int((bits >> place & 1).sum()) for place in range(32)) for bits in differ]


def cost_alone(rank: int, seed: int, steps: int) -> float:
    """Median seconds of one step of ``torch.optim.Muon`` on the whole matrix, in this process."""
    parameter = torch.nn.Parameter(weight(seed))
    parameter.grad = local_gradient(seed, 0)
    return measure.median_seconds(torch.optim.Muon([parameter]).step, steps)


def cost_of_steps(rank: int, dp: int, tp: int, seed: int, steps: int) -> tuple[float, int]:
    """Seconds per step on this rank, and its bytes of private memory. Must be called by all ranks."""
    parameter = torch.nn.Parameter(my_columns(weight(seed), rank, tp))
    muon = Muon([parameter], strategy="zero1", mesh=build_mesh({"dp": dp, "tp": tp}), tp_dim=TP_DIM)
    parameter.grad = my_columns(local_gradient(seed, rank // tp), rank, tp)
    return measure.median_seconds(muon.step, steps), measure.private_bytes()


def say_cost(costs: Sequence[tuple[float, int]], alone: float, start: float) -> str:
    slowest, memory = map(max, zip(*costs, strict=True))
    return (
        f"cores this notebook may use   {measure.cores()}\n"
        f"ranks                         {len(costs)}\n"
        f"start of the first ranks      {start:.2f} s\n"
        f"private memory of a rank      {memory / 1e6:.0f} MB\n"
        f"one Muon step on the ranks    {slowest * 1e3:.1f} ms\n"
        f"one Muon step in one process  {alone * 1e3:.1f} ms"
    )
