"""Lesson 14 on real ranks: steps of a plan with the owners that the reader chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time

import torch

from ... import LiveWorld, Muon, build_mesh, owner
from ...newton_schulz import zeropower_via_newtonschulz
from ...plan.assign import newton_schulz_cost
from ..inputs import measure

Assign = Callable[[list[tuple[int, int]], int], Sequence[int]]
"""Maps shapes and the number of owners to each matrix's owner."""

SHAPES = ((16, 96), (96, 16), (48, 48), (16, 96), (96, 48), (24, 24), (48, 96), (16, 16), (96, 96), (24, 48))
"""Small matrices of the kinds in a layer: long and narrow, square, large."""


@dataclass(frozen=True, slots=True)
class SteppedRank:
    """What a rank owns, its work in operations and in CPU seconds, and whether its bits are one process's."""

    owned: tuple[int, ...]
    work: int
    seconds: float
    same: bool


def step_with(rank: int, dp: int, tp: int, steps: int, seed: int, assign: Assign) -> SteppedRank:
    """Steps of the package's Muon with the owners that ``assign`` chooses. Must be called by all ranks."""
    torch.set_num_threads(1)
    ranks = dp * tp
    chosen = [int(place) for place in assign(list(SHAPES), ranks)]
    world = LiveWorld(build_mesh({"dp": ranks, "tp": 1}))  # every rank holds all weights
    weights = weights_with_gradients(seed)
    muon = Muon(weights, strategy=partial(owner, assign=chosen), mesh=world)
    for _ in range(steps):
        muon.step()
    owned = tuple(index for index, place in enumerate(chosen) if place == rank)
    work = sum(newton_schulz_cost(SHAPES[index]) for index in owned)
    seconds = cpu_seconds([torch.randn(SHAPES[index]) for index in owned])
    return SteppedRank(owned, work, seconds, all(map(torch.equal, weights, stepped_alone(steps, seed))))


def cpu_seconds(matrices: Sequence[torch.Tensor], times: int = 5) -> float:
    """CPU seconds of this thread for Newton–Schulz of all matrices: waiting for a core does not count."""
    took = []
    for _ in range(times):
        start = thread_time()
        for matrix in matrices:
            zeropower_via_newtonschulz(matrix)
        took.append(thread_time() - start)
    return min(took)


def weights_with_gradients(seed: int) -> list[torch.nn.Parameter]:
    """Weights with averaged gradients, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    weights = []
    for shape in SHAPES:
        weights.append(torch.nn.Parameter(torch.randn(shape, generator=draw)))
        weights[-1].grad = torch.randn(shape, generator=draw)
    return weights


def stepped_alone(steps: int, seed: int) -> list[torch.nn.Parameter]:
    weights = weights_with_gradients(seed)
    muon = Muon(weights)
    with measure.one_thread():
        for _ in range(steps):
            muon.step()
    return weights


def say_stepped(ranks: Sequence[SteppedRank]) -> str:
    """What each rank owned, its fair shares as predicted and as measured, and whether the bits are right."""
    work, seconds = sum(each.work for each in ranks), sum(each.seconds for each in ranks)
    return "\n".join(
        f"rank {rank} owned {list(each.owned)!s:24} fair shares: {each.work * len(ranks) / work:.2f}, "
        f"by its clock {each.seconds * len(ranks) / seconds:.2f}; same bits as one process: {each.same}"
        for rank, each in enumerate(ranks)
    )
