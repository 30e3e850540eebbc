"""``orthogonalize="auto"``: the fastest recipe for each shape on this machine, the same on every rank.

One rank measures, or reads earlier measurements, and tells the others, because results must not depend on
which rank orthogonalizes a matrix. The choices are stored in the parameter groups, so ranks compare them at
every step, and checkpoints save them: a run that resumes on another machine keeps its recipes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..callbacks.callback_step import CallbackStep
from ..errors import TutorialError, UsageError
from ..guard.current_steps import Groups, MeshStep
from ..orthogonalizers.calibration import Calibration, read_calibration
from ..orthogonalizers.named import STOCK
from ..orthogonalizers.orthogonalize_option import Shape, is_auto, read_choices, shape_of, write_choices
from ..step.parameter_state import group_parts
from ..step.single_process import AloneStep, matrices_in
from ..worlds.live import LiveWorld, count_processes, gather_objects
from ..worlds.processor import describe_processor

Source = Calibration | str | Path | None
"""A calibration, or a folder with one calibration per machine; None means ``default_folder()``."""


TIMINGS = 3
"""Increase this when recipes become faster or slower: stored measurements are then repeated."""


def choose_recipes(groups: Groups, steps: Sequence[MeshStep], source: Source) -> None:
    """Choose a recipe for each shape that has none yet, and write it into each group with ``"auto"``.

    All ranks that step together must call this. The first rank of each mesh chooses.

    Raises:
        UsageError: a given calibration lacks a shape, or ranks need to agree and cannot.
    """
    for mesh in steps:
        together = _stepping_together(mesh, source)
        known = [read_choices(group["orthogonalize"]) if _chooses(group) else None for group in groups]
        pairs = ((known[number], shape) for number, shape in _shapes(groups, mesh))
        missing = tuple({shape: None for its, shape in pairs if its is not None and shape not in its})
        if missing:
            device = next(param.device for group in groups for param in group["params"])
            choices = _agreed_choices(*together, missing, source, device)
            for group in filter(_chooses, groups):
                group["orthogonalize"] = write_choices({**choices, **read_choices(group["orthogonalize"])})


def choose(shapes: Iterable[Shape], source: Source, device: torch.device) -> dict[Shape, str]:
    """Return the fastest recipe for each shape, on this process's machine."""
    shapes = tuple(shapes)
    timed = tuple(shape for shape in shapes if all(shape) and device.type != "meta")
    found = source if isinstance(source, Calibration) else kept_calibration(source, device, timed)
    choices = dict.fromkeys(shapes, STOCK)  # the recipe of empty shapes and of the meta device
    for shape in timed:
        times = found.find(*shape)
        if times is None:
            raise UsageError(f"the calibration of {found.machine!r} holds nothing for matrices of {shape}")
        choices[shape] = times.fastest
    return choices


def default_folder() -> Path:
    """The folder that keeps calibrations unless another is given."""
    return Path(os.path.expanduser("~")) / ".cache" / "muon_tutorial"


@cache
def kept_calibration(
    folder: str | Path | None, device: torch.device, shapes: tuple[Shape, ...], again: bool = False
) -> Calibration:
    """Read this machine's calibration from a folder, measure the shapes that it lacks, and save it.

    With ``again`` all shapes are measured. The result is cached for the rest of the process.
    """
    machine = f"{describe_processor(device)}, timings {TIMINGS}"
    path = calibration_path(folder, machine)
    before = Calibration(machine) if again else _read(path, machine)
    found = before.measured(shapes, device)
    if found != before:
        _keep(path, found)
    return found


def calibration_path(folder: str | Path | None, machine: str) -> Path:
    name = hashlib.sha256(machine.encode()).hexdigest()[:12]
    return Path(folder or default_folder()) / f"orthogonalize-{name}.json"


def _read(path: Path, machine: str) -> Calibration:
    found = None
    try:
        found = read_calibration(path) if os.path.exists(path) else None  # exists() is False without access
    except UsageError as error:
        warnings.warn(f"{error}; measuring again", stacklevel=2)
    return found if found is not None and found.machine == machine else Calibration(machine)


def _keep(path: Path, calibration: Calibration) -> None:
    """Write the file atomically, so that no other process reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(calibration.text())
        os.replace(name, path)
    except OSError as error:
        warnings.warn(
            f"the calibration is not kept, and will be measured again: {path}: {error.strerror}", stacklevel=2
        )


def _chooses(group: Mapping[str, Any]) -> bool:
    return is_auto(group.get("orthogonalize"))


def _shapes(groups: Groups, mesh: MeshStep) -> Iterator[tuple[int, Shape]]:
    """Yield each matrix's group number and whole shape."""
    if mesh.plan is not None:
        for bucket in mesh.plan.buckets:
            for entry in bucket.entries:
                yield entry.matrix.group, shape_of(*entry.matrix.sides)
        return
    for number, group in enumerate(groups):
        for param in group["params"] if _chooses(group) else ():
            for _, sides in matrices_in(tuple(param.shape), *group_parts(group)):
                yield number, shape_of(*sides)


def _agreed_choices(
    ranks: int,
    group: dist.ProcessGroup | None,
    shapes: tuple[Shape, ...],
    source: Source,
    device: torch.device,
) -> dict[Shape, str]:
    """Return the first rank's choices on all ranks of the group."""
    if ranks == 1:
        return choose(shapes, source, device)
    mine: dict[Shape, str] | TutorialError | None = None
    if dist.get_rank(group) == 0:
        try:
            mine = choose(shapes, source, device)
        except Exception as error:  # the other ranks wait for an answer, so they get the error
            said = f'orthogonalize="auto" could not choose: {type(error).__name__}: {error}'
            mine = error if isinstance(error, TutorialError) else UsageError(said)
    found = gather_objects(mine, group)[0]
    if isinstance(found, TutorialError):
        raise found
    return dict(found)


def _stepping_together(mesh: MeshStep, source: Source) -> tuple[int, dist.ProcessGroup | None]:
    """Return how many processes share the step, and the process group that they form.

    Raises:
        UsageError: it is unknown which processes must agree, because each of several processes steps alone
            (as under DDP), or the mesh has only some of them.
    """
    count, ranks, group = count_processes(), 1, None
    if isinstance(mesh.world, LiveWorld):
        axes = mesh.world.grid.axes
        ranks, group = mesh.world.grid.world_size, mesh.world.group(axes) if axes else None
    elif isinstance(mesh.step, CallbackStep):
        ranks, group = count, mesh.step.config.state.get("agree_group")
    if ranks != count and not isinstance(source, Calibration):
        alone = isinstance(mesh.step, AloneStep)
        which = "without a strategy" if alone else f"on a mesh of {ranks} of {count} processes"
        raise UsageError(
            f'orthogonalize="auto" {which} could choose different recipes on different processes: pass a '
            "strategy with a mesh of all processes, or the same calibration= object to all, or a recipe's "
            "name"
        )
    return ranks, group
