"""The loop of lesson 15, broken in ten ways, each as somebody has really broken one. One class, one mistake.

``Fault.rank`` is where the mistake stands, -1 for all ranks, and ``Fault.step`` is the step it begins.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor

from .training_rank import LR, TrainingRank, rescale

ALL = -1
Broken = type["FaultyRank"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake: its kind, the rank that makes it (-1: all), and the step from which on."""

    kind: str
    rank: int = ALL
    step: int = 1


class FaultyRank(TrainingRank):
    """A rank that may make a mistake: it asks ``is_wrong`` in the methods that it overrides."""

    def __init__(self, rank: int, dp: int, tp: int, seed: int, faults: tuple[Fault, ...] = ()) -> None:
        self.faults = {fault.kind: fault for fault in faults}
        self.number = rank
        self.step = 0
        super().__init__(rank, dp, tp, seed)

    def is_wrong(self, kind: str) -> bool:
        """Whether this rank makes this mistake in this step."""
        fault = self.faults.get(kind)
        return fault is not None and fault.rank in (ALL, self.number) and self.step >= fault.step


class LeavesEarly(FaultyRank):
    """Its data has run out, so its loop ends a step before the others'."""

    def train(self, steps: int) -> None:
        fault = self.faults["leaves early"]
        super().train(fault.step - 1 if fault.rank == self.rank else steps)


class SkipsWhatIsNone(FaultyRank):
    """Its data took another branch, so its gradients are None; then there is nothing to average, is there?"""

    def gradient(self) -> None:
        super().gradient()
        if self.is_wrong("skipped call"):
            self.gradients = dict.fromkeys(self.gradients)
            self.keep("gradient", self.gradients)

    def average(self) -> None:
        if any(gradient is None for gradient in self.gradients.values()):
            self.mean = {name: torch.zeros_like(piece) for name, piece in self.mine.items()}
            return
        super().average()


class LogsFirst(FaultyRank):
    """It logs the loss as soon as it is known, before the gradients are averaged."""

    def average(self) -> None:
        if self.is_wrong("order of calls"):
            super().log()
        super().average()

    def log(self) -> None:
        if not self.is_wrong("order of calls"):
            super().log()


class OwnSeed(FaultyRank):
    """It adds its rank to the seed, which is right for data and wrong for weights."""

    def own_seed(self) -> int:
        fault = self.faults["another seed"]
        return self.seed + self.number if fault.rank == self.number else self.seed


class NeverAverages(FaultyRank):
    """Inside no_sync, where it accumulates; the last batch should have left it."""

    def average(self) -> None:
        if self.is_wrong("not averaged"):
            self.mean = {name: each for name, each in self.gradients.items() if each is not None}
            self.keep("average", self.mean)
            return
        super().average()


class ForgetsMomentum(FaultyRank):
    """It works on a copy of the momentum that nobody writes back."""

    def momentum(self) -> None:
        before = dict(self.memory)
        super().momentum()
        if self.is_wrong("stale momentum"):
            self.memory = before
            self.keep("momentum", self.memory)


class SortsNames(FaultyRank):
    """It packs the gradients in alphabetical order; the others, in the order of the model."""

    def average(self) -> None:
        if self.is_wrong("order of parameters"):
            self.mean = self.averaged(sorted(self.mine))
            return
        super().average()


class ScalesByShard(FaultyRank):
    """It takes the scale of an update from the shape of what it holds."""

    def scale(self, name: str) -> float:
        if self.is_wrong("shard's shape"):
            return rescale(tuple(self.mine[name].shape))
        return super().scale(name)


class OwnRate(FaultyRank):
    """Its configuration file has another learning rate."""

    def share(self) -> None:
        self.lr = LR / 2 if self.is_wrong("another learning rate") else LR
        super().share()


class AddsBackwards(FaultyRank):
    """It reads the same batches, the last one first, so that their gradients add up in another order."""

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        mine = super().batches()
        return mine[::-1] if self.is_wrong("no bug") else mine


class SortsNamesAndNeverAverages(NeverAverages, SortsNames):
    """Two mistakes at once."""


KINDS: dict[str, Broken] = {
    "leaves early": LeavesEarly,
    "skipped call": SkipsWhatIsNone,
    "order of calls": LogsFirst,
    "another seed": OwnSeed,
    "not averaged": NeverAverages,
    "stale momentum": ForgetsMomentum,
    "order of parameters": SortsNames,
    "shard's shape": ScalesByShard,
    "another learning rate": OwnRate,
    "no bug": AddsBackwards,
}
PHASE_OF = {
    "leaves early": ("load",),
    "skipped call": ("average",),
    "order of calls": ("average", "log"),
    "another seed": ("start",),
    "not averaged": ("average",),
    "stale momentum": ("momentum",),
    "order of parameters": ("average",),
    "shard's shape": ("update",),
    "another learning rate": ("share",),
    "no bug": ("gradient",),
}
"""The phases that are right answers for each kind."""
MEANINGS = {
    "leaves early": "a rank returns from its loop before the others do",
    "skipped call": "a rank leaves one call out, and goes on to the next one in the program",
    "order of calls": "a rank makes a later call before the one that is due",
    "another seed": "a rank starts from other random weights",
    "not averaged": "each dp position goes on with its own gradients",
    "stale momentum": "the new momentum is used nowhere: the old one stays",
    "order of parameters": "a rank packs the right matrices for a call, in another order",
    "shard's shape": "a factor comes from the shape of the rows at hand, not of the whole matrix",
    "another learning rate": "the right update is applied at another rate",
    "no bug": "the same numbers are added up in another order, so only the last bits differ",
}
"""Each kind in one line."""
METHOD_OF = {
    "leaves early": "train",
    "another seed": "own_seed",
    "shard's shape": "scale",
    "no bug": "batches",
    "order of calls": "average",
}
HANGS = ("leaves early", "skipped call", "order of calls")


def class_of(faults: tuple[Fault, ...]) -> Broken:
    """The loop with these mistakes in it."""
    if not faults:
        return FaultyRank
    if len(faults) > 1:
        return SortsNamesAndNeverAverages
    return KINDS[faults[0].kind]


def say_kinds() -> str:
    """Each kind and what it means, a line each."""
    return "\n".join(f"{kind:<24}{meaning}" for kind, meaning in MEANINGS.items())


def guilty_lines(kind: str) -> str:
    """The method in which the mistake stands, and its story."""
    broken = KINDS[kind]
    method = getattr(broken, METHOD_OF.get(kind, PHASE_OF[kind][0]))
    return f"{broken.__doc__}\n\n{textwrap.dedent(inspect.getsource(method)).rstrip()}"
