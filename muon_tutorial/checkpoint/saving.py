"""From a model and its optimizer to a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError
from ..step.parameter_state import local_part
from .agreement import Summary, check_alike, outline, together
from .inventory import Inventory, Place, Rename, Saveable, take_inventory

if TYPE_CHECKING:
    from .boxed import Boxed

FORMAT = {"name": "muon_tutorial", "version": 1}


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Saveable,
    *,
    extra: Mapping[str, Any] | None = None,
    rename: Rename | None = None,
) -> None:
    """Save a model and its optimizer into a fresh folder, each rank its own part, replicas once.

    Must be called by all ranks of the default process group, with the same path; also without one, in a
    single process. What several ranks hold is compared before anything is written; buffers excepted, which
    data-parallel ranks may hold differently (BatchNorm's): one rank's are saved.

    Args:
        extra: saved from rank 0, given back by ``load_checkpoint``: anything ``torch.save`` takes.
        rename: from the model's name of a parameter to the one it is saved under. Ranks whose parameters
            have equal names but are not the same (experts, pipeline stages) need it.

    Raises:
        CheckpointError: the folder is not fresh or cannot be written, or ranks hold different values of what
            should be the same. Raised on all ranks.
    """
    from .boxed import write

    folder = Path(path)

    def prepare() -> tuple[dict[str, Any], Summary]:
        _check_fresh(folder)
        inventory = take_inventory(model, optimizer, rename)
        entries = model_entries(inventory) | _optimizer_entries(inventory)
        return dict(entries), _summary(folder, inventory, entries)

    entries, summaries = together(prepare)
    check_alike(summaries)
    entries["groups"] = {name: record for summary in summaries for name, record in summary.groups.items()}
    entries["format"] = FORMAT
    if _is_first():
        entries["extra"] = dict(extra or {})
    write(folder, entries)


def boxed(tensor: Tensor, place: Place) -> Boxed:
    """What this rank holds of a tensor, as a checkpoint meets it; shares its storage."""
    from .boxed import Boxed

    local = local_part(tensor)
    return Boxed(place.shape, place.pieces(local), local.dtype, local.device)


def model_entries(inventory: Inventory) -> dict[str, Boxed]:
    """The model's parameters and buffers by their names in a checkpoint."""
    return {f"model.{name}": boxed(tensor, place) for name, (tensor, place) in inventory.tensors.items()}


def _optimizer_entries(inventory: Inventory) -> dict[str, Boxed]:
    return {
        member.key(entry): boxed(tensor, member.place(entry))
        for member in inventory.members
        for entry, tensor in member.tensors.items()
    }


def _summary(folder: Path, inventory: Inventory, entries: Mapping[str, Boxed]) -> Summary:
    groups = {member.name: member.record for member in inventory.members}
    compared = (key for key in entries if key.removeprefix("model.") not in inventory.buffers)
    outlines = {key: outline(entries[key], entries[key].pieces) for key in compared}
    return Summary(str(folder.absolute()), groups, outlines)


def _check_fresh(folder: Path) -> None:
    """Refuse a folder that holds anything. Rank 0 looks for all, before anybody writes."""
    if _is_first() and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder: a checkpoint goes into a fresh one")


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
