"""Published seconds of a step. Our figures follow from machine files that were not fitted to them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from muon_tutorial import Coordinate, Grid, Matrix, Shard, zeropower_via_newtonschulz
from muon_tutorial.engine.collective import Collective, Label, Start, Wait, Walk
from muon_tutorial.evidence import formulas
from muon_tutorial.plan.strategies import Builder, layerwise, owner, replicated
from muon_tutorial.timing.machine import Link, Machine, find_machine
from muon_tutorial.timing.model_shape import stage_matrices
from muon_tutorial.timing.models import find_model
from muon_tutorial.timing.recommend import ModelPlan, plan_model, read_sizes
from muon_tutorial.timing.timed_world import TimedWorld
from muon_tutorial.timing.timeline_cases import walk_ranks

from .claim import TOLERANCE, shown
from .devices import a800s, machine_of
from .of_bytes import in_one, megatron_domain
from .of_work import operations


@cache
def once_against_repeated() -> float:
    """Seconds if every rank repeats every matrix, divided by the seconds with one owner per matrix."""
    machine = find_machine("b200-infiniband")
    dense, experts = megatron_domain()
    layers = len(experts) // 48  # all layers are equal, so one is walked for all

    def taken(builder: Builder) -> float:
        of_dense = in_one(builder, dense, Grid.of(dp=1, tp=16))
        of_experts = in_one(builder, experts[:48], Grid.of(dp=1, tp=2))
        return walk_ranks(of_dense, machine).seconds + layers * walk_ranks(of_experts, machine).seconds

    return taken(replicated) / taken(owner)


def two_dies() -> float:
    """Throughput of two devices divided by that of one, with the same tokens per device.

    Both devices gather and orthogonalize every matrix. The published share of Newton–Schulz in one device's
    step gives the seconds of forward and backward.
    """
    machine, share = machine_of("MI250 die"), 0.68
    shapes = [*[(2048, 2048)] * 4, (5632, 2048), (5632, 2048), (2048, 5632)] * 4
    alone = [Matrix(i, f"m{i}", shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)]
    both = [replace(matrix, cuts=(("tp", Shard(0)),)) for matrix in alone]  # tp ranks repeat the work
    one = walk_ranks(replicated(alone, Grid.of(dp=1, tp=1)), machine).seconds
    two = walk_ranks(replicated(both, Grid.of(dp=1, tp=2)), machine).seconds
    forward_and_backward = one * (1 - share) / share
    moved = formulas.fsdp2_adamw(2, sum(matrix.numel for matrix in alone), 4, 2)
    exposed = float(moved) / machine.inside.bandwidth
    return 2 * (forward_and_backward + one) / (forward_and_backward + two + exposed)


def planned(model: str, grid: str, machine: Machine) -> ModelPlan:
    """The planner's result for ``layerwise`` with its default options."""
    return plan_model(find_model(model), read_sizes(grid), machine, strategies={"muon": layerwise})


@cache
def on_b200s(model: str, grid: str) -> ModelPlan:
    return planned(model, grid, find_machine("b200-infiniband"))


def added(plan: ModelPlan) -> float:
    """How many seconds more ``layerwise`` takes than ZeRO-1 AdamW over the same matrices."""
    return plan.estimates[0].seconds - plan.adamw


def added_on_a800s() -> float:
    """How many ms more ``layerwise`` takes than ZeRO-1 AdamW, for Llama-3.1-8B on 128 A800s."""
    return added(planned("llama-3.1-8b", "dp=128", a800s())) * 1e3


def products_on_a800s() -> float:
    """Milliseconds of Newton–Schulz's products on the busiest of 8 A800s, for Llama-3.1-8B."""
    return planned("llama-3.1-8b", "dp=8", a800s()).estimates[0].product * 1e3


def step_of(model: str, gpus: int, muon_rate: float) -> float:
    """A step's seconds. ``muon_rate``: the operations per second that each GPU does on average in a step with
    Muon."""
    return operations(find_model(model)) / gpus / muon_rate


def added_part(model: str, gpus: int, muon_rate: float, grid: str) -> float:
    """The time that Muon adds to a step, as a fraction of the step."""
    return added(on_b200s(model, grid)) / step_of(model, gpus, muon_rate)


@cache
def why_slower(model: str, gpus: int, muon_rate: float, grid: str, published: float) -> str:
    """Change some of the machine's numbers, and say which of them explain the difference."""
    machine, step = find_machine("b200-infiniband"), step_of(model, gpus, muon_rate)
    fast = Link(1e15, 0.0)
    best = {dtype: (max(rates),) for dtype, rates in machine.gemm.items()}
    without = added(planned(model, grid, replace(machine, inside=fast, between=fast))) / step
    at_best = added(planned(model, grid, replace(machine, gemm=best, operation=0.0))) / step
    products = on_b200s(model, grid).estimates[0].product / step
    explained = abs(at_best - published) <= TOLERANCE * published
    return (
        "Exposed communication is not the reason: AdamW exposes as much, and with endless bandwidth our "
        f"figure is still {shown(without, '%')}. Products alone make {shown(products, '%')} of the step. The "
        "machine's file gives each product the rate for its smallest side, as if it had the GPU to itself, "
        "but experts are many and small. At the rate of the largest products, and with launches that cost "
        "nothing, our figure is "
        f"{shown(at_best, '%')}{'' if explained else '; what is left, we cannot explain'}."
    )


def grug(nodes: int, steps: int, homes: int = 1) -> float:
    """Milliseconds for the experts of marin's Grug MoE: 256 in each of 26 layers, 32 of them on each GPU.

    Rows are sharded over nodes; ``owner`` gathers whole matrices and scatters their updates. If ``homes``
    nodes keep whole matrices instead, each of them has only its share of the work.
    """
    cuts = (("dp", Shard(0)),) if nodes > 1 else ()
    shapes = ((2560, 2560), (2560, 1280)) * 32
    layer = [
        Matrix(i, f"m{i}", shape, cuts, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
        for i, shape in enumerate(shapes)
    ]
    apart = replace(find_machine("h100-infiniband"), ranks_per_node=1)  # dp has one rank on each node
    return 26e3 * walk_ranks(in_one(owner, layer, Grid.of(dp=nodes)), apart, ns_steps=steps).seconds / homes


def awaited_at_the_end() -> float:
    """Seconds of a step that waits for each all_gather, divided by those of a step that waits at the end.

    Both run on eight A100s. As in KellerJordan/Muon, parameters are sorted by size; of eight parameters,
    each rank steps one, and an all_gather sends the eight results to all ranks.
    """
    return _stepped(in_flight=1) / _stepped(in_flight=10**6)


def _stepped(in_flight: int) -> float:
    grid, machine = Grid.of(dp=8), find_machine("a100-infiniband")
    walks = [_gather_as_it_goes(grid.at(rank), in_flight) for rank in grid.ranks]
    return TimedWorld(grid, machine).run(walks).seconds


def _gather_as_it_goes(at: Coordinate, in_flight: int) -> Walk:
    dense, _ = stage_matrices(find_model("llama-3.2-1b"))
    ordered = sorted(dense, key=lambda matrix: -matrix.numel)
    tickets = []
    for first in range(0, len(ordered), at.size("dp")):
        mine = _step(torch.empty(ordered[first + at["dp"]].shape, device="meta"))
        label, whole = Label("gather", f"group {first}"), mine.numel() * at.size("dp")
        request = Collective("all_gather", ("dp",), mine.dtype, mine.flatten(), whole, label)
        tickets.append((yield Start(request)))
        if len(tickets) == in_flight:
            yield Wait(tickets.pop())
    for ticket in tickets:
        yield Wait(ticket)


def _step(parameter: Tensor) -> Tensor:
    momentum, grad = torch.empty_like(parameter), torch.empty_like(parameter)
    momentum.lerp_(grad, 0.05)
    update = zeropower_via_newtonschulz(grad.lerp_(momentum, 0.95))
    return parameter.mul_(0.9).add_(update, alpha=-0.02)
