"""Lesson 16: runs on real ranks that are killed, resume on another grid, and are compared bit by bit."""

from __future__ import annotations

import atexit
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from ... import CheckpointManager, MuonWithAdamW
from ...errors import RankFailedError
from ...launching.launch import launch
from . import port as reference
from . import tiny_job
from .diary import DIARY
from .port import CHECKPOINTS, ECHO, Port, RunJob, other_grid
from .trials import steps_alike

PATIENCE = 12.0
AT_THE_KILL = "at_the_kill"
"""A copy of the checkpoints as the killed ranks left them; the resumed run may overwrite the originals."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the ranks: their grid and first step, what they did, which rank was killed, and when."""

    grid: tuple[int, int]
    begin: int
    losses: Mapping[int, float]
    rates: Mapping[int, float]
    saved: tuple[int, ...] = ()
    killed: tuple[int, int] | None = None
    """The killed rank, and the number of steps of the run before the kill."""

    @property
    def ranks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """The number of steps of the run that were done when the attempt ended."""
        return max(self.losses, default=self.begin - 1) + 1


@dataclass(frozen=True, slots=True)
class RunLife:
    """A run from its first start to its end."""

    folder: Path
    job: RunJob
    attempts: tuple[Attempt, ...]

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def left(self) -> Path:
        """The folder with the copy of the checkpoints that the killed ranks left."""
        return self.folder / AT_THE_KILL


def read(folder: Path, job: RunJob) -> RunLife:
    path, told = folder / DIARY, list[list[dict[str, Any]]]()
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        if line["event"] == "begin":
            told.append([])
        told[-1].append(line)
    return RunLife(folder, job, tuple(map(_attempt, told)))


def _attempt(lines: Sequence[Mapping[str, Any]]) -> Attempt:
    steps, saves, kills = ([e for e in lines if e["event"] == event] for event in ("step", "save", "kill"))
    dp, tp = lines[0]["grid"]
    losses, rates = ({line["step"]: line[what] for line in steps} for what in ("loss", "lr"))
    killed = next(((line["rank"], line["step"]) for line in kills), None)
    return Attempt((dp, tp), lines[0]["step"], losses, rates, tuple(line["step"] for line in saves), killed)


def new_folder() -> Path:
    """A temporary folder for a run; it is removed when this process ends."""
    folder = Path(mkdtemp(prefix="muon-my_loop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def start(
    folder: Path, grid: tuple[int, int], job: RunJob, port: Port, echo: bool, backend: str, timeout: float
) -> bool:
    """Start or restart the ranks of a run; False if the port's functions are stubs.

    Raises RankFailedError if a rank failed for another reason than the kill that the job asks for.
    """
    asked: dict[str, Any] = {"args": (grid, folder, job, port, echo), "backend": backend, "output": "quiet"}
    try:
        done = launch(reference.train, grid[0] * grid[1], **asked, timeout=timeout)
    except RankFailedError:
        attempts = read(folder, job).attempts
        if job.victim is None or not attempts or attempts[-1].killed is None:
            raise
        return True
    return all(done)


def live(
    dp: int, tp: int, job: RunJob, port: Port, backend: str, timeout: float = PATIENCE
) -> RunLife | None:
    """A run that loses its last rank and resumes on another grid; None if the reader's port is a stub."""
    folder, victim = new_folder(), replace(job, victim=dp * tp - 1)
    if not start(folder, (dp, tp), victim, port, False, backend, timeout):
        return None
    keep_copy(folder)
    written = start(folder, other_grid(dp, tp), job, port, True, backend, timeout)
    return read(folder, job) if written else None


def keep_copy(folder: Path) -> None:
    if (folder / CHECKPOINTS).is_dir():
        shutil.copytree(folder / CHECKPOINTS, folder / AT_THE_KILL)


def opened(folder: Path, step: int) -> dict[str, Tensor]:
    """All whole tensors of a checkpoint, by name: parameters and optimizer states. Needs no other ranks."""
    model = tiny_job.build(0)
    optimizer = MuonWithAdamW.from_model(model, lr=0.0, adamw_lr=0.0)
    CheckpointManager(folder).load(model, optimizer, step=step)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        state = optimizer.state.get(parameter, {})
        found |= {f"{name}: {key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True, slots=True)
class Companions:
    """Two runs to compare a life with: one that resumes on the same grid, and one without a kill."""

    same_grid: RunLife
    undisturbed: RunLife


def _train_both(rank: int, grid: tuple[int, int], folders: list[Path], job: RunJob, port: Port) -> None:
    for folder in folders:
        reference.train(rank, grid, folder, job, port)


def life_of(dp: int, tp: int, job: RunJob, port: Port, backend: str = "gloo") -> tuple[RunLife, Companions]:
    """A killed and resumed run of a port without stubs, and the runs to compare it with."""
    life = live(dp, tp, job, port, backend)
    assert life is not None
    again, fresh = new_folder(), new_folder()
    name, first = f"step-{life.job.every:08d}", life.attempts[0]
    shutil.copytree(life.left / name, again / CHECKPOINTS / name)
    arguments = (first.grid, [again, fresh], life.job, port)
    launch(_train_both, first.ranks, args=arguments, backend=backend, timeout=PATIENCE, output="quiet")
    return life, Companions(read(again, life.job), read(fresh, life.job))


def final(life: RunLife) -> dict[str, Tensor]:
    return opened(life.checkpoints, life.job.steps)


@dataclass(frozen=True, slots=True)
class BitsRow:
    """One comparison of bits: how many tensors are equal, and the largest difference in the others."""

    name: str
    what: str
    alike: int
    tensors: int
    furthest: float = 0.0

    @property
    def is_same(self) -> bool:
        return self.alike == self.tensors


@dataclass(frozen=True, slots=True)
class BitsReport:
    """Bit-by-bit comparisons of a run on both grids."""

    rows: tuple[BitsRow, ...]

    @property
    def same(self) -> list[str]:
        """The names of the comparisons in which all bits are equal."""
        return [row.name for row in self.rows if row.is_same]


def compare_bits(life: RunLife, others: Companions, backend: str = "gloo") -> BitsReport:
    """Compare both grids: the loaded state, a step with one gradient (run on real ranks), the whole run."""
    (dp, tp), last = life.attempts[0].grid, life.last
    saved = opened(life.left, last.begin)
    stepped = steps_alike(dp, tp, last.grid, life.job.seed, backend)
    names = list(tiny_job.TinyModel().state_dict())
    rows = (
        _bits_row("load", "what the new ranks hold", saved, opened(life.folder / ECHO, last.begin)),
        BitsRow("step", "one step, given the same full gradient", len(stepped), len(names)),
        _bits_row("run", "the end of the run", final(life), final(others.undisturbed)),
    )
    return BitsReport(rows)


def _bits_row(name: str, what: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> BitsRow:
    """Compare two states; AdamW's step counters, which are scalars, are left out."""
    keys = [key for key in one if one[key].ndim]
    alike = sum(torch.equal(one[key], other[key]) for key in keys)
    furthest = max(float((one[key].double() - other[key].double()).abs().max()) for key in one)
    return BitsRow(name, what, alike, len(keys), furthest)


def ends_alike(others: Companions) -> bool:
    """Whether a killed run that resumed on the same grid ends with the undisturbed run's bits."""
    return same_bits(final(others.same_grid), final(others.undisturbed))
