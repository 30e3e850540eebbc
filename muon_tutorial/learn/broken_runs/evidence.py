"""Lesson 15: what a run's notes prove. The first rung that differs from the oracle, and the first call
that is missing. Pure functions of a run: nothing here starts a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import UsageError
from .. import inputs
from ..exercises.on_real_ranks import say_ranks
from .on_ranks import TrainingRun
from .training_rank import CALLS, RUNGS, STEPS, CallNote

ROUNDING = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of one rank: the results that differ from the oracle's; ``reached``: whether it got there."""

    step: int
    name: str
    rank: int
    reached: bool
    wrong: tuple[str, ...]


def rungs(run: TrainingRun) -> list[Rung]:
    """All rungs in the order in which they were to be found, for each rank."""
    expected = [run.expected(rank) for rank in run.grid.ranks]
    return [_rung(run, key, rank, expected[rank][key]) for key in ladder_order() for rank in run.grid.ranks]


def ladder_order() -> list[tuple[int, str]]:
    """Step and name of every rung, from the start on."""
    return [(0, "start"), *((step, name) for step in range(1, STEPS + 1) for name in RUNGS[1:])]


def _rung(run: TrainingRun, key: tuple[int, str], rank: int, right: Any) -> Rung:
    found = run.reports[rank].notes.rungs.get(key)
    wrong = () if found is None else tuple(name for name in right if not _same(found[name], right[name]))
    return Rung(*key, rank, found is not None, wrong)


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def hash_of(results: Any) -> str:
    """Six letters that stand for all bits of a rung."""
    parts = [b"None" if each is None else each.numpy().tobytes() for each in results.values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class NothingFound:
    """What a search that found nothing says; false where a truth is asked for."""

    said: str

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return self.said


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first rung that is not the oracle's: which ranks, which matrices, and how far off the numbers are.

    ``of`` is how many ranks find results of these matrices at that rung.
    ``ratio`` is the size over the oracle's, ``cosine`` says whether they point the same way, and ``off`` is
    the largest difference as a part of the largest number, all of the worst matrix. NaN where there are none.
    """

    step: int
    phase: str
    ranks: tuple[int, ...]
    of: int
    matrices: tuple[str, ...]
    ratio: float
    cosine: float
    off: float

    @property
    def who(self) -> int | str:
        """The rank; the first of several; "all" where it differs on every rank that has such a result."""
        return "all" if len(self.ranks) == self.of else self.ranks[0]

    def __repr__(self) -> str:
        who = "all ranks" if self.who == "all" else f"{say_ranks(self.ranks)} alone"
        lines = [
            f"the first rung that differs   step {self.step}, {self.phase}",
            f"on                            {who}",
            f"matrices                      {', '.join(self.matrices)}",
        ]
        if self.off != self.off:
            return "\n".join([*lines, "what is there                 None: no numbers at all"])
        return "\n".join([
            *lines,
            f"size, over the oracle's       {self.ratio:.4f}",
            f"cosine with the oracle's      {self.cosine:.4f}",
            f"largest difference            {self.off:.1e} of the largest (float32 rounds at {ROUNDING:.1e})",
        ])  # fmt: skip


def first_difference(run: TrainingRun) -> FirstDifference | NothingFound:
    """The first rung that differs from the oracle's; a false value that says so where none does."""
    wrong = [rung for rung in rungs(run) if rung.wrong]
    if not wrong:
        return NothingFound(
            "nothing differs from the oracle" + (" in what the ranks reached" if run.hangs else "")
        )
    first = [rung for rung in wrong if (rung.step, rung.name) == (wrong[0].step, wrong[0].name)]
    ranks = tuple(rung.rank for rung in first)
    matrices = tuple(dict.fromkeys(name for rung in first for name in rung.wrong))
    numbers = max((_off(run, rung, name) for rung in first for name in rung.wrong), key=lambda each: each[2])
    holders = [rank for rank in run.grid.ranks if _holds(run, rank, wrong[0], matrices)]
    return FirstDifference(wrong[0].step, wrong[0].name, ranks, len(holders), matrices, *numbers)


def _holds(run: TrainingRun, rank: int, rung: Rung, matrices: tuple[str, ...]) -> bool:
    """Whether a rank finds one of these matrices' results at a rung."""
    return any(name in run.expected(rank)[rung.step, rung.name] for name in matrices)


def _off(run: TrainingRun, rung: Rung, name: str) -> tuple[float, float, float]:
    mine = run.reports[rung.rank].notes.rungs[rung.step, rung.name][name]
    right = run.expected(rung.rank)[rung.step, rung.name][name]
    if mine is None or right is None:
        return (float("nan"),) * 3
    one, other = mine.double().flatten(), right.double().flatten()
    ratio = float(one.norm() / other.norm())
    cosine = float(one @ other / (one.norm() * other.norm()))
    return ratio, cosine, float((one - other).abs().max() / other.abs().max())


def say_numbers(run: TrainingRun, step: int, rung: str) -> str:
    """At one rung, for each rank and matrix: size over the oracle's, cosine with it, largest difference.

    Raises:
        UsageError: the run has no such rung.
    """
    if (step, rung) not in ladder_order():
        raise UsageError(f"there is no rung {rung!r} of step {step!r}; the rungs are {', '.join(RUNGS)}")
    lines = [f"{'':<8}{'':<8}{'size':>8}{'cosine':>9}{'difference':>13}"]
    for found in (each for each in rungs(run) if (each.step, each.name) == (step, rung) and each.reached):
        for name in run.expected(found.rank)[step, rung]:
            ratio, cosine, off = _off(run, found, name)
            said = f"{ratio:>8.4f}{cosine:>9.4f}{off:>13.0e}" if off == off else "   None: no entries at all"
            lines.append(f"rank {found.rank:<3}{name:<8}{said}")
    return "\n".join(lines)


def copies_agree(run: TrainingRun) -> bool:
    """Whether, at the end, all ranks of each dp group hold the same bits. It proves nothing."""
    last = {rank: report.notes.rungs.get((STEPS, "share"), {}) for rank, report in enumerate(run.reports)}
    groups = {run.grid.at(rank).group("dp") for rank in run.grid.ranks}
    return all(len({hash_of(last[rank]) for rank in group}) == 1 for group in groups)


def outcomes(lie: TrainingRun) -> dict[str, Any]:
    """What answers the two predictions: the first result that is wrong, and whether wrong copies agree."""
    spot = first_difference(lie)
    return {"rung": spot.phase if spot else "none", "agree": copies_agree(lie)}


def say_outcome(run: TrainingRun) -> str:
    """What a test, or the log, would have shown of a run."""
    said = {}
    if run.hangs:
        stuck = sorted((each.at, rank) for rank, each in enumerate(run.reports) if each.stuck)
        silent = [rank for rank, each in enumerate(run.reports) if not each.stuck]
        said["waited in vain, in the order in which they complained"] = (
            f"ranks {', '.join(str(rank) for _, rank in stuck)}"
        )
        said["returned without an error"] = ", ".join(map(str, silent)) or "none"
    else:
        said["returned without an error"] = f"{run.grid.world_size} of {run.grid.world_size}"
        said["copies agree to the last bit at the end"] = "yes" if copies_agree(run) else "no"
    said["losses that rank 0 logged"] = ", ".join(f"{each:.4f}" for each in run.reports[0].notes.losses)
    wide = max(map(len, said)) + 3
    return "\n".join(f"{what:<{wide}}{value}" for what, value in said.items())


# Calls: who made which, and who waits for whom.


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits in a call for a rank that has not come to it."""

    waiter: int
    awaited: int
    step: int
    phase: str


def _made(run: TrainingRun, rank: int) -> list[CallNote]:
    return run.reports[rank].notes.calls


def waits(run: TrainingRun) -> list[Wait]:
    """Who waits for whom when the run stands still: from each open call to those who have not made it."""
    return list(_waits(run))


def _waits(run: TrainingRun) -> Iterator[Wait]:
    for rank, report in enumerate(run.reports):
        if report.stuck:
            call = report.notes.calls[-1]
            turn = sum(each.name == call.name for each in report.notes.calls)
            for other in call.ranks:
                if sum(each.name == call.name for each in _made(run, other)) < turn:
                    yield Wait(rank, other, call.step, call.phase)


@dataclass(frozen=True, slots=True)
class MissingCall:
    """The earliest call of the program that a rank has not made, though others are in it or past it."""

    rank: int
    step: int
    phase: str
    instead: str

    def __repr__(self) -> str:
        return (
            f"the first call that is missing   step {self.step}, {self.phase}, on rank {self.rank}\n"
            f"what that rank did instead       {self.instead}"
        )


def first_missing_call(run: TrainingRun) -> MissingCall | NothingFound:
    """Where a rank first leaves the order of calls that all are to keep; a false value where none does."""
    due = program(run.dp)
    for number, call in enumerate(due):
        for rank in run.grid.ranks:
            made = _made(run, rank)
            if number < len(made) and made[number].name != call:
                step, phase = made[number].name
                return MissingCall(rank, *call, f"step {step}, {phase}")
    ends = [(len(_made(run, rank)), rank) for rank, report in enumerate(run.reports) if not report.stuck]
    if run.hangs and ends:
        number, rank = min(ends)
        if number < len(due):
            return MissingCall(rank, *due[number], "it returned")
    return NothingFound("no call is missing: nobody waits for ever")


def program(dp: int) -> list[tuple[int, str]]:
    """Step and phase of every call that a rank is to make, in order. Each owner shares: dp of these."""
    phases = [phase for phase in CALLS for _ in range(dp if phase == "share" else 1)]
    return [(step, phase) for step in range(1, STEPS + 1) for phase in phases]


def say_calls(run: TrainingRun, step: int) -> str:
    """The calls of one step, rank by rank, in the order in which each made them; an open one ends in "…"."""
    lines = []
    for rank in run.grid.ranks:
        calls = [each for each in _made(run, rank) if each.step == step]
        said = [f"{each.phase}{'' if each.stop else ' …'}" for each in calls]
        lines.append(f"rank {rank}: {', '.join(said) or 'none'}")
    return "\n".join(lines)


def say_packed(run: TrainingRun, step: int, phase: str) -> str:
    """What each rank packed for a call, in its order."""
    found = {
        rank: [each.what for each in _made(run, rank) if each.name == (step, phase)]
        for rank in run.grid.ranks
    }
    return "\n".join(
        f"rank {rank}: {what[0] if what else 'made no such call'}" for rank, what in found.items()
    )


def packs_otherwise(run: TrainingRun, step: int, phase: str) -> int | None:
    """The rank that packs for a call what no other rank packs in that order; None where there is none."""
    found = [
        next((each.what for each in _made(run, rank) if each.name == (step, phase)), "")
        for rank in run.grid.ranks
    ]
    odd = [rank for rank, what in enumerate(found) if found.count(what) == 1]
    return odd[0] if len(odd) == 1 else None


def say_lines(run: TrainingRun) -> str:
    """In which line of the loop each rank stands."""
    lines = []
    for rank, report in enumerate(run.reports):
        phase = [line.partition(", in take_step: ")[2] for line in report.lines]
        at = next(filter(None, phase), "")
        lines.append(f"rank {rank}: {f'{at:<16} {report.lines[-1]}' if report.stuck else 'returned'}")
    return "\n".join(lines)


def recorded_dump() -> str:
    """What py-spy 0.4.2 printed of rank 3's main thread while the run of the first picture stood still."""
    file = resources.files(inputs) / "recorded" / "py_spy_hang.txt"
    return file.read_text(encoding="utf-8").rstrip()


def say_flight(run: TrainingRun, rank: int, last: int = 4) -> str:
    """The last entries of PyTorch's flight recorder on one rank: kind, group, number in the group, sizes."""
    entries = run.reports[rank].flight[-last:]
    if not entries:
        return "nothing recorded: set TORCH_FR_BUFFER_SIZE before ranks start; old torch has none for Gloo"
    return "\n".join(
        f"{each['profiling_name']:<18} group {each['process_group'][0]:<3} call "
        f"{each['collective_seq_id']:<3} sizes {each['input_sizes']}"
        for each in entries
    )
