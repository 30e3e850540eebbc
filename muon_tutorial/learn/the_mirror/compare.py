"""Lesson 09: a reader's step compared with the package's, message by message, and with one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ... import Grid, Plan
from ...engine.collective import Collective
from ..inputs import measure
from .on_ranks import LR, MATRICES, Report, StepOfBucket, SteppedRun, reference_step, stepped, weights
from .recording import MOMENTS, PHASES, stored_parts

Matrices = Mapping[str, Tensor]
_HELD = (3, 4, 6)
"""The moments at which held matrices are compared, each after the phase of the same number."""
_QUIET = (4, 5, 6)
"""The phases that send nothing."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One result: ``how`` is "same", "wrong" or "missing"; ``held`` results are about what a rank holds."""

    rank: int
    phase: int
    how: str
    what: str = ""
    held: bool = False


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A step compared with the reference, by rank and phase. ``broke`` is the error that ended it."""

    grid: Grid
    marks: Sequence[Mark]
    broke: str

    @property
    def stopped(self) -> str:
        """A sentence on the error that ended the step; empty if none did."""
        said = "; ".join(map(str.strip, self.broke.splitlines())).replace(":; ", ": ")
        return f" It stopped with {said}" if said else ""

    @property
    def first(self) -> Mark | None:
        """The first mark that is not "same": in the earliest phase, a wrong one before a missing one.

        A rank's own error stops all ranks early, so then only wrong marks count. If no mark is wrong, this is
        the first missing mark of the rank that got farthest.
        """
        others = [mark for mark in self.marks if mark.how != "same"]
        # the run ended by an error in a rank's own code, not by requests that do not match
        raised = bool(self.broke) and not self.broke.startswith(("DeadlockError", "MismatchError"))
        if raised and any(mark.how == "wrong" for mark in others):
            others = [mark for mark in others if mark.how == "wrong"]
        elif raised:
            # requests of phases 1 and 2 come first: ranks make them before they hold anything
            others.sort(key=lambda mark: mark.held or mark.phase > 2)
            ends = [next(mark for mark in others if mark.rank == rank) for rank in {m.rank for m in others}]
            return max(ends, key=lambda mark: (mark.phase, -mark.rank), default=None)
        order = [(mark.phase, mark.how == "missing", mark.held, mark.rank) for mark in others]
        return others[order.index(min(order))] if others else None


def first_difference(step: StepOfBucket, dp: int, tp: int, seed: int) -> StepDifference:
    """Compare every rank's requests with those of the package's step, phase by phase, to the bit."""
    right, mine = stepped(reference_step, dp, tp, seed), stepped(step, dp, tp, seed)
    grid = Grid.of(dp=dp, tp=tp)
    marks = [mark for rank in grid.ranks for mark in _marks_of(rank, right, mine)]
    return StepDifference(grid, marks, mine.broke)


def _marks_of(rank: int, right: SteppedRun, mine: SteppedRun) -> Iterator[Mark]:
    """The marks for everything one rank held and asked for, up to its first wrong message."""
    should_hold, held = right.jobs[rank].diarist.contents, mine.jobs[rank].diarist.contents
    for name, phase in product(should_hold, _HELD):
        if not should_hold[name][phase]:
            continue
        if held[name][phase] == should_hold[name][phase]:
            yield Mark(rank, phase, "same")
        elif held[name][phase]:
            yield Mark(rank, phase, "wrong", f"rank {rank}: {MOMENTS[phase]} of {name} is not right.", True)
        elif mine.broke:
            yield Mark(rank, phase, "missing", f"rank {rank} never has {MOMENTS[phase]} of {name}.", True)
    if mine.reports and len(mine.of_rank(rank)) == len(right.of_rank(rank)):
        new, wanted = mine.reports[rank].after, right.reports[rank].after
        if not all(torch.equal(wanted[name], new[name]) for name in MATRICES):
            yield Mark(rank, 7, "wrong", f"rank {rank}: its new weights are not those of the step.")
    came = mine.of_rank(rank)
    for number, due in enumerate(right.of_rank(rank)):
        phase = PHASES.index(due.label.phase) + 1
        if number >= len(came):
            yield Mark(rank, phase, "missing", f"rank {rank} never asks for {due}.")
            break
        if wrong := _wrong(rank, due, came[number]):
            asked = PHASES.index(came[number].label.phase) + 1
            yield Mark(rank, asked if asked in _QUIET else phase, "wrong", wrong)
            break
        yield Mark(rank, phase, "same")
    for extra in came[len(right.of_rank(rank)) :]:
        phase = PHASES.index(extra.label.phase) + 1
        yield Mark(rank, phase, "wrong", f"rank {rank} asks for {extra}, which is one request too many.")


def _wrong(rank: int, due: Collective, came: Collective) -> str:
    if str(due) != str(came):
        return f"rank {rank} asks for {came}. The correct request: {due}."
    one, other, subject = due.send, came.send, came.label.subject
    if one is None or other is None or torch.equal(one, other):
        return ""
    places = (one != other).nonzero().flatten()
    where = f"the first at {int(places[0])}, the last at {int(places[-1])} of {one.numel()}."
    return f"rank {rank} sends wrong entries{f' of {subject}' if subject else ''}: {where}"


def whole_gradients(plan: Plan, reports: Sequence[Report]) -> dict[str, Tensor]:
    """The gradients after phase 1, assembled from the ranges of all ranks."""
    [bucket] = plan.buckets
    wholes = {entry.matrix.name: torch.zeros(entry.matrix.shape) for entry in bucket.entries}
    for rank, report in enumerate(reports):
        for held in bucket.stored_shards(plan.grid.at(rank)):
            for box, part in stored_parts(held, plan.grid.at(rank), report.kept):
                wholes[held.entry.matrix.name][box.slices] = part
    return wholes


def whole_weights(plan: Plan, reports: Sequence[Report]) -> dict[str, Tensor]:
    """The new weights, assembled from the pieces of the first dp position."""
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
    return sum(int((one[name].view(torch.int32) != other[name].view(torch.int32)).sum()) for name in MATRICES)
