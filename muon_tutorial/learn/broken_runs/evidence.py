"""Lesson 15: finds in a run's notes which result went wrong first, and which ranks wait for which."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from ...errors import UsageError
from .. import inputs
from ..exercises.on_real_ranks import say_ranks
from .on_ranks import TrainingRun
from .training_rank import RUNGS, STEPS

ROUNDING = torch.finfo(torch.float32).eps
LADDER = [(0, "start"), *((step, name) for step in range(1, STEPS + 1) for name in RUNGS[1:])]
"""The step and name of every rung, in the order of training. A rung is a result that every rank keeps."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of one rank: whether the rank reached it, and which results differ from the oracle's."""

    step: int
    name: str
    rank: int
    reached: bool
    wrong: tuple[str, ...]


def rungs(run: TrainingRun) -> list[Rung]:
    """All rungs of all ranks, in the order in which a sound run reaches them."""
    expected, found = [run.expected(rank) for rank in run.grid.ranks], []
    for key, rank in ((key, rank) for key in LADDER for rank in run.grid.ranks):
        right, mine = expected[rank][key], run.reports[rank].notes.rungs.get(key)
        differs = [] if mine is None else [name for name in right if not torch.equal(mine[name], right[name])]
        found.append(Rung(*key, rank, mine is not None, tuple(differs)))
    return found


def hash_of(results: Any) -> str:
    """Six hex digits of a hash over all bits of a rung."""
    raw = b"".join(each.numpy().tobytes() for each in results.values())
    return hashlib.sha256(raw).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first rung that differs from the oracle's: on which ranks, in which matrices, and by how much.

    ``of`` is the number of ranks that should have these results. The last three fields compare the worst
    matrix with the oracle's: ``ratio`` (of norms), ``cosine``, ``off`` (largest difference / largest entry).
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
        """The first rank that differs; "all" if all ranks that have the result differ."""
        return "all" if len(self.ranks) == self.of else self.ranks[0]

    def __repr__(self) -> str:
        who = "all ranks" if self.who == "all" else say_ranks(self.ranks)
        return f"{self.phase} of step {self.step} on {who}"


def first_difference(run: TrainingRun) -> FirstDifference | None:
    """The first rung that differs from the oracle's; None if none does."""
    wrong = [rung for rung in rungs(run) if rung.wrong]
    if not wrong:
        return None
    step, phase = wrong[0].step, wrong[0].name
    first = [rung for rung in wrong if (rung.step, rung.name) == (step, phase)]
    ranks = tuple(rung.rank for rung in first)
    matrices = tuple(dict.fromkeys(name for rung in first for name in rung.wrong))
    numbers = max((_off(run, rung, name) for rung in first for name in rung.wrong), key=lambda each: each[2])
    held = [run.expected(rank)[step, phase] for rank in run.grid.ranks]
    holders = sum(any(name in mine for name in matrices) for mine in held)
    return FirstDifference(step, phase, ranks, holders, matrices, *numbers)


def _off(run: TrainingRun, rung: Rung, name: str) -> tuple[float, float, float]:
    mine = run.reports[rung.rank].notes.rungs[rung.step, rung.name][name]
    right = run.expected(rung.rank)[rung.step, rung.name][name]
    one, other = mine.double().flatten(), right.double().flatten()
    cosine = float(one @ other / (one.norm() * other.norm()).clamp(min=1e-300))
    return float(one.norm() / other.norm()), cosine, float((one - other).abs().max() / other.abs().max())


def say_numbers(run: TrainingRun, step: int, rung: str) -> str:
    """A table of one rung, by rank and matrix: the ratio, cosine and difference as in ``FirstDifference``.

    Raises UsageError if the run has no such rung.
    """
    if (step, rung) not in LADDER:
        raise UsageError(f"there is no rung {rung!r} of step {step!r}; the rungs are {', '.join(RUNGS)}")
    lines = [f"{'':<8}{'':<8}{'size':>8}{'cosine':>9}{'difference':>13}"]
    for found in (each for each in rungs(run) if (each.step, each.name) == (step, rung) and each.reached):
        for name in run.expected(found.rank)[step, rung]:
            ratio, cosine, off = _off(run, found, name)
            lines.append(f"rank {found.rank:<3}{name:<8}{ratio:>8.4f}{cosine:>9.4f}{off:>13.0e}")
    return "\n".join(lines)


def copies_agree(run: TrainingRun) -> bool:
    """Whether all ranks of each dp group end with the same bits. Even if they do, the bits may be wrong."""
    last = {rank: report.notes.rungs.get((STEPS, "share"), {}) for rank, report in enumerate(run.reports)}
    groups = {run.grid.at(rank).group("dp") for rank in run.grid.ranks}
    return all(len({hash_of(last[rank]) for rank in group}) == 1 for group in groups)


def say_outcome(run: TrainingRun) -> str:
    """What a test or the log would have shown of a run."""
    said = {}
    if run.hangs:
        stuck = sorted((each.at, rank) for rank, each in enumerate(run.reports) if each.stuck)
        silent = [rank for rank, each in enumerate(run.reports) if not each.stuck]
        said["gave up waiting, in this order"] = say_ranks([rank for _, rank in stuck])
        said["returned without an error"] = say_ranks(silent) if silent else "no rank"
    else:
        said["returned without an error"] = "all ranks"
        said["copies agree to the last bit at the end"] = "yes" if copies_agree(run) else "no"
    said["losses that rank 0 logged"] = ", ".join(f"{each:.4f}" for each in run.reports[0].notes.losses)
    wide = max(map(len, said)) + 3
    return "\n".join(f"{what:<{wide}}{value}" for what, value in said.items())


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits in a call, and another rank that has not made that call."""

    waiter: int
    awaited: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"rank {self.waiter} waits for rank {self.awaited} in {self.phase} of step {self.step}"


def waits(run: TrainingRun) -> list[Wait]:
    """The waits of a run that hangs: a rank in a call, paired with a rank that has not made that call."""
    found = []
    for rank, report in enumerate(run.reports):
        if report.stuck:
            call = report.notes.calls[-1]
            turn = sum(each.name == call.name for each in report.notes.calls)
            for other in call.ranks:
                if sum(each.name == call.name for each in run.reports[other].notes.calls) < turn:
                    found.append(Wait(rank, other, call.step, call.phase))
    return found


def logs(run: TrainingRun) -> list[list[tuple[str, tuple[int, ...]]]]:
    """For each rank, its calls in the order in which they began: the phase, and the ranks that must call."""
    return [[(call.phase, call.ranks) for call in report.notes.calls] for report in run.reports]


def say_calls(run: TrainingRun, step: int) -> str:
    """For each rank, a line with its calls of one step, in order; "…" marks an unfinished call."""
    lines = []
    for rank, report in enumerate(run.reports):
        said = [f"{e.phase}{'' if e.stop else ' …'}" for e in report.notes.calls if e.step == step]
        lines.append(f"rank {rank}: {', '.join(said) or 'none'}")
    return "\n".join(lines)


def say_stacks(run: TrainingRun) -> str:
    """For each rank, the line of the file that it was running when it gave up waiting."""
    found = [re.findall(r"line (\d+), in (\w+)\n\s+(.*)", report.stack) for report in run.reports]
    return "\n".join(
        f"rank {rank}: " + ("line {}, in {}: {}".format(*stack[-1]) if stack else "returned")
        for rank, stack in enumerate(found)
    )


def recorded_dump() -> str:
    """What py-spy 0.4.2 printed for rank 3's main thread while the run of the first picture hung."""
    file = resources.files(inputs) / "recorded" / "py_spy_hang.txt"
    return file.read_text(encoding="utf-8").rstrip()


def say_flight(run: TrainingRun, rank: int, last: int = 4) -> str:
    """One rank's last entries in PyTorch's flight recorder: kind, group, number in the group, sizes."""
    entries = run.reports[rank].flight[-last:]
    if not entries:
        return "nothing recorded: set TORCH_FR_BUFFER_SIZE before ranks start; old torch notes no Gloo calls"
    return "\n".join(
        f"{each['profiling_name']:<18} group {each['process_group'][0]:<3} call "
        f"{each['collective_seq_id']:<3} sizes {each['input_sizes']}"
        for each in entries
    )
