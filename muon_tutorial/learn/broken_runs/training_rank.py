"""The base of lesson 15's loop: its matrices and batches, its groups, and each rank's notes.

tp cuts the rows of each matrix; dp positions hold copies. In a step, ranks gather the matrices over tp,
compute gradients on their dp position's data, and average them over dp. To average, they gather, and add in
the order of ranks, so that the bits are those of one process. Then ranks update the momentum. The ranks at
dp position i modulo dp own matrix i: they gather the Newton–Schulz input over tp, orthogonalize it, and send
their new rows to their dp group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UsageError
from ...plan.grid import Coordinate, Grid

SHAPES = {"up": (32, 16), "gate": (32, 16), "down": (16, 32), "out": (16, 16)}
STEPS, BATCHES, ROWS = 3, 3, 8
LR, MEMORY, DECAY = 0.05, 0.9, 0.1
RUNGS = ("start", "gradient", "average", "momentum", "input", "update", "share")
"""The results that a rank keeps, in the order of a step; "start" is the state before step 1."""
CALLS = {"load": ("tp",), "average": ("dp",), "gather": ("tp",), "share": ("dp",), "log": ("dp", "tp")}
"""The phases of a step that communicate, in order, each with the axes of its group."""

Matrices = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]


def initial_weights(seed: int) -> dict[str, Tensor]:
    """The matrices, whole, before the first step."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in SHAPES.items()}


def batch(seed: int, step: int, place: int, number: int) -> Batch:
    """Inputs and targets of one small batch that a dp position reads in a step."""
    generator = torch.Generator().manual_seed(((seed * 1009 + step) * 101 + place) * 11 + number)
    return torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 16, generator=generator)


def batches_of(seed: int, step: int, place: int) -> list[Batch]:
    """All batches that a dp position reads in a step, in their order."""
    return [batch(seed, step, place, number) for number in range(BATCHES)]


def loss_and_gradients(weights: Matrices, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of all matrices, summed over the batches in the given order."""
    total, summed = 0.0, {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for inputs, targets in batches:
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        hidden = torch.tanh(inputs @ leaves["up"].T) * (inputs @ leaves["gate"].T)
        loss = ((hidden @ leaves["down"].T @ leaves["out"].T - targets) ** 2).mean()
        for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            summed[name] += gradient
        total += loss.item()
    return total, summed


def rescale(shape: tuple[int, ...]) -> float:
    """The factor that scales an update; ``shape`` is the whole matrix's."""
    return max(1.0, shape[0] / shape[1]) ** 0.5


@dataclass(frozen=True, slots=True)
class CallNote:
    """One call to other ranks: step, phase, ranks, contents and times; ``stop`` is None until it ends."""

    step: int
    phase: str
    ranks: tuple[int, ...]
    what: str
    start: float
    stop: float | None = None

    @property
    def name(self) -> tuple[int, str]:
        return self.step, self.phase


@dataclass(slots=True)
class Notebook:
    """A rank's notes: its calls, its rungs by step and name, and its losses."""

    calls: list[CallNote] = field(default_factory=list)
    rungs: dict[tuple[int, str], dict[str, Tensor]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


class LoopNotes:
    """The state and the notes of one rank of the loop. All ranks must create it."""

    lr = LR
    updates: dict[str, Tensor]

    def own_seed(self) -> int:
        raise NotImplementedError

    def __init__(self, rank: int, dp: int, tp: int, seed: int) -> None:
        self.rank, self.seed, self.notes = rank, seed, Notebook()
        self.at: Coordinate = Grid.of(dp=dp, tp=tp).at(rank)
        self.groups = {phase: self._group(phase) for phase in CALLS}
        self.step = 0
        whole = initial_weights(self.own_seed())
        self.mine = {name: weight.chunk(tp)[self.at["tp"]].clone() for name, weight in whole.items()}
        self.memory = {name: torch.zeros_like(piece) for name, piece in self.mine.items()}
        self.keep("start", self.mine)

    def _group(self, phase: str) -> dist.ProcessGroup:
        """This rank's group for a phase; each phase has its own groups, as in large frameworks."""
        grid, axes = self.at.grid, CALLS[phase]
        members = sorted({grid.at(rank).group(*axes) for rank in grid.ranks})
        groups = {ranks: dist.new_group(list(ranks)) for ranks in members}
        return groups[self.at.group(*axes)]

    def keep(self, rung: str, results: Matrices) -> None:
        self.notes.rungs[self.step, rung] = {name: each.detach().clone() for name, each in results.items()}

    @contextmanager
    def calling(self, phase: str, what: Sequence[str] = ()) -> Iterator[dist.ProcessGroup]:
        group = self.groups[phase]
        ranks = tuple(dist.get_process_group_ranks(group))
        self.notes.calls.append(CallNote(self.step, phase, ranks, ", ".join(what), time.time()))
        yield group
        self.notes.calls[-1] = replace(self.notes.calls[-1], stop=time.time())

    def gather_all(self, phase: str, mine: Tensor, what: list[str]) -> list[Tensor]:
        """The tensors of all ranks in a phase's group, in the order of ranks."""
        with self.calling(phase, what) as group:
            found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, mine, group=group)
        return found

    def unpack(self, flat: Tensor, order: list[str]) -> dict[str, Tensor]:
        """Split a flat tensor into the pieces of the matrices in ``order``."""
        sizes = [self.mine[name].numel() for name in order]
        parts = zip(order, flat.split(sizes), strict=True)
        return {name: part.view_as(self.mine[name]).clone() for name, part in parts}


def check_grid(dp: int, tp: int) -> None:
    """Raise UsageError if an axis is shorter than 2, or if tp does not divide the rows of all matrices."""
    if dp < 2 or tp < 2 or any(rows % tp for rows, _ in SHAPES.values()):
        needs = "dp of 2 or more and tp of 2, 4, 8 or 16"
        raise UsageError(f"this lesson needs {needs}, not dp = {dp}, tp = {tp}")
