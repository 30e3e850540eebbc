"""Finds the run to resume in the run folders on disk, before any rank trains. Knows nothing about ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import RunFolderError, UsageError
from .checkpoints import RUN, Saving
from .run_folder import RunFolder
from .settings import TrainSettings

RUNS = Path("runs")
NEWEST = Path()
"""The value of ``--resume`` without a folder."""

MAY_CHANGE = ("dp", "tp", "strategy", "backend", "timeout", "check")
"""Settings that may change when a run resumes; any other change would make it another run."""

SAVE_EVERY, JOB = "save_every", "torchrun_job"
"""Keys that ``settings.json`` has besides the settings."""


def find_run(folder: Path) -> Path:
    """The folder of the run to resume: ``folder``, or the run under ``runs/`` with the newest checkpoint."""
    if folder != NEWEST:
        return folder
    pointers = sorted(RUNS.glob("*/checkpoints/latest"), key=lambda path: path.stat().st_mtime)
    if not pointers:
        raise RunFolderError(
            f"no run under {RUNS}/ has a checkpoint: give the folder, or start one with --save-every N"
        )
    return pointers[-1].parents[1]


def find_restarted(is_ours: Callable[[object], bool]) -> Path | None:
    """The newest folder under ``runs/`` whose ``settings.json`` names the torchrun job of these ranks."""
    found = []
    for path in RUNS.glob("*/settings.json"):
        with contextlib.suppress(RunFolderError):
            if is_ours(RunFolder.reopen(path.parent)[1].get(JOB)):
                found.append(path.parent)
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def resumed_settings(
    said: Mapping[str, Any], options: Mapping[str, Any], given: Collection[str]
) -> TrainSettings:
    """The settings of a resumed run: the run's own, except that those in ``MAY_CHANGE`` may be given anew.

    Args:
        said: the run's ``settings.json``.
        options: all settings as the command line gives them, defaults included.
        given: the names of the settings that the user typed.

    Raises:
        UsageError: another setting was given and differs, or the settings do not fit each other.
    """
    own = {name: said[name] for name in asdict(TrainSettings()) if name in said}
    for name, value in own.items():
        usual = type(getattr(TrainSettings(), name))
        if type(value) not in {float: (int, float), type(None): (str, usual)}.get(usual, (usual,)):
            raise _damaged(name, value)
    for name in given:
        if name in own and name not in MAY_CHANGE and _differs(name, options[name], own[name]):
            raise UsageError(
                f"--{name} {options[name]} differs from the run's {own[name]}: a resumed run keeps its "
                f"settings (except {', '.join(MAY_CHANGE)}); leave it out, or start another run"
            )
    return TrainSettings(**{**own, **{name: options[name] for name in given if name in MAY_CHANGE}})


def _differs(name: str, given: Any, own: Any) -> bool:
    if name == "text" and own is not None:
        return os.path.abspath(given) != os.path.abspath(own)
    return bool(given != own)


def saving_of(
    folder: RunFolder, said: Mapping[str, Any], every: int | None, say: Callable[[str], None]
) -> Saving:
    """How a resumed run saves, and where it begins: at its newest undamaged checkpoint, if there is one.

    Damaged checkpoints are renamed, and ``say`` gets a line about each.
    """
    own = said.get(SAVE_EVERY)
    if own is not None and (not isinstance(own, int) or isinstance(own, bool) or own < 1):
        raise _damaged(SAVE_EVERY, own)
    saving = Saving(folder.path, every or own, run=said.get(RUN))
    return replace(saving, begin=saving.whole_step(say))


def _damaged(name: str, value: object) -> UsageError:
    return UsageError(f"the run's settings.json is damaged: {name} is {value!r:.40}")
