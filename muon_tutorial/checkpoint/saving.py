"""``save_checkpoint``: writes a model and its optimizer into a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError
from ..step.parameter_state import local_part
from .compare_ranks import SaveSummary, check_alike, outline, together
from .rank_contents import HeldBoxes, RankContents, Rename, Saveable, SteppedParameter, contents_of_rank

if TYPE_CHECKING:
    from .pieces_on_disk import TensorInPieces

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
    from .pieces_on_disk import write

    folder = Path(path)

    def prepare() -> tuple[dict[str, Any], SaveSummary]:
        _check_fresh(folder)
        contents = contents_of_rank(model, optimizer, rename)
        entries = model_entries(contents)
        for item in contents.stepped:
            entries |= state_entries(item, item.tensors)
        return dict(entries), _summary(folder, contents, entries)

    entries, summaries = together(prepare)
    check_alike(summaries)
    entries["groups"] = {name: record for summary in summaries for name, record in summary.groups.items()}
    entries["format"] = FORMAT
    if _is_first():
        entries["extra"] = dict(extra or {})
    write(folder, entries)


def in_pieces(tensor: Tensor, place: HeldBoxes) -> TensorInPieces:
    """What this rank holds of a tensor, as a checkpoint meets it; shares its storage."""
    from .pieces_on_disk import TensorInPieces

    local = local_part(tensor)
    return TensorInPieces(place.shape, place.pieces(local), local.dtype, local.device)


def model_entries(contents: RankContents) -> dict[str, TensorInPieces]:
    """The model's parameters and buffers by their names in a checkpoint."""
    return {f"model.{name}": in_pieces(tensor, place) for name, (tensor, place) in contents.tensors.items()}


def state_entries(item: SteppedParameter, state: Mapping[str, Tensor]) -> dict[str, TensorInPieces]:
    """One parameter's optimizer state by its names in a checkpoint."""
    return {item.key(entry): in_pieces(tensor, item.boxes_of(entry)) for entry, tensor in state.items()}


def _summary(folder: Path, contents: RankContents, entries: Mapping[str, TensorInPieces]) -> SaveSummary:
    groups = {item.name: item.record for item in contents.stepped}
    compared = (key for key in entries if key.removeprefix("model.") not in contents.buffers)
    return SaveSummary(str(folder.absolute()), groups, {key: outline(entries[key]) for key in compared})


def _check_fresh(folder: Path) -> None:
    """Refuse a folder that holds anything. Rank 0 looks for all, before anybody writes."""
    if _is_first() and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder: a checkpoint goes into a fresh one")


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
