"""Lesson 16: the reference for the four functions that a reader ports, and the loop around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ... import CheckpointManager, MuonWithAdamW, build_mesh
from ...errors import UsageError
from ...launching.start_torchrun import die_at_once
from ...worlds.live import gather_objects
from ..my_muon.reference import load, save
from . import tiny_job
from .diary import DIARY, write_line

LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 0.02, 3e-3, 0.1, 0.25
SHORTEST = 6
CHECKPOINTS, ECHO = "checkpoints", "as_loaded"


def prepare(model: nn.Module, shard: Callable[[nn.Module], None]) -> MuonWithAdamW:
    """Shard the model and make its optimizer. All ranks must call."""
    shard(model)
    return MuonWithAdamW.from_model(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    """Clip, step and clear gradients after backward. All ranks must call."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Port:
    """The functions that a reader ports: prepare (shard, make the optimizer), update, save and load."""

    prepare: Callable[..., Any] = prepare
    update: Callable[..., Any] = update
    save: Callable[..., Any] = save
    load: Callable[..., Any] = load


@dataclass(frozen=True, slots=True)
class RunJob:
    """The steps and seed of a run, and the rank to kill. The steps also say when to save and when to kill."""

    steps: int
    seed: int = 0
    victim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", max(self.steps, SHORTEST))

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next."""
        return self.steps // 3

    @property
    def fatal(self) -> int:
        """The number of steps after which the victim is killed, between the first two checkpoints."""
        return self.every + max(1, self.every // 2)


def factor_of(step: int, steps: int) -> float:
    """The factor of the learning rates in a step, which falls to zero at the end and stays there."""
    return max(0.0, 1 - step / steps)


def other_grid(dp: int, tp: int) -> tuple[int, int]:
    """Another grid with the same number of ranks, if there is one.

    >>> other_grid(4, 1), other_grid(2, 2), other_grid(3, 1), other_grid(1, 1)
    ((2, 2), (4, 1), (1, 3), (1, 1))
    """
    if tp > 1 or dp == 1:
        return dp * tp, 1
    cut = next(factor for factor in range(2, dp + 1) if dp % factor == 0)
    return dp // cut, cut


def train(
    rank: int, grid: tuple[int, int], folder: Path, job: RunJob, port: Port, echo: bool = False
) -> bool:
    """One rank's part of a run that resumes from the newest checkpoint in ``folder``, or from the start.

    All ranks must call. ``echo`` saves the loaded state again. Returns False if a function is still a stub.
    """
    mesh = build_mesh({"dp": grid[0], "tp": grid[1]})
    model = tiny_job.build(job.seed)
    optimizer = port.prepare(model, partial(tiny_job.shard, mesh=mesh))
    if optimizer is ...:
        return False
    scheduler = LambdaLR(optimizer, partial(factor_of, steps=job.steps))
    manager = CheckpointManager(folder / CHECKPOINTS, keep=job.steps)
    note = partial(write_line, folder / DIARY, rank == 0)
    first = port.load(manager, model, optimizer, scheduler)
    if first is ...:
        return False
    if not isinstance(first, int):
        raise UsageError(f"load returned {first!r}; the loop needs the next step, an int")
    note("begin", grid=grid, step=first)
    if echo:
        save(CheckpointManager(folder / ECHO), first, model, optimizer, scheduler)
    for step in range(first, job.steps):
        loss = tiny_job.loss_of(model, step, job.seed, mesh)
        loss.backward()
        lr = rate_of(optimizer)
        port.update(model, optimizer, scheduler)
        note("step", step=step, loss=mean_of(loss), lr=lr)
        if (step + 1) % job.every == 0:
            if port.save(manager, step + 1, model, optimizer, scheduler) is ...:
                return False
            note("save", step=step + 1)
        if job.victim is not None and step + 1 == job.fatal:
            gather_objects(rank)  # rank 0 has recorded this step before a rank is killed
            if rank == job.victim:
                write_line(folder / DIARY, True, "kill", step=step + 1, rank=rank)
                die_at_once()
    return True


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def mean_of(loss: torch.Tensor) -> float:
    """The mean of all ranks' losses. All ranks must call."""
    losses = gather_objects(float(loss.detach()))
    return sum(losses) / len(losses)
