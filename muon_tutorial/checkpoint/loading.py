"""``load_checkpoint``: reads a folder into a model and its optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..optimizer.muon_with_adamw import MuonWithAdamW
from .compare_ranks import together
from .rank_contents import (
    RankContents,
    Rename,
    Saveable,
    SteppedParameter,
    as_before,
    contents_of_rank,
    parts_of,
)
from .saving import FORMAT, model_entries, state_entries

if TYPE_CHECKING:
    from .pieces_on_disk import TensorInPieces


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Saveable, *, rename: Rename | None = None
) -> dict[str, Any]:
    """Load what ``save_checkpoint`` saved, under any strategy and on any grid; returns its ``extra``.

    Must be called by all ranks of the default process group; also without one, in a single process. The
    model's parameters are overwritten in place, the optimizer's state and hyperparameters replaced. What does
    not fit is found before anything is changed; a file that cannot be read may leave the model half loaded.

    Args:
        rename: from the model's name of a parameter to the one it was saved under.

    Raises:
        CheckpointError: there is no such checkpoint; it lacks an entry, or has a parameter that no rank's
            model has; or a shape, dtype or optimizer differs. Raised on all ranks, with the name.
    """
    from .pieces_on_disk import read

    def prepare() -> tuple[tuple[SavedEntries, LoadTargets], set[str]]:
        saved = _open(Path(path))
        contents = contents_of_rank(model, optimizer, rename)
        names = {*contents.tensors, *(item.name for item in contents.stepped)}
        return (saved, _targets(saved, contents)), names

    (saved, targets), names = together(prepare)
    _check_nothing_is_left(saved, names)
    read(saved.folder, dict(targets.entries))
    states = {str(kind): _state_dict(part, targets) for kind, part in parts_of(optimizer).items()}
    optimizer.load_state_dict(states if isinstance(optimizer, MuonWithAdamW) else states.popitem()[1])
    return saved.extra


@dataclass(frozen=True, slots=True, eq=False)
class SavedEntries:
    """What a checkpoint holds, without its tensors' data."""

    folder: Path
    entries: Mapping[str, Any]
    groups: Mapping[str, dict[str, Any]]
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class LoadTargets:
    """What a load fills on this rank: entries, among them each parameter's state, and hyperparameters."""

    entries: dict[str, TensorInPieces]
    states: dict[Tensor, dict[str, Tensor]]
    hyperparameters: dict[Tensor, dict[str, Any]]


def _open(folder: Path) -> SavedEntries:
    from .pieces_on_disk import read, read_metadata

    entries = read_metadata(folder).state_dict_metadata
    objects: dict[str, Any] = {"format": None, "groups": None, "extra": None}
    if not objects.keys() <= entries.keys():
        raise CheckpointError(f"{folder} was not written by save_checkpoint: it has no entry 'format'")
    read(folder, objects, alone=True)
    if objects["format"] != FORMAT:
        raise CheckpointError(f"{folder} has the format {objects['format']}; this version reads {FORMAT}")
    return SavedEntries(folder, entries, objects["groups"], objects["extra"])


def _targets(saved: SavedEntries, contents: RankContents) -> LoadTargets:
    """Everything to be filled, checked."""
    entries = model_entries(contents)
    for key, entry in entries.items():
        dtype = _saved_dtype(saved, key, entry.shape)
        if dtype != entry.dtype:
            raise CheckpointError(f"{key} was saved as {dtype} and is {entry.dtype} here")
    states = {item.param: _blank_state(saved, item) for item in contents.stepped}
    for item in contents.stepped:
        entries |= state_entries(item, states[item.param])
    _check_groups(saved, contents.stepped)
    groups = {item.param: saved.groups[item.name]["group"] for item in contents.stepped}
    return LoadTargets(entries, states, groups)


def _saved_dtype(saved: SavedEntries, key: str, shape: Iterable[int]) -> torch.dtype:
    """The dtype of a saved tensor, whose shape must fit."""
    found = saved.entries.get(key)
    if found is None:
        raise CheckpointError(f"{saved.folder} has no entry {key}")
    if tuple(found.size) != tuple(shape):
        raise CheckpointError(f"{key} was saved with shape {tuple(found.size)} and has {tuple(shape)} here")
    return found.properties.dtype


def _blank_state(saved: SavedEntries, item: SteppedParameter) -> dict[str, Tensor]:
    """Tensors for the saved state to be read into: of its own dtype, cut as this rank keeps them."""
    record = saved.groups.get(item.name)
    if record is None:
        raise CheckpointError(f"{saved.folder} has no state of {item.name}: no optimizer stepped it")
    if record["optimizer"] != item.kind:
        raise CheckpointError(
            f"{item.name} was stepped by {record['optimizer']} when it was saved, by {item.kind} here"
        )
    return {
        entry: item.blank(entry, _saved_dtype(saved, item.key(entry), item.boxes_of(entry).shape))
        for entry in record["state"]
    }


def _check_groups(saved: SavedEntries, stepped: Sequence[SteppedParameter]) -> None:
    """Refuse to put parameters into one group that were saved with different hyperparameters."""
    first: dict[int, str] = {}
    for item in stepped:
        other = first.setdefault(id(item.group), item.name)
        ours, its = (saved.groups[name]["group"] for name in (item.name, other))
        wrong = [key for key in {*ours, *its} if ours.get(key) != its.get(key)]
        if wrong:
            raise CheckpointError(
                f"{other} and {item.name} share a group here, and were saved with {wrong[0]} "
                f"{its.get(wrong[0])!r} and {ours.get(wrong[0])!r}"
            )


def _check_nothing_is_left(saved: SavedEntries, names: Sequence[set[str]]) -> None:
    """Refuse a checkpoint with a parameter that no rank's model has."""
    models = [key.removeprefix("model.") for key in saved.entries if key.startswith("model.")]
    left = sorted({*models, *saved.groups} - set().union(*names))
    if left:
        raise CheckpointError(f"{saved.folder} holds {left[0]}, which no rank's model has")


def _state_dict(optimizer: torch.optim.Optimizer, targets: LoadTargets) -> dict[str, Any]:
    """What was loaded for one optimizer, as its ``load_state_dict`` takes it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    index = {param: place for place, param in enumerate(params)}
    groups = []
    for group in optimizer.param_groups:
        saved = targets.hyperparameters[group["params"][0]] if group["params"] else {}
        loaded = {key: as_before(value, group.get(key)) for key, value in saved.items()}
        groups.append({**group, **loaded, "params": [index[param] for param in group["params"]]})
    states = {index[param]: state for param, state in targets.states.items() if param in index and state}
    return {"state": states, "param_groups": groups}
