"""Lesson 09: a step beside the package's own, message by message, and beside one process, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import Plan
from ...engine.collective import Collective
from ...step.momentum import momentum_update
from ...training.check import Sums, gradient_error
from ..inputs import measure
from .on_ranks import LR, MATRICES, Report, StepOfBucket, local_gradients, messages, reference_step, weights
from .recording import PHASES, stored_parts

Matrices = Mapping[str, Tensor]


def first_difference(step: StepOfBucket, dp: int, tp: int, seed: int) -> str:
    """Phase by phase: are the reader's messages the reference's, to the bit? Ends at the first wrong one."""
    right, _, _ = messages(reference_step, dp, tp, seed)
    mine, broke, _ = messages(step, dp, tp, seed)
    lines: list[str] = []
    for phase in PHASES:
        due, came = ([a for a in side if a[1].label.phase == phase] for side in (right, mine))
        if wrong := next(filter(None, map(_wrong, due, came)), None):
            return "\n".join([*lines, f"{phase:24} {wrong}"])
        if len(came) != len(due):
            how = broke.splitlines()[0] if broke else f"{len(came)} requests, not {len(due)}"
            return "\n".join([*lines, f"{phase:24} stopped: {how}"])
        said = (
            f"{len(due)} requests, the same bits" if due else "nothing is sent; seen when its result travels"
        )
        lines.append(f"{phase:24} {said}")
    return "\n".join([*lines, f"stopped at the end: {broke}"] if broke else lines)


def _wrong(due: tuple[int, Collective], came: tuple[int, Collective]) -> str:
    """How a message differs from the one that was due: rank, matrix and interval."""
    (due_rank, due_request), (rank, request) = due, came
    if due_rank != rank or str(due_request) != str(request):
        return f"rank {rank} asks for {request}; due was {due_request}, from rank {due_rank}"
    one, other, subject = due_request.send, request.send, request.label.subject
    if one is None or other is None or torch.equal(one, other):
        return ""
    places = (one != other).nonzero().flatten()
    return (
        f"rank {rank} sends other numbers{f' of {subject}' if subject else ''}: the first at "
        f"{int(places[0])}, the last at {int(places[-1])} of {one.numel()}"
    )


def whole_gradients(plan: Plan, reports: Sequence[Report]) -> dict[str, Tensor]:
    """The gradients that phase 1 left, put together from the ranges of all ranks."""
    [bucket] = plan.buckets
    wholes = {entry.matrix.name: torch.zeros(entry.matrix.shape) for entry in bucket.entries}
    for rank, report in enumerate(reports):
        for held in bucket.stored_shards(plan.grid.at(rank)):
            for box, part in stored_parts(held, plan.grid.at(rank), report.kept):
                wholes[held.entry.matrix.name][box.slices] = part
    return wholes


def whole_weights(plan: Plan, reports: Sequence[Report]) -> dict[str, Tensor]:
    """The new weights, put together from the pieces of the first dp position."""
    dims = {name: dim for name, (_, dim) in MATRICES.items()}
    pieces = [report.after for report in reports[: plan.grid.size("tp")]]
    return {name: torch.cat([piece[name] for piece in pieces], dim) for name, dim in dims.items()}


def step_alone(gradients: Matrices, seed: int) -> dict[str, Tensor]:
    """The weights after one step of ``torch.optim.Muon``, in this process, with these gradients."""
    parameters = {name: torch.nn.Parameter(whole.clone()) for name, whole in weights(seed).items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()
    with measure.one_thread():
        torch.optim.Muon(list(parameters.values()), lr=LR).step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def different_bits(one: Matrices, other: Matrices) -> int:
    """How many numbers of some matrices are not the same bits."""
    return sum(int((one[name].view(torch.int32) != other[name].view(torch.int32)).sum()) for name in MATRICES)


def _largest_change(one: Matrices, other: Matrices) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in MATRICES)


@dataclass(frozen=True, slots=True)
class SumError:
    """Mean gradients beside the exact ones: how many are rounded, and how far."""

    rounded: int
    count: int
    largest: float
    of_bound: float


def sum_error(gradients: Matrices, seed: int, dp: int) -> SumError:
    """How far the gradients that were summed over dp are from the exact mean, taken in float64."""
    sums = _exact_sums(seed, dp)
    errors = torch.cat([(gradients[n].double() - sums[n].total / dp).abs().flatten() for n in MATRICES])
    of_bound = max(gradient_error(gradients[name], sums[name], dp) for name in MATRICES)
    return SumError(int((errors > 0).sum()), errors.numel(), float(errors.max()), of_bound)


def exact_gradients(seed: int, dp: int) -> dict[str, Tensor]:
    """The mean gradients taken in float64 and rounded once."""
    return {name: (sums.total / dp).float() for name, sums in _exact_sums(seed, dp).items()}


def _exact_sums(seed: int, dp: int) -> dict[str, Sums]:
    places = [local_gradients(seed, place) for place in range(dp)]
    parts = {name: torch.stack([place[name] for place in places]).double() for name in MATRICES}
    return {name: Sums(each.sum(0), each.abs().sum(0)) for name, each in parts.items()}


def say_sum(gradients: Matrices, after: Matrices, seed: int, dp: int) -> str:
    """The error of the real sum, its bound, and what it does to the weights, in words."""
    error, ideal = sum_error(gradients, seed, dp), step_alone(exact_gradients(seed, dp), seed)
    return (
        f"gradients       {error.count}, of which not the exact mean: {error.rounded}\n"
        f"largest error   {error.largest:.1e}; in parts of its bound: {error.of_bound:.3f}\n"
        f"weights         {different_bits(after, ideal)} differ after the step, by at most "
        f"{_largest_change(after, ideal):.1e}"
    )


def say_orders(seed: int, texts: int, orders: int = 20) -> str:
    """Gradients of several texts, added in several orders in fp32: how often do the results differ?"""
    parts = [local_gradients(seed, place) for place in range(texts)]
    draw = torch.Generator().manual_seed(seed)
    ways = [torch.randperm(texts, generator=draw).tolist() for _ in range(orders)]
    means = [{name: sum(parts[i][name] for i in way) / texts for name in MATRICES} for way in ways]
    first, *others = ((mean, step_alone(mean, seed)) for mean in means)
    moved, weights_moved = (
        sum(different_bits(other[which], first[which]) > 0 for other in others) for which in (0, 1)
    )
    return (
        f"orders tried beside the first       {orders - 1}\n"
        f"of them with other gradients        {moved}\n"
        f"of them with other weights as well  {weights_moved}"
    )


def nudged(gradients: Matrices, name: str = "o") -> dict[str, Tensor]:
    """The same gradients, but for the number of one matrix that is nearest to a rounding edge of bfloat16.

    That one is moved by as few fp32 steps as take it over the edge.
    """
    grad = gradients[name].clone()
    low = _first_input(grad).view(torch.int32) & 0xFFFF
    place = int(torch.where(low <= 0x8000, 0x8000 - low, 0x10000).argmin())
    number, before = grad.view(-1)[place], _first_input(grad).bfloat16()[place].clone()
    while _first_input(grad).bfloat16()[place] == before:
        number.copy_(torch.nextafter(number, number * 2))
    return {**gradients, name: grad}


def _first_input(grad: Tensor) -> Tensor:
    """What Newton–Schulz is given of a first gradient, flat, before it is rounded."""
    return momentum_update(torch.zeros_like(grad), grad, 0.95, True).flatten()


def say_nudge(gradients: Matrices, seed: int) -> str:
    """One gradient number moved over a rounding edge, and the weights that follow, in words."""
    other = nudged(gradients)
    one, two = step_alone(gradients, seed), step_alone(other, seed)
    moved, weight = _largest_change(gradients, other), _largest_change(one, two)
    return (
        f"gradient numbers that differ  {different_bits(gradients, other)}, by {moved:.1e}\n"
        f"weights that differ           {different_bits(one, two)}, by at most {weight:.1e}"
    )


def say_home(plan: Plan, home: Sequence[Tensor]) -> str:
    """Whose numbers each rank has in its ranges after a walk out and back."""
    [bucket], lines = plan.buckets, []
    for rank, flat in enumerate(home):
        held = torch.cat([flat[slice(*h.in_buffer)] for h in bucket.stored_shards(plan.grid.at(rank))])
        names = " and ".join(str(int(name)) for name in held.unique())
        lines.append(f"rank {rank}: {held.numel()} numbers, all of them {names}")
    return "\n".join(lines)
