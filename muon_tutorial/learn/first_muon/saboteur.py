"""Lesson 04, played: training with the early code in a local world, where one rank is sabotaged in one step.

A tiny GPT with the lesson's matrices learns to give random targets. The rank that you choose loses the
gradient of one matrix in step 1, or gets a row of it with the wrong sign. All that every rank holds from then
on is held against the same training without a saboteur.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.collective import Collective, Label, Walk
from ...plan.grid import Grid
from ...worlds.local import LocalWorld
from ..inputs import measure
from .on_ranks import LENGTH, PLACES, SHAPES, fill, parameters

STEPS = 3
PHASES = ("gradients", "own updates", "weights")
FAULTS = {"gradient lost": "lost", "a wrong sign": "sign"}
LR = 0.1
_TOKENS, _WIDTH = 8, SHAPES["q1"][0]
Record = list[dict[str, Tensor]]
"""What a rank holds after each phase of each step, flat."""


@dataclass(frozen=True, slots=True)
class SabotagedRun:
    """Which (moment, rank, matrix) differ from the run without a saboteur, by names; and what a test sees.

    Moments count the phases of all steps. ``agree`` says, after each, whether all ranks' weights are alike.
    """

    ranks: int
    rank: int
    matrix: str
    fault: str
    wrong: frozenset[tuple[int, int, str]]
    agree: tuple[bool, ...]

    def wrong_at(self, moment: int) -> list[str]:
        """The matrices that are wrong on any rank after a phase."""
        found = {name for when, _, name in self.wrong if when == moment}
        return [name for name in SHAPES if name in found]


@functools.cache
def sabotaged(ranks: int, rank: int, matrix: str, fault: str, seed: int = 0) -> SabotagedRun:
    """The training with one fault; ``rank`` -1 is nobody's."""
    sound, mine = _train(ranks, seed), _train(ranks, seed, rank, matrix, fault)
    wrong = {
        (moment, each, place.name)
        for moment in range(STEPS * len(PHASES))
        for each in range(ranks)
        for place in PLACES
        if not torch.equal(
            *(run[each][moment // 3][PHASES[moment % 3]][place.slice] for run in (sound, mine))
        )
    }
    weights = [[run[step]["weights"] for run in mine] for step in range(STEPS)]
    same = [True, *(all(torch.equal(one, copies[0]) for one in copies) for copies in weights)]
    agree = tuple(same[(moment + 1) // 3] for moment in range(STEPS * len(PHASES)))
    return SabotagedRun(ranks, rank, matrix, fault, frozenset(wrong), agree)


@functools.lru_cache(maxsize=8)
def _train(ranks: int, seed: int, rank: int = -1, matrix: str = "", fault: str = "") -> list[Record]:
    """What each rank holds, phase by phase."""
    world = LocalWorld(Grid.of(dp=ranks))
    with measure.one_thread():
        return world.run([_program(each, ranks, seed, each == rank, matrix, fault) for each in range(ranks)])


def _program(rank: int, ranks: int, seed: int, is_hit: bool, matrix: str, fault: str) -> Walk:
    """One rank's training: average, orthogonalize what it owns, share by the early code, move the weights."""
    weights, record = parameters(seed), []
    for step in range(STEPS):
        own = _gradient(weights, seed=1000 * seed + ranks * step + rank)
        summed = yield _sum_of(own, "average")
        averaged = summed / ranks
        for place, weight in zip(PLACES, weights, strict=True):
            weight.grad = averaged[place.slice].view_as(weight).clone()
            if is_hit and step == 0 and place.name == matrix:
                weight.grad = _spoilt(weight.grad, fault)
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


def _spoilt(gradient: Tensor, fault: str) -> Tensor | None:
    if fault == "lost":
        return None
    gradient[0] *= -1
    return gradient


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradient(weights: list[nn.Parameter], seed: int) -> Tensor:
    """The gradient of this rank's batch, flat: causal attention and an MLP in each layer, mean square."""
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
