"""Interrupted saves and loads: one rank fails at a file access, or disagrees with the others.

Python's audit events report when a rank opens, renames or removes a file; the fault happens at one of these
events. Afterwards, one process checks the files on disk.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muon_tutorial import Grid, LiveWorld, TutorialError, build_mesh
from muon_tutorial.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint

from . import job, saved_job
from .case import Case, RankRecord, Seen
from .processes import wait_until
from .saved_job import OTHER
from .strikes import STRIKES, Trigger, fail
from .tampering import NEW, OLD

HALF = "half loaded"
"""A rank writes this file if a refused load has changed something."""


AT_A_FILE: Mapping[str, Callable[[], object]] = {
    "SIGKILL while saving": STRIKES["SIGKILL"],
    "no space left while saving": lambda: fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "stuck while saving": STRIKES["stuck"],
    "SIGSTOP while saving": STRIKES["SIGSTOP"],
    "exception while saving": STRIKES["exception"],
    "SIGKILL while loading": STRIKES["SIGKILL"],
    "input error while loading": lambda: fail(OSError(errno.EIO, os.strerror(errno.EIO))),
    "stuck while loading": STRIKES["stuck"],
}
TWO_SAVERS = "two savers"
OTHER_VALUES = "other values on one rank"
SAVING = (
    *AT_A_FILE,
    *("SIGKILL while saving", "SIGKILL while saving"),  # in AT_A_FILE too: three times as often as others
    "another folder on one rank",
    OTHER_VALUES,
    "another model on one rank",
    TWO_SAVERS,
)
_CALLS = ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "scandir")
FILE_EVENTS = ("open", *(f"os.{name}" for name in _CALLS))


class FileEvents:
    """Strikes when this rank touches a file below a folder for the ``count``-th time."""

    def __init__(self, folder: Path, count: int, strike: Callable[[], object]) -> None:
        self._folder, self._left, self._strike = str(folder), count, strike
        self.seen, self.is_on = 0, True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or event not in FILE_EVENTS:
            return
        if any(isinstance(arg, (str, os.PathLike)) and str(arg).startswith(self._folder) for arg in args):
            self.seen += 1
            if self.seen > self._left:
                self.is_on = False
                self._strike()


def save_or_load(rank: int, case: Case, root: str, usual: Undisturbed) -> RankRecord:
    """Train, save, train, save, and perhaps load; one rank is struck in the second save, or in the load.

    ``usual``: the rank's file accesses and times without a fault.
    """
    world = LiveWorld(build_mesh(Grid.of(dp=case.dp)))
    model, both = saved_job.trained(case.strategy, world, OLD)
    store = CheckpointManager(Path(root, "store"), keep=2)
    store.save(OLD, model, both, extra={"step": OLD})
    saved_job.train(model, both, OLD, NEW)
    is_mine = case.rank == rank
    if is_mine and case.kind == "another folder on one rank":
        store = CheckpointManager(Path(root, "elsewhere"), keep=2)
    elif is_mine and case.kind == OTHER_VALUES:
        with torch.no_grad():
            model.matrices[job.WHOLE].add_(1.0)
    elif is_mine and "loading" not in case.kind and case.kind in AT_A_FILE:
        _arm(case, root, usual)
    store.save(NEW, model, both, extra={"step": NEW})
    if "loading" in case.kind or "another model" in case.kind:
        model, both = saved_job.build(case.strategy, world)
        if is_mine and "another model" in case.kind:
            model.rest.append(torch.nn.Parameter(torch.ones(2)))
        elif is_mine:
            _arm(case, root, usual)
        step = _load_wholly(store, model, both, Path(root).parent / HALF)
        return RankRecord(rank, equal=saved_job.parameters_equal(model, step))
    return RankRecord(rank)


def _load_wholly(store: CheckpointManager, model: Any, both: Any, note: Path) -> int:
    """Load the newest state; leave a note if a refusal has changed anything."""
    before = saved_job.digest(model, both)
    try:
        return int(store.load(model, both)["step"])
    except Exception:
        if saved_job.digest(model, both) != before:
            note.touch()
        raise


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The number of file events on a rank in a save and in a load, and the seconds of the save."""

    saving: int
    loading: int
    seconds: float


def count_files(rank: int, root: str) -> Undisturbed:
    """Save and load without a fault."""
    model, both = saved_job.trained("zero1 all", LiveWorld(build_mesh(Grid.of(dp=2))), OLD)
    store = CheckpointManager(Path(root, "store"), keep=2)
    events = FileEvents(Path(root), 1 << 30, lambda: None)
    begun = time.monotonic()
    store.save(OLD, model, both, extra={"step": OLD})
    seconds, saved, events.seen = time.monotonic() - begun, events.seen, 0
    store.load(model, both)
    return Undisturbed(saved, events.seen, seconds)


def _arm(case: Case, root: str, usual: Undisturbed) -> None:
    """Make the fault strike at a file event; a kill may strike at any moment of a save."""
    dice = case.random
    hit = partial(Trigger(case, case.rank or 0, Path(root).parent, AT_A_FILE).at, case.phase)
    if case.kind == "SIGKILL while saving" and dice.random() < 0.5:
        threading.Timer(dice.random() * usual.seconds, hit).start()
    else:
        count = usual.loading if "loading" in case.kind else usual.saving
        FileEvents(Path(root), dice.randrange(max(1, count)), hit)


def left_on_disk(root: Path) -> Seen:
    """Check in one process after a broken save: the newest state, and whether saving works again."""
    store = CheckpointManager(root / "store", keep=2)
    try:
        step = _load_newest(store)
    except Exception as error:
        return Seen(equal=False, message=f"nothing could be loaded: {type(error).__name__}: {error}")
    if step is None:
        return Seen(equal=False, message="what was loaded is neither the old nor the new state")
    try:
        if step != NEW:
            store.save(NEW, *saved_job.trained("", None, NEW), extra={"step": NEW})
            step = _load_newest(store)
    except Exception as error:
        return Seen(retry_refused=f"{type(error).__name__}: {error}")
    return Seen(equal=step == NEW)


def _load_newest(store: CheckpointManager) -> int | None:
    """The step of the newest checkpoint; None if its tensors are not as expected after this step."""
    model, both = saved_job.build("", None)
    model.fill(OTHER)
    step = store.load(model, both)["step"]
    return step if saved_job.holds(model, both, step) else None


def save_beside(rank: int, root: str, mine: str, other: str, steps: int) -> str:
    """One of two savers: trains, waits for the other, saves to the same folder; returns the error's text."""
    model, both = saved_job.trained("zero1 all", LiveWorld(build_mesh(Grid.of(dp=2))), steps)
    Path(root, f"{mine}-{rank}").touch()
    wait_until(Path(root, f"{other}-{rank}").exists, 30, every=0.001)
    try:
        save_checkpoint(Path(root, "both"), model, both, extra={"step": steps})
    except TutorialError as error:
        return str(error)
    return ""


def after_two_savers(folder: Path, first: str, second: str) -> Seen:
    """Check in one process after two jobs saved; ``first`` and ``second``: their errors' texts, or ""."""
    said = {OLD: first, NEW: second}
    told = " / ".join(text for text in said.values() if text)
    model, both = saved_job.build("", None)
    model.fill(OTHER)
    try:
        step = load_checkpoint(folder, model, both)["step"]
    except Exception as error:
        lost = [steps for steps, text in said.items() if not text]
        return Seen(equal=False, message=f"{told} / saved {lost}, and: {type(error).__name__}: {error}")
    whole = saved_job.holds(model, both, step)
    lost = [steps for steps, text in said.items() if not text and steps != step]
    if lost or not whole:
        what = f"told that step {lost} was saved, and it is gone" if whole else "a mixture was loaded"
        return Seen(equal=False, message=f"{what} {told}")
    return Seen(equal=True, message=told)
