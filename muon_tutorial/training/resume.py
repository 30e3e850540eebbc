"""Which run to go on with: found in run folders on disk, before any rank trains. Knows no ranks."""

from __future__ import annotations

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
"""What ``--resume`` without a folder stands for."""

MAY_CHANGE = ("dp", "tp", "strategy", "backend", "timeout", "check")
"""What may differ when a run goes on; everything else would make it another run."""

SAVE_EVERY, RUN_ID = "save_every", "torchrun_run_id"
"""What ``settings.json`` says beside the settings."""


def find_run(folder: Path) -> Path:
    """The folder of the run to go on with: the one given, or that of the newest checkpoint under runs/."""
    if folder != NEWEST:
        return folder
    pointers = sorted(RUNS.glob("*/checkpoints/latest"), key=lambda path: path.stat().st_mtime)
    if not pointers:
        raise RunFolderError(
            f"no run under {RUNS}/ has a checkpoint: give the folder, or start one with --save-every N"
        )
    return pointers[-1].parents[1]


def find_restarted(run_id: str | None) -> Path | None:
    """The newest folder under ``runs/`` of a run that torchrun started under this id."""
    found = []
    for path in RUNS.glob("*/settings.json"):
        try:
            _, said = RunFolder.reopen(path.parent)
        except RunFolderError:
            continue
        if run_id is not None and said.get(RUN_ID) == run_id:
            found.append(path.parent)
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def resumed_settings(
    said: Mapping[str, Any], options: Mapping[str, Any], given: Collection[str]
) -> TrainSettings:
    """The settings of a run that goes on: its own, but for those of ``MAY_CHANGE`` that were given anew.

    Args:
        said: the run's ``settings.json``.
        options: all settings by the command line, ``given`` those that somebody typed.

    Raises:
        UsageError: another setting was given, and differs; or the settings do not fit one another.
    """
    own = {name: said[name] for name in asdict(TrainSettings()) if name in said}
    for name, value in own.items():
        usual = type(getattr(TrainSettings(), name))
        if type(value) not in {float: (int, float), type(None): (str, usual)}.get(usual, (usual,)):
            raise _damaged(name, value)
    for name in given:
        if name in own and name not in MAY_CHANGE and _differs(name, options[name], own[name]):
            raise UsageError(
                f"--{name} {options[name]} is not the run's {own[name]}: a run goes on with its own settings "
                f"(but for {', '.join(MAY_CHANGE)}); leave it out, or start another run"
            )
    return TrainSettings(**{**own, **{name: options[name] for name in given if name in MAY_CHANGE}})


def _differs(name: str, given: Any, own: Any) -> bool:
    if name == "text" and own is not None:
        return os.path.abspath(given) != os.path.abspath(own)
    return bool(given != own)


def saving_of(
    folder: RunFolder, said: Mapping[str, Any], every: int | None, say: Callable[[str], None]
) -> Saving:
    """How a run that goes on saves, and from where it begins: its newest checkpoint that is whole, if any.

    ``say`` is told of damaged ones, which are put aside.
    """
    own = said.get(SAVE_EVERY)
    if own is not None and (not isinstance(own, int) or isinstance(own, bool) or own < 1):
        raise _damaged(SAVE_EVERY, own)
    saving = Saving(folder.path, every or own, run=said.get(RUN))
    return replace(saving, begin=saving.whole_step(say))


def _damaged(name: str, value: object) -> UsageError:
    return UsageError(f"the run's settings.json is damaged: {name} is {value!r:.40}")
