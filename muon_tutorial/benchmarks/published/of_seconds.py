"""Published figures of a step's seconds. Ours follow from a machine's file, not measured for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ...engine.collective import Collective, Label, Start, Wait, Walk
from ...evidence import formulas
from ...newton_schulz import zeropower_via_newtonschulz
from ...plan.exchange import LocalShards
from ...plan.grid import Coordinate, Grid
from ...plan.layout import Shard
from ...plan.matrix import Matrix
from ...plan.strategies import Builder, layerwise, owner, replicated, zero1
from ...timing.commands import find_machine
from ...timing.model_shape import stage_matrices
from ...timing.models import find_model
from ...timing.planner import adamw_zero1, estimate
from ...timing.report import busiest_stage
from ...timing.timed_world import TimedWorld
from .claim import Claim
from .devices import MI250_DIE, machine_of
from .of_bytes import HOMES, ONE_LIST, megatron_domain
from .of_work import operations

FP32 = 4


@cache
def once_against_repeated() -> float:
    """Seconds of gather and repeat over those of one home rank a matrix: dense ones, then experts."""
    machine = find_machine("b200-infiniband")
    dense, experts = megatron_domain()

    def seconds(builder: Builder, part: Sequence[Matrix], tp: int, size: int) -> float:
        return estimate("", builder, part, Grid.of(dp=1, tp=tp), machine, bucket_bytes=size).seconds

    repeated = seconds(replicated, dense, 16, _layer_bytes(dense, 16))
    once = seconds(owner, dense, 16, ONE_LIST)  # in one bucket, so that owners are balanced over all layers
    size = _layer_bytes(experts, 2)
    return (repeated + seconds(replicated, experts, 2, size)) / (once + seconds(owner, experts, 2, size))


def _layer_bytes(matrices: Sequence[Matrix], tp: int = 1) -> int:
    """A rank's gradient bytes of one layer, so that all buckets are alike and one walk serves for all."""
    layers = len({matrix.name.split(".")[1] for matrix in matrices})
    return sum(matrix.numel for matrix in matrices) // layers // tp * FP32


def two_dies() -> float:
    """Throughput of two devices over one, at as many tokens a device, gather and repeat.

    Forward and backward take what the published share of Newton–Schulz leaves of the step on one device.
    """
    machine, share = machine_of(MI250_DIE), 0.68
    shapes = [*[(2048, 2048)] * 4, (5632, 2048), (5632, 2048), (2048, 5632)] * 4
    alone = [Matrix(i, f"m{i}", shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)]
    both = [replace(matrix, cuts=(("tp", Shard(0)),)) for matrix in alone]  # an axis that cuts, and repeats
    one = estimate("", replicated, alone, Grid.of(dp=1, tp=1), machine).seconds
    two = estimate("", replicated, both, Grid.of(dp=1, tp=2), machine).seconds
    forward_and_backward = one * (1 - share) / share
    moved = formulas.fsdp2_adamw(2, sum(matrix.numel for matrix in alone), 4, 2)
    exposed = float(moved) / machine.inside.bandwidth
    return 2 * (forward_and_backward + one) / (forward_and_backward + two + exposed)


def slower_than_adamw(model: str, gpus: int, dp: int, ep: int, pp: int, muon_rate: float) -> float:
    """What Muon adds to a step, over the step: ``layerwise`` against ZeRO-1 AdamW, all matrices.

    The step's length is what the published rate of Muon's own operations says: ``muon_rate`` a second and
    GPU, on average over the step.
    """
    shape, machine = find_model(model), find_machine("b200-infiniband")
    step = operations(shape) / gpus / muon_rate
    parts = stage_matrices(shape, ep=ep, pp=pp, stage=busiest_stage(shape, pp))
    apart = replace(machine, ranks_per_node=1)  # neighbours that hold the same experts are ep apart
    added = 0.0
    for part, ranks, on in ((parts[0], dp, machine), (parts[1], dp // ep, apart)):
        size = ONE_LIST if ranks > 1 else _layer_bytes(part)
        grid = Grid.of(dp=ranks)
        muon = estimate("", layerwise, part, grid, on, bucket_bytes=size)
        buckets = zero1(part, grid, bucket_bytes=size).buckets
        added += muon.seconds - adamw_zero1([b.length(LocalShards(), grid.at(0)) for b in buckets], grid, on)
    return added / step


def awaited_at_the_end() -> float:
    """A step whose all_gathers are awaited one by one, over one that awaits them at the end: eight A100s.

    As in KellerJordan/Muon, parameters are sorted by size, each rank steps one of every eight, and these are
    gathered.
    """
    return _stepped(awaits_last=False) / _stepped(awaits_last=True)


@cache
def _stepped(awaits_last: bool) -> float:
    grid, machine = Grid.of(dp=8), find_machine("a100-infiniband")
    walks = [_gather_as_it_goes(grid.at(rank), awaits_last) for rank in grid.ranks]
    return TimedWorld(grid, machine).run(walks).seconds


def _gather_as_it_goes(at: Coordinate, awaits_last: bool) -> Walk:
    dense, _ = stage_matrices(find_model("llama-3.2-1b"))
    ordered = sorted(dense, key=lambda matrix: -matrix.numel)
    tickets = []
    for first in range(0, len(ordered), at.size("dp")):
        mine = _step(torch.empty(ordered[first + at["dp"]].shape, device="meta"))
        label, whole = Label("gather", f"group {first}"), mine.numel() * at.size("dp")
        request = Collective("all_gather", ("dp",), mine.dtype, mine.flatten(), whole, label)
        ticket = yield Start(request)
        if awaits_last:
            tickets.append(ticket)
        else:
            yield Wait(ticket)
    for ticket in tickets:
        yield Wait(ticket)


def _step(parameter: Tensor) -> Tensor:
    momentum, grad = torch.empty_like(parameter), torch.empty_like(parameter)
    momentum.lerp_(grad, 0.05)
    update = zeropower_via_newtonschulz(grad.lerp_(momentum, 0.95))
    return parameter.mul_(0.9).add_(update, alpha=-0.02)


SHARDED = ("Megatron-LM, pull request 6683", "https://github.com/NVIDIA/Megatron-LM/pull/6683")
TITAN = ("torchtitan, issue 3353", "https://github.com/pytorch/torchtitan/issues/3353")
NVIDIA = (
    "NVIDIA, on emerging optimizers in Megatron",
    "https://developer.nvidia.com/blog/"
    "advancing-emerging-optimizers-for-accelerated-llm-training-with-nvidia-megatron/",
)
GATHERS = ("KellerJordan/Muon, pull request 55", "https://github.com/KellerJordan/Muon/pull/55")
ON_B200 = (
    "A DGX B200 of our file, since there is none of GB300; ZeRO-1 AdamW and `layerwise`, all communication "
    "exposed. The step's length follows from the published operations a second that were Muon's."
)
LAUNCHES = (
    "Experts are many and small: in ours every operation on each of them is launched by itself, at a cost "
    "that is an estimate. What Megatron-LM hides in forward and backward is exposed in ours."
)

CLAIMS: Sequence[Claim] = (
    Claim(
        "the optimizer's step, gather and repeat over one home rank a matrix: 16 ranks",
        632 / 157, "×", *HOMES, 1.0, "above", "some",
        "19 layers of Qwen3-235B-A22B on B200s, experts shared by 2 ranks: neither model nor links were "
        "published.",
        once_against_repeated,
        "16 ranks share the dense matrices and 2 the experts, so that one home rank saves up to 16 times the "
        "work of the former and up to twice that of the latter: what a model has of each decides.",
    ),
    Claim(
        "the same, as the pull request for it states",
        264 / 139, "×", *SHARDED, 1.0, "above", "some", "As above.", once_against_repeated,
    ),
    Claim(
        "throughput of two GPUs over one where every rank gathers and repeats",
        1.50, "×", *TITAN, 2.0, "below", "some",
        "Two dies of an MI250 by its datasheet, linked as within one package; four layers of width 2048 "
        "(205 million elements of the published 220); the published share of 68 % for Newton–Schulz.",
        two_dies,
        "Which two dies, and so which link, was not published. Ours is the widest that an MI250 has; theirs "
        "gathers parameter by parameter.",
    ),
    Claim(
        "what Muon adds to Kimi K2's step: 256 GB300, dp=64, ep=64, pp=4",
        1051 / 1029 - 1, "%", *NVIDIA, 0.0, "above", "some", ON_B200,
        lambda: slower_than_adamw("kimi-k2", 256, 64, 64, 4, 51e12),
        LAUNCHES,
    ),
    Claim(
        "what Muon adds to Qwen3-30B-A3B's step: 8 GB300, dp=8, ep=8",
        713 / 686 - 1, "%", *NVIDIA, 0.0, "above", "some", ON_B200,
        lambda: slower_than_adamw("qwen3-30b-a3b", 8, 8, 8, 1, 35e12),
        LAUNCHES,
    ),
    Claim(
        "a step that awaits each all_gather over one that awaits them at the end: 8 A100s",
        1.20, "×", *GATHERS, 1.0, "above", "some",
        "Llama-3.2-1B's matrices with fp32 parameters, for the published \"1B transformer\"; a DGX A100 of "
        "our file.",
        awaited_at_the_end, said="20 % faster",
    ),
)  # fmt: skip
