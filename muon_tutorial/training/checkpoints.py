"""Saves and loads a training run's checkpoints on every rank, and reads requests to save or stop.

Knows when a run saves, what else a checkpoint holds besides model and optimizer, and which files ask a run to
save or stop. Knows no command line; ``run_folder`` knows the rest of the folder.
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
"""The key under which ``settings.json`` and checkpoints name their run."""
SAVE, TIME = "save", "time"
REASONS = (SAVE, TIME, "SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2")
"""The reasons why a run saves or stops before its end."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run saves, how often (in steps), and from which step it resumes.

    Without ``every`` the run saves only if a signal or a file asks for it. ``begin`` is None for a new run.
    ``acts`` says what each signal asks for. The run stops at ``until``, in monotonic seconds of rank 0.
    ``run`` is the run's name; None if the settings do not hold it.
    """

    folder: Path
    every: int | None = None
    begin: int | None = None
    acts: Mapping[str, str] = field(default_factory=dict)
    until: float | None = None
    run: str | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """If this file exists, all ranks save and stop after the current step."""
        return self.folder / "stop"

    @property
    def save_file(self) -> Path:
        """If this file exists, all ranks save after the current step, and go on."""
        return self.folder / "save"

    def whole_step(self, say: Callable[[str], None]) -> int | None:
        """The step of the newest undamaged checkpoint; damaged ones are renamed, and ``say`` gets a line."""
        return self.manager().whole_step(say)

    def manager(self) -> CheckpointManager:
        return CheckpointManager(self.checkpoints, KEPT)


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """The result of a run that was asked to stop: its last step, where it saved, and the reason."""

    step: int
    checkpoints: Path
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Saver:
    """Saves one rank's part of the training. All ranks must make a ``Saver``, and make the same calls."""

    saving: Saving
    model: nn.Module
    optimizer: MuonWithAdamW
    scheduler: LRScheduler
    manager: CheckpointManager

    def resume(self) -> dict[str, Any]:
        """Load the checkpoint of ``saving.begin``; return the value ``run`` that was passed to ``save``.

        Raises:
            CheckpointError: the checkpoint cannot be read, or another run saved it. Raised on all ranks.
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
        """Whether to save after ``done`` steps of a run of ``steps``."""
        return self.saving.every is not None and (done % self.saving.every == 0 or done == steps)

    def save(self, done: int, run: dict[str, Any], wait: bool = False) -> None:
        """Save after ``done`` steps; without ``wait``, files are written while training goes on.

        Raises:
            CheckpointError: this save or the previous save failed. Raised on all ranks.
        """
        extra = {"scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state(), "run": run}
        extra[RUN] = self.saving.run
        self.manager.save(done, self.model, self.optimizer, extra=extra, wait=wait)

    def asked(self, is_first: bool) -> set[str]:
        """The ``REASONS`` to save or stop that this rank sees; only the first rank looks at the clock."""
        found = {SAVE} if self.saving.save_file.exists() else set()
        if is_first and self.saving.until is not None and time.monotonic() > self.saving.until:
            found.add(TIME)
        with contextlib.suppress(FileNotFoundError):
            word = self.saving.stop_file.read_text(encoding="ascii", errors="replace")
            found.add(word if word in REASONS else "SIGINT")  # a user may make the file by hand
        return found
