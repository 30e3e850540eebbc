"""Lesson 14: the planner's predictions for a step on 32 to 16,384 ranks, from a machine's file.

The strategy is ``layerwise``: each matrix belongs to one place along dp, its owner, and all tp ranks of that
place gather the matrix and work on it. So dp is the number of owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from ... import Grid, Matrix
from ...plan.strategies import layerwise, replicated, work_by_position
from ...timing.machine import find_machine
from ...timing.model_shape import stage_matrices
from ...timing.models import find_model
from ...timing.recommend import say_seconds
from ...timing.step_cost import StepEstimate, averaged_at_once, estimate, estimate_adamw
from ..first_muon.exercises import in_shares
from ..first_muon.exercises import shares_by_index as shares_by_index

MODEL, UNSEEN, EXPERTS = "llama-3.1-70b", "llama-3.1-8b", "kimi-k2"
MACHINE = "h100-infiniband"
OWNERS, PLACES = 256, 64
"""The grid of the mixture of experts: how many places it has along dp, and along ep."""
REPEATED = partial(layerwise, tp="repeat")
"""All ranks along tp work on the matrices of their place, so an owner is a place along dp."""
TP = 8
RANKS = tuple(32 * 2**doubling for doubling in range(10))
"""The lesson's numbers of ranks: 32, doubled up to 16,384."""
LINKS: Mapping[str, float] = {"slower": 1 / 8, "as built": 1.0, "faster": 8.0}
"""The speed of all links relative to the machine's, by its name in the widget."""
TOKENS, FLOPS, WIDTH = 4_194_304, 400e12, 28_672
"""Tokens of a batch; FLOP/s of one H100 of 16,384 that trained Llama 3 405B; a 70B model's MLP width."""


@dataclass(frozen=True, slots=True)
class StepAtScale:
    """A model's predicted step on ``ranks`` ranks. The estimate's seconds are those at the place along dp of
    the owner with the most work.

    ``work``: operations of Newton–Schulz at each place along dp. ``once``: seconds that one owner would need
    for all matrices. ``floor``: seconds for the costliest matrix alone, whose shape is ``largest``.
    """

    ranks: int
    matrices: int
    work: tuple[int, ...] = field(repr=False)  # thousands of numbers
    once: float
    floor: float
    largest: tuple[int, ...]
    estimate: StepEstimate

    @property
    def owners(self) -> int:
        """The number of places along dp, with or without a matrix."""
        return len(self.work)

    @property
    def idle_owners(self) -> int:
        return self.work.count(0)

    @property
    def fair(self) -> float:
        return self.once / self.owners

    @property
    def busiest(self) -> float:
        """Seconds of Newton–Schulz on the busiest owner."""
        return self.estimate.product

    @property
    def idle(self) -> float:
        """While the busiest owner works, an owner is idle for this fraction of the time, on average."""
        return 1 - self.fair / self.busiest

    def seconds(self, links: float = 1.0) -> float:
        """Seconds of the whole step if all links were ``links`` times as fast."""
        return self.estimate.seconds_at(links)

    def transfer(self, links: float = 1.0) -> float:
        """Seconds in which bytes are in transit."""
        computed = self.busiest + self.estimate.copy + self.estimate.others
        return self.seconds(links) - computed - self.estimate.latency


@cache
def matrices_of(model: str, tp: int) -> tuple[Matrix, ...]:
    """The hidden matrices of a model without experts, cut over tp."""
    return tuple(stage_matrices(find_model(model), tp=tp)[0])


@cache
def step_at(model: str, ranks: int) -> StepAtScale:
    matrices, grid = matrices_of(model, TP), Grid.of(dp=ranks // TP, tp=TP)
    largest = max(matrices, key=lambda matrix: newton_schulz_seconds((matrix,)))
    return StepAtScale(
        ranks=ranks,
        matrices=len(matrices),
        work=tuple(work_by_position(REPEATED(matrices, grid))),
        once=newton_schulz_seconds(matrices),
        floor=newton_schulz_seconds((largest,)),
        largest=largest.shape,
        estimate=step_of(model, ranks // TP, TP),
    )


@cache
def newton_schulz_seconds(matrices: tuple[Matrix, ...]) -> float:
    """Seconds of Newton–Schulz on one rank for all matrices, one after the other, by the machine's file."""
    by_shape = Counter(matrix.shape for matrix in matrices)
    return sum(times * _one_matrix(shape) for shape, times in by_shape.items())


@cache
def _one_matrix(shape: tuple[int, ...]) -> float:
    alone = [Matrix(0, "", shape)]
    return estimate("layerwise", REPEATED, alone, Grid.of(dp=1), find_machine(MACHINE)).product


def seconds_of(model: str) -> list[float]:
    """Seconds of Newton–Schulz on one owner, for each of a model's matrices."""
    return [newton_schulz_seconds((matrix,)) for matrix in matrices_of(model, TP)]


def steps(model: str = MODEL) -> list[StepAtScale]:
    """The lesson's model on all the lesson's grids, from the fewest ranks to the most."""
    return [step_at(model, ranks) for ranks in RANKS]


def say_steps(model: str = MODEL) -> str:
    lines = [f"{'ranks':>7}{'owners':>8}{'idle':>7}{'busiest':>10}{'latency':>10}{'step':>9}"]
    for step in steps(model):
        busiest, latency, whole = map(say_seconds, (step.busiest, step.estimate.latency, step.seconds()))
        counts = f"{step.ranks:>7,}{step.owners:>8,}{step.idle_owners:>7,}"
        lines.append(f"{counts}{busiest:>10}{latency:>10}{whole:>9}")
    return "\n".join([*lines, f"(predicted, by the file of {find_machine(MACHINE).name})"])


@cache
def step_of(model: str, dp: int, tp: int) -> StepEstimate:
    matrices, grid = matrices_of(model, tp), Grid.of(dp=dp, tp=tp)
    return estimate("layerwise", REPEATED, matrices, grid, find_machine(MACHINE))


def card() -> float:
    """Bytes that one network card of the machine sends in a second."""
    between = find_machine(MACHINE).between
    assert between is not None  # it has several nodes
    return between.bandwidth


@dataclass(frozen=True, slots=True)
class Averaging:
    """Seconds in which ``dp`` places along dp compute backward and average bf16 gradients as DDP does.

    ``latency`` is the part of ``all_reduce`` that more bandwidth does not shorten.
    """

    dp: int
    backward: float
    all_reduce: float
    latency: float

    @property
    def transfer(self) -> float:
        """Seconds of the all_reduces if only bytes took time."""
        return self.all_reduce - self.latency


@cache
def averaging(model: str, dp: int) -> Averaging:
    """Backward of ``TOKENS`` tokens at ``FLOPS``, and its all_reduces as the planner predicts them; tp=8."""
    grid = Grid.of(dp=dp, tp=TP)
    lengths = averaged_at_once(replicated(matrices_of(model, TP), grid), grid.at(0))
    found = estimate_adamw(lengths.elements(), grid, find_machine(MACHINE), g=torch.bfloat16, sharded=False)
    entries = sum(length * times for length, times in lengths.items())
    return Averaging(dp, 4 * entries * TOKENS / (dp * FLOPS), found.reduction, found.latency)


def say_experts() -> str:
    """The dense matrices and the experts of a mixture of experts: their number, owners and balance."""
    dense, experts = stage_matrices(find_model(EXPERTS), tp=TP, ep=PLACES)
    one_place = f"experts, 1 of {PLACES} places"
    columns = f"{'':24}{'matrices':>10}{'owners':>8}{'busiest':>22}"
    lines = [f"{EXPERTS} on dp={OWNERS}, tp={TP}, ep={PLACES}", columns]
    for name, matrices, owners in (("dense", dense, OWNERS), (one_place, experts, OWNERS * TP // PLACES)):
        work = work_by_position(REPEATED(matrices, Grid.of(dp=owners)))
        shares = f"{in_shares(work):.2f} fair shares"
        lines.append(f"{name:24}{len(matrices):>10,}{owners:>8,}{shares:>22}")
    return "\n".join([*lines, "(Each place along ep has other experts, and owners of its own.)"])
