"""A training run's checkpoints, as every rank saves and loads them, and its request to stop.

Knows when a run saves, what is in a checkpoint beside model and optimizer, and which file asks a run to stop.
Knows no command line; ``run_folder`` knows the rest of the folder.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint import CheckpointManager
from ..errors import RunFolderError
from ..optimizer.muon_with_adamw import MuonWithAdamW
from .run_folder import METRICS, RunFolder

KEPT = 2
TORCHRUN_ECHO = 1.0
"""Seconds in which torchrun passes on to its ranks the Ctrl-C that the terminal has sent them already."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run saves, after how many steps each, and the step that it goes on from.

    Without ``every`` it saves only when it is asked to stop. ``begin`` is None for a run that starts anew.
    """

    folder: Path
    every: int | None = None
    begin: int | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """The file whose presence asks all ranks to save and stop after the step they are in."""
        return self.folder / "stop"

    @property
    def has_begun(self) -> bool:
        """Whether a step has been recorded since the run began, or went on."""
        try:
            records = RunFolder(self.folder).records(METRICS)
        except RunFolderError:
            return False
        return any(record.get("step", -1) >= (self.begin or 0) for record in records[-1:])

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return CheckpointManager(self.checkpoints, KEPT).latest_step()


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that was asked to stop, after how many steps, and where it saved."""

    step: int
    checkpoints: Path


@dataclass(frozen=True, slots=True, eq=False)
class Saver:
    """Saves what one rank trains. All ranks must make one, and call it alike."""

    saving: Saving
    manager: CheckpointManager
    model: nn.Module
    optimizer: MuonWithAdamW
    scheduler: LRScheduler

    @classmethod
    def of(cls, saving: Saving, model: nn.Module, optimizer: MuonWithAdamW, scheduler: LRScheduler) -> Saver:
        """A saver for what is trained here."""
        return cls(saving, CheckpointManager(saving.checkpoints, KEPT), model, optimizer, scheduler)

    def resume(self) -> dict[str, Any]:
        """Load the checkpoint of ``saving.begin``; returns what ``save`` was told.

        Raises:
            CheckpointError: it cannot be read, on all ranks; nothing has changed.
        """
        assert self.saving.begin is not None
        extra = self.manager.load(self.model, self.optimizer, step=self.saving.begin)
        self.scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])
        return extra["run"]

    def due(self, done: int, steps: int) -> bool:
        """Whether to save after ``done`` of ``steps`` steps."""
        return self.saving.every is not None and (done % self.saving.every == 0 or done == steps)

    def save(self, done: int, run: dict[str, Any], wait: bool = False) -> None:
        """Save after ``done`` steps; the file is written while training goes on, unless told to wait.

        Raises:
            CheckpointError: this save failed, or the one before it, on all ranks.
        """
        extra = {"scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state(), "run": run}
        self.manager.save(done, self.model, self.optimizer, extra=extra, wait=wait)

    def wait(self) -> None:
        """Wait for the save that is under way."""
        self.manager.wait()

    @property
    def stop_requested(self) -> bool:
        """Whether this rank sees that somebody asked the run to stop."""
        return self.saving.stop_file.exists()


@contextmanager
def stopping_on_interrupt(saving: Saving, say: str | None, echo: float = 0.0) -> Iterator[None]:
    """Let the first Ctrl-C ask a run that has begun to save and stop, and a second one interrupt at once.

    ``say`` is printed at the first; None where another process says it. Another one within ``echo`` seconds
    of the first is the same. What asked an earlier run to stop is forgotten. For the main thread, before this
    process trains.
    """
    saving.stop_file.unlink(missing_ok=True)
    asked: list[float] = []

    def ask(*_: object) -> None:
        if not saving.has_begun or (asked and time.monotonic() - asked[0] > echo):
            raise KeyboardInterrupt
        if not asked:
            asked.append(time.monotonic())
            saving.stop_file.touch()
            if say is not None:
                print(say, file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        saving.stop_file.unlink(missing_ok=True)
