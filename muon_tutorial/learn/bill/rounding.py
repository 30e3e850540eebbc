"""Lesson 10: why two runs that add in different orders drift apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...step.momentum import momentum_update
from ..the_mirror.compare import different_bits, step_alone
from ..the_mirror.on_ranks import MATRICES, local_gradients

Matrices = Mapping[str, Tensor]


def mean_of(seed: int, texts: int) -> dict[str, Tensor]:
    """The mean gradients of several texts, summed in fp32 in the texts' order."""
    parts = [local_gradients(seed, place) for place in range(texts)]
    return {name: torch.stack([part[name] for part in parts]).sum(0) / texts for name in MATRICES}


def say_orders(seed: int, texts: int, orders: int = 20) -> str:
    """How often results differ, if the gradients of several texts are added in several orders in fp32."""
    parts = [local_gradients(seed, place) for place in range(texts)]
    draw = torch.Generator().manual_seed(seed)
    ways = [torch.randperm(texts, generator=draw).tolist() for _ in range(orders)]
    means = [{name: sum(parts[i][name] for i in way) / texts for name in MATRICES} for way in ways]
    first, *others = ((mean, step_alone(mean, seed)) for mean in means)
    moved = sum(different_bits(gradients, first[0]) > 0 for gradients, _ in others)
    weights_moved = sum(different_bits(weights, first[1]) > 0 for _, weights in others)
    return (
        f"orders tried beside the first       {orders - 1}\n"
        f"of them with other gradients        {moved}\n"
        f"of them with other weights as well  {weights_moved}"
    )


def nudged(gradients: Matrices) -> dict[str, Tensor]:
    """The gradients, with one entry of o moved until its Newton–Schulz input rounds to another bfloat16."""
    grad = gradients["o"].clone()
    low = _first_input(grad).view(torch.int32) & 0xFFFF
    place = int(torch.where(low <= 0x8000, 0x8000 - low, 0x10000).argmin())
    number, before = grad.view(-1)[place], _first_input(grad).bfloat16()[place].clone()
    while _first_input(grad).bfloat16()[place] == before:
        number.copy_(torch.nextafter(number, number * 2))
    return {**gradients, "o": grad}


def _first_input(grad: Tensor) -> Tensor:
    return momentum_update(torch.zeros_like(grad), grad, 0.95, True).flatten()


@dataclass(frozen=True, slots=True)
class Nudge:
    """How far one gradient entry was moved, how many weights this changed, and how far they moved."""

    by: float
    weights: int
    entries: int
    weight_by: float

    @property
    def size(self) -> str:
        return "none" if not self.weights else "one" if self.weights == 1 else "hundreds"

    def __str__(self) -> str:
        weights = f"{self.weights} of {self.entries} of o, by at most {self.weight_by:.1e}"
        return f"gradient entries that differ   1, by {self.by:.1e}\nweights that differ            {weights}"


def nudge(seed: int, texts: int) -> Nudge:
    """Take a step, and take it again with one entry of matrix ``o``'s gradient moved, as in ``nudged``."""
    gradients = mean_of(seed, texts)
    other = nudged(gradients)
    one, two = step_alone(gradients, seed), step_alone(other, seed)
    pairs = ((gradients, other), (one, two))
    moved, weight = (max(float((a[n] - b[n]).abs().max()) for n in MATRICES) for a, b in pairs)
    return Nudge(moved, different_bits(one, two), gradients["o"].numel(), weight)
