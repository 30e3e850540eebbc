"""A training run's checkpoints, as every rank saves and loads them, and what a run is asked to do.

Knows when a run saves, what is in a checkpoint beside model and optimizer, and which files ask a run to save
or stop. Knows no command line; ``run_folder`` knows the rest of the folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint import CheckpointManager
from ..errors import CheckpointError
from ..optimizer.muon_with_adamw import MuonWithAdamW

KEPT = 2
RUN = "run_name"
"""Where ``settings.json`` and checkpoints say of which run they are."""
SAVE, TIME = "save", "time"
REASONS = (SAVE, TIME, "SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2")
"""Why a run saves, or stops, before its end."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run saves, after how many steps each, and the step that it goes on from.

    Without ``every`` it saves only when it is asked to. ``begin`` is None for a run that starts anew.
    ``acts`` says what each signal asks for; at ``until``, in monotonic seconds of rank 0, the run stops.
    ``run`` names the run, whose checkpoints say so; None for one whose settings do not.
    """

    folder: Path
    every: int | None = None
    begin: int | None = None
    acts: Mapping[str, str] = field(default_factory=dict)
    until: float | None = None
    run: str | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """The file whose presence asks all ranks to save and stop after the step they are in."""
        return self.folder / "stop"

    @property
    def save_file(self) -> Path:
        """The file whose presence asks all ranks to save after the step they are in, and go on."""
        return self.folder / "save"

    def whole_step(self, say: Callable[[str], None]) -> int | None:
        """The step of the newest whole checkpoint; damaged ones are put aside, and ``say`` is told."""
        return self.manager().whole_step(say)

    def manager(self) -> CheckpointManager:
        """What saves and loads there."""
        return CheckpointManager(self.checkpoints, KEPT)


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that was asked to stop, after how many steps, where it saved, and what asked."""

    step: int
    checkpoints: Path
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Saver:
    """Saves what one rank trains. All ranks must make one, and call it alike."""

    saving: Saving
    model: nn.Module
    optimizer: MuonWithAdamW
    scheduler: LRScheduler
    manager: CheckpointManager

    def resume(self) -> dict[str, Any]:
        """Load the checkpoint of ``saving.begin``; returns what ``save`` was told.

        Raises:
            CheckpointError: it cannot be read, or another run saved it; on all ranks.
        """
        assert self.saving.begin is not None
        extra = self.manager.load(self.model, self.optimizer, step=self.saving.begin)
        own, its = self.saving.run, extra.get(RUN)
        if None not in (own, its) and own != its:
            raise CheckpointError(
                f"another run saved the checkpoint of step {self.saving.begin} in {self.saving.checkpoints}"
            )
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
        extra[RUN] = self.saving.run
        self.manager.save(done, self.model, self.optimizer, extra=extra, wait=wait)

    def asked(self, is_first: bool) -> set[str]:
        """What this rank sees the run asked for, of ``REASONS``; the clock is the first rank's."""
        found = {SAVE} if self.saving.save_file.exists() else set()
        if is_first and self.saving.until is not None and time.monotonic() > self.saving.until:
            found.add(TIME)
        with contextlib.suppress(FileNotFoundError):
            word = self.saving.stop_file.read_text(encoding="ascii", errors="replace")
            found.add(word if word in REASONS else "SIGINT")  # somebody touched it
        return found
