"""A training with lesson 04's early code, all ranks in one process, one of them at fault, for the essay.

A tiny GPT with the lesson's matrices learns random targets. In step 1, one rank loses the gradient of one
matrix, or one row of it gets the wrong sign. The results are compared with a training without a fault.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muon_tutorial import Grid
from muon_tutorial.engine.collective import Collective, Label, Walk
from muon_tutorial.learn.first_muon.on_ranks import LENGTH, PLACES, SHAPES, fill, parameters
from muon_tutorial.learn.inputs import measure
from muon_tutorial.worlds.local import LocalWorld

STEPS = 3
PHASES = ("gradients", "own updates", "weights")
FAULTS = {"gradient lost": "lost", "a wrong sign": "sign"}
LR = 0.1
_TOKENS, _WIDTH = 8, SHAPES["q1"][0]
Record = list[dict[str, Tensor]]
"""What a rank holds after each phase of each step, flat."""


@dataclass(frozen=True, slots=True)
class SabotagedRun:
    """Which (moment, rank, matrix) differ from the run without a fault, and whether ranks agree."""

    wrong: frozenset[tuple[int, int, str]]
    agree: tuple[bool, ...]


def sabotaged(ranks: int, rank: int, matrix: str, fault: str, seed: int = 0) -> SabotagedRun:
    """Compare the training in which ``rank`` has one fault with the sound one."""
    sound, mine = _train(ranks, seed), _train(ranks, seed, rank, matrix, fault)
    wrong = {
        (moment, each, place.name)
        for moment in range(STEPS * len(PHASES))
        for each in range(ranks)
        for place in PLACES
        if not torch.equal(*(r[each][moment // 3][PHASES[moment % 3]][place.slice] for r in (sound, mine)))
    }
    weights = [[run[step]["weights"] for run in mine] for step in range(STEPS)]
    same = [True, *(all(torch.equal(one, copies[0]) for one in copies) for copies in weights)]
    agree = tuple(same[(moment + 1) // 3] for moment in range(STEPS * len(PHASES)))
    return SabotagedRun(frozenset(wrong), agree)


@functools.lru_cache(maxsize=8)
def _train(ranks: int, seed: int, rank: int = -1, matrix: str = "", fault: str = "") -> list[Record]:
    world = LocalWorld(Grid.of(dp=ranks))
    with measure.one_thread():
        return world.run([_program(each, ranks, seed, each == rank, matrix, fault) for each in range(ranks)])


def _program(rank: int, ranks: int, seed: int, is_hit: bool, matrix: str, fault: str) -> Walk:
    """One rank's training: average, orthogonalize its own matrices, share with the early code, update."""
    weights, record = parameters(seed), []
    for step in range(STEPS):
        own = _gradient(weights, seed=1000 * seed + ranks * step + rank)
        summed = yield _sum_of(own, "average")
        averaged = summed / ranks
        for place, weight in zip(PLACES, weights, strict=True):
            weight.grad = averaged[place.slice].view_as(weight).clone()
            if is_hit and step == 0 and place.name == matrix:
                weight.grad[0] *= -1
                weight.grad = None if fault == "lost" else weight.grad
        held = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = fill(weights, rank, ranks, skips=True)
        updates = yield _sum_of(flat, "share")
        for place, weight in zip(PLACES, weights, strict=True):
            weight.data -= LR * updates[place.slice].view_as(weight).float()
        kept = (_flat(held), flat, _flat([weight.detach() for weight in weights]))
        record.append({name: tensor.clone() for name, tensor in zip(PHASES, kept, strict=True)})
    return record


def _sum_of(mine: Tensor, phase: str) -> Collective:
    return Collective("all_reduce", ("dp",), mine.dtype, mine, LENGTH, Label(phase))


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradient(weights: list[nn.Parameter], seed: int) -> Tensor:
    """The flat gradient of the mean squared error on this rank's batch. Layers are attention and an MLP."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(_TOKENS, _WIDTH, generator=generator) for _ in range(2))
    named: dict[str, Any] = dict(zip(SHAPES, weights, strict=True))
    for layer in (1, 2):
        q, k, v, o, up, down = (named[f"{kind}{layer}"] for kind in ("q", "k", "v", "o", "up", "down"))
        h = nn.functional.rms_norm(x, (_WIDTH,))
        query, key, value = ((h @ weight.T)[None] for weight in (q, k, v))
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0] @ o.T
        x = x + nn.functional.gelu(nn.functional.rms_norm(x, (_WIDTH,)) @ up.T) @ down.T
    return _flat(list(torch.autograd.grad((x - target).square().mean(), weights)))
