"""``load_checkpoint``: reads a folder into a model and its optimizer, either completely or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..optimizer.muon import Muon
from ..optimizer.muon_with_adamw import MuonWithAdamW
from .folders import opened
from .meeting_over_store import Meeting, call_meeting, one_line
from .piece_files import read_pieces, read_plain
from .rank_contents import (
    RankContents,
    Rename,
    Saveable,
    SteppedParameter,
    TensorInPieces,
    as_before,
    contents_of_rank,
    in_pieces,
    parts_of,
)
from .saving import EXTRA
from .verify_files import OpenCheckpoint, open_checkpoint, verify_hashes


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Saveable, *, rename: Rename | None = None
) -> dict[str, Any]:
    """Load what ``save_checkpoint`` saved, under any strategy and on any grid; returns its ``extra``.

    Must be called by all ranks of the default process group, or in a single process without a group. Nothing
    changes on any rank until every rank has read and checked everything. Then the model's parameters are
    overwritten in place, and the optimizer's state and hyperparameters are replaced. Files may come from an
    untrusted source: nothing in them is executed.

    Args:
        rename: a function from the model's name of a parameter to the name under which it was saved.

    Raises:
        CheckpointError: there is no such checkpoint; a file is damaged, missing or not part of it; the
            checkpoint lacks an entry, or has a parameter that no rank's model has; or a shape, dtype or
            optimizer differs. Raised on all ranks, with the cause; no rank has changed anything.
    """
    return load_found(lambda: [Path(path)], model, optimizer, rename)[1]


def load_found(
    find: Callable[[], list[Path]], model: nn.Module, optimizer: Saveable, rename: Rename | None
) -> tuple[Path, dict[str, Any]]:
    """Call ``find`` on rank 0; load the first undamaged folder that it returns. Return it and ``extra``."""
    meeting = call_meeting("load_checkpoint")
    _, paths = meeting.agree(
        "find the checkpoint",
        lambda: (None, list(map(str, find())) if meeting.rank == 0 else []),
        lambda found: [found[0]] * len(found),
    )
    with ExitStack() as held:
        saved = _open_whole(meeting, [*map(Path, paths)], held)
        path, states = saved.folder.path, saved.manifest.groups

        def check() -> tuple[LoadTargets, tuple[set[str], set[str]]]:
            contents = contents_of_rank(model, optimizer, rename)
            stepped = {item.name for item in contents.stepped}
            return _targets(saved, contents), (set(contents.tensors), stepped)

        def compare(found: list[tuple[set[str], set[str]]]) -> list[list[str]]:
            """The names of parameters whose state no rank loads, although some rank's optimizer could."""
            keys, stepped = (set[str]().union(*each) for each in zip(*found, strict=True))
            keys |= {f"model.{name}" for name in stepped}
            held_here = {key for key in saved.manifest.tensors if key.startswith("model.")}
            unknown = sorted((held_here | {f"model.{name}" for name in states}) - keys)
            if unknown:
                name = unknown[0].removeprefix("model.")
                raise CheckpointError(f"{path} holds {name}, which no rank's model has")
            kinds = {states[name]["optimizer"] for name in stepped}
            left = [name for name, it in states.items() if it["optimizer"] in kinds and name not in stepped]
            return [sorted(left)] * len(found)

        targets, left = meeting.agree("check the checkpoint", check, compare)
        if left and meeting.rank == 0:
            warnings.warn(
                f"{path} holds optimizer state of {left[0]}"
                f"{f' and {len(left) - 1} others' if left[1:] else ''}, which this optimizer does not step; "
                "this state is not loaded",
                stacklevel=3,
            )
        extra = meeting.agree_that("read its part", lambda: _read(saved, targets))
    _take_over(meeting, optimizer, targets)
    return path, extra


def _open_whole(meeting: Meeting, paths: Sequence[Path], held: ExitStack) -> OpenCheckpoint:
    """Open the first checkpoint in which no rank finds damage; ``held`` closes it.

    Raises:
        CheckpointError: all are damaged, or ranks see different checkpoints at one path.
    """

    def look(path: Path) -> tuple[OpenCheckpoint | None, tuple[str, str]]:
        """Return the checkpoint, with its digest and a line about damage, which is empty if there is none."""
        try:
            saved = open_checkpoint(held.enter_context(opened(path)))
            verify_hashes(saved, meeting.rank, meeting.size)
        except (CheckpointError, OSError) as error:
            if path == paths[-1]:
                raise
            return None, ("", one_line(error))
        return saved, (saved.digest, "")

    def compare(path: Path, found: list[tuple[str, str]]) -> list[str]:
        damage = next((line for _, line in found if line), "")
        for rank, (digest, _) in enumerate(found):
            if not damage and digest != found[0][0]:
                raise CheckpointError(
                    f"{path} is not the same checkpoint on rank {rank} as on rank 0: it was just "
                    "replaced (load again), or the ranks share no file system"
                )
        return [damage] * len(found)

    for path in paths:
        saved, damage = meeting.agree(f"look at {path.name}", partial(look, path), partial(compare, path))
        if not damage:
            break
        if meeting.rank == 0:
            warnings.warn(f"{damage}; trying an older checkpoint", stacklevel=4)
    assert saved is not None
    return saved


@dataclass(frozen=True, slots=True, eq=False)
class LoadTargets:
    """The tensors and hyperparameters that a load sets on this rank.

    ``model``: the model's own tensors. ``blanks``: new tensors, into which everything is read first.
    ``states``: the optimizer's new state. ``hyperparameters``: those that were saved with each parameter.
    """

    model: dict[str, TensorInPieces]
    blanks: dict[str, TensorInPieces]
    states: dict[Tensor, dict[str, Tensor]]
    hyperparameters: dict[Tensor, dict[str, Any]]


def _targets(saved: OpenCheckpoint, contents: RankContents) -> LoadTargets:
    """Check that the checkpoint fits, and make the tensors to read it into."""
    for key, entry in contents.tensors.items():
        dtype = _saved_dtype(saved, key, entry.shape)
        if dtype != entry.dtype:
            raise CheckpointError(f"{key} was saved as {dtype} and is {entry.dtype} here")
        strides = [zip(it.stride(), it.shape, strict=True) for it in entry.pieces.values()]
        if any(stride == 0 and size > 1 for its in strides for stride, size in its):
            raise CheckpointError(
                f"several elements of {key} share memory (expand()), so nothing can be loaded into it"
            )
    blanks: dict[str, TensorInPieces] = {}
    for key, entry in contents.tensors.items():
        pieces = {offset: torch.zeros_like(piece, device="cpu") for offset, piece in entry.pieces.items()}
        blanks[key] = TensorInPieces(entry.shape, entry.dtype, pieces)
    states = {item.param: _blank_state(saved, item) for item in contents.stepped}
    for item in contents.stepped:
        for name, tensor in states[item.param].items():
            blanks[item.key(name)] = in_pieces(tensor, item.boxes_of(name))
    _check_groups(saved, contents.stepped)
    groups = {item.param: saved.manifest.groups[item.name]["group"] for item in contents.stepped}
    return LoadTargets(contents.tensors, blanks, states, groups)


def _saved_dtype(saved: OpenCheckpoint, key: str, shape: Iterable[int]) -> torch.dtype:
    """Check the shape of a saved tensor, and return its dtype."""
    found = saved.manifest.tensors.get(key)
    if found is None:
        raise CheckpointError(f"{saved.folder.path} has no entry {key}")
    if found.shape != tuple(shape):
        raise CheckpointError(f"{key} was saved with shape {found.shape} and has {tuple(shape)} here")
    return found.dtype


def _blank_state(saved: OpenCheckpoint, item: SteppedParameter) -> dict[str, Tensor]:
    """New tensors to read the saved state into; each has the saved dtype, and this rank's shape."""
    record = saved.manifest.groups.get(item.name)
    if record is None:
        raise CheckpointError(f"{saved.folder.path} has no state of {item.name}: no optimizer stepped it")
    if record["optimizer"] != item.kind:
        raise CheckpointError(
            f"{item.name} was stepped by {record['optimizer']} when it was saved, by {item.kind} here"
        )
    return {
        entry: item.blank(entry, _saved_dtype(saved, item.key(entry), item.boxes_of(entry).shape))
        for entry in record["state"]
    }


def _check_groups(saved: OpenCheckpoint, stepped: Sequence[SteppedParameter]) -> None:
    """Refuse a group whose parameters were saved with different hyperparameters."""
    first: dict[int, str] = {}
    for item in stepped:
        other = first.setdefault(id(item.group), item.name)
        ours, its = (saved.manifest.groups[name]["group"] for name in (item.name, other))
        wrong = [key for key in {*ours, *its} if ours.get(key) != its.get(key)]
        if wrong:
            raise CheckpointError(
                f"{other} and {item.name} are in one parameter group here, but were saved with different "
                f"{wrong[0]}: {its.get(wrong[0])!r} and {ours.get(wrong[0])!r}"
            )


def _read(saved: OpenCheckpoint, targets: LoadTargets) -> dict[str, Any]:
    read_pieces(saved.folder, saved.manifest, targets.blanks)
    extra = read_plain(saved.folder, EXTRA)
    if type(extra) is not dict:
        raise CheckpointError(f"{saved.folder.path / EXTRA} holds a {type(extra).__name__}, not a dict")
    return extra


def _take_over(meeting: Meeting, optimizer: Saveable, targets: LoadTargets) -> None:
    """Set the loaded values and state on all ranks, or on none if some rank's optimizer refuses its state.

    If an interrupt or an error stops the load halfway, the optimizer refuses to step until a load succeeds.
    """
    parts = parts_of(optimizer)
    states = {str(kind): _state_dict(part, targets) for kind, part in parts.items()}
    whole = states if isinstance(optimizer, MuonWithAdamW) else next(iter(states.values()))
    stepping = {id(each): each for each in (optimizer, *parts.values())}.values()
    before = [(each, dict(vars(each))) for each in stepping]
    for each in stepping:
        each.register_step_pre_hook(_refuse_to_step)
    try:
        meeting.agree_that("load the optimizer's state", lambda: optimizer.load_state_dict(whole))
    except Exception:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)
            if isinstance(each, Muon):  # all ranks make new steps, also those that had not loaded
                each.restore(each.state, each.param_groups)
                halfway = each.guard.is_halfway
                each.guard.was_loaded()
                each.guard.is_halfway = halfway
        _let_step(stepping)
        raise
    for key, entry in targets.model.items():
        for offset, piece in entry.pieces.items():
            piece.copy_(targets.blanks[key].pieces[offset])
    _let_step(stepping)


def _refuse_to_step(*_: object) -> NoReturn:
    raise CheckpointError("a load was interrupted halfway: load again before stepping")


def _let_step(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for hooks in (each._optimizer_step_pre_hooks for each in optimizers):
        for number in [number for number, hook in hooks.items() if hook is _refuse_to_step]:
            del hooks[number]


def _state_dict(optimizer: torch.optim.Optimizer, targets: LoadTargets) -> dict[str, Any]:
    """The loaded state of one optimizer, in the form that its ``load_state_dict`` takes."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    index = {param: place for place, param in enumerate(params)}
    groups = []
    for group in optimizer.param_groups:
        saved = targets.hyperparameters[group["params"][0]] if group["params"] else {}
        loaded = {key: as_before(value, group.get(key)) for key, value in saved.items()}
        groups.append({**group, **loaded, "params": [index[param] for param in group["params"]]})
    states = {index[param]: state for param, state in targets.states.items() if param in index and state}
    return {"state": states, "param_groups": groups}
