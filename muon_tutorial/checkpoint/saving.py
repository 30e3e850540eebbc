"""``save_checkpoint``: writes a model and its optimizer into a folder, completely or not at all."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError
from ..optimizer.muon import Muon
from . import folders, manifest
from .compare_ranks import SaveSummary, TensorOutline, check_alike, outline
from .folders import Existing
from .meeting_over_store import Meeting, call_meeting, one_line
from .piece_files import Place, Written, divide, metadata_for_other_tools, saved_tensors, write_pieces
from .plain_data import checksum, dump_plain
from .rank_contents import Rename, Saveable, TensorInPieces, contents_of_rank, in_pieces, parts_of

EXTRA = "extra.pt"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Saveable,
    *,
    extra: Mapping[str, Any] | None = None,
    rename: Rename | None = None,
    existing: Existing = "refuse",
) -> None:
    """Save a model and its optimizer into a folder; each rank writes its part, and replicas are written once.

    Must be called by all ranks of the default process group with the same path on a shared file system, or in
    a single process without a group. Values that several ranks hold are compared before anything is written.
    Buffers are the exception: they may differ on data-parallel ranks (BatchNorm), and one rank's buffers are
    saved.

    The folder is written as a draft and moved into place when it is complete. So the path always holds the
    new checkpoint or the previous content, even after a kill, and you can save again.

    Args:
        extra: more values to save, such as a step or a scheduler's ``state_dict()``: numbers, text, tensors,
            and dicts, lists and tuples of these. Only rank 0's are saved, and a load returns them on every
            rank; a warning says if another rank passed others.
        rename: a function from the model's name of a parameter to the name under which it is saved. Needed if
            ranks have different parameters with equal names (experts, pipeline stages).
        existing: what to do with a folder that is not empty: ``"refuse"`` it, or ``"replace"`` a checkpoint.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, another process is saving to it, ranks
            hold different values of something that should be the same, a step was interrupted halfway on a
            rank, or a rank did not do its part within the timeout of the default process group.
            Raised on all ranks.
    """
    target = folders.target_of(path)
    meeting = call_meeting("save_checkpoint")
    save_together(meeting, target, existing, lambda: contents_to_save(model, optimizer, extra, rename))


@dataclass(frozen=True, slots=True, eq=False)
class ContentsToSave:
    """What this rank has to save: its pieces of tensors, parameters' records, and on rank 0 ``extra``."""

    tensors: dict[str, TensorInPieces]
    buffers: set[str]
    groups: dict[str, dict[str, Any]]
    extra: bytes
    checksum: int


def contents_to_save(
    model: nn.Module, optimizer: Saveable, extra: Mapping[str, Any] | None, rename: Rename | None
) -> ContentsToSave:
    """Find out what this rank has to save; the tensors are the model's own, not copies."""
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"extra must be a dict of values to save with the model, not {extra!r}")
    muon = parts_of(optimizer).get("muon")
    if isinstance(muon, Muon) and muon.guard.is_halfway:
        raise CheckpointError(
            "step() was interrupted halfway, so only some parameters have been stepped: load the last "
            "checkpoint, or save after a whole step"
        )
    contents = contents_of_rank(model, optimizer, rename)
    _warn_of_extra_state(model)
    if muon is not None:
        _warn_of_unstepped(model, {item.param for item in contents.stepped})
    tensors = dict(contents.tensors)
    for item in contents.stepped:
        for entry, tensor in item.tensors.items():
            tensors[item.key(entry)] = in_pieces(tensor, item.boxes_of(entry))
    groups = {item.name: item.record for item in contents.stepped}
    for name, record in groups.items():
        manifest.record_to_json(name, record)
    is_first = not dist.is_initialized() or dist.get_rank() == 0  # only rank 0's ``extra`` is saved
    own_extra = dump_plain("extra", dict(extra or {})) if is_first else b""
    return ContentsToSave(tensors, contents.buffers, groups, own_extra, checksum(dict(extra or {})))


def _warn_of_extra_state(model: nn.Module) -> None:
    """Warn if modules have extra state, which is not saved, because loading any object could run code."""
    set_by = nn.Module.get_extra_state
    found = [name for name, it in model.named_modules() if type(it).get_extra_state is not set_by]
    if found:
        warnings.warn(
            f"the result of get_extra_state() of {found[0] or 'the model'}"
            f"{f' (and of {len(found) - 1} others)' if found[1:] else ''} is not saved: "
            "pass it as extra={…}",
            stacklevel=2,
        )


def _warn_of_unstepped(model: nn.Module, stepped: Set[Tensor]) -> None:
    """Warn of trainable parameters that another optimizer may step, because its state is not saved."""
    found = [name for name, it in model.named_parameters() if it.requires_grad and it not in stepped]
    if found:
        warnings.warn(
            f"this optimizer does not step {found[0]}"
            f"{f' and {len(found) - 1} others' if found[1:] else ''}; if another optimizer does, its state "
            "is not saved here: save a MuonWithAdamW(muon, adamw), or freeze what is not trained",
            stacklevel=2,
        )


def save_together(
    meeting: Meeting,
    target: Path,
    existing: Existing,
    contents: Callable[[], ContentsToSave],
    guard: Path | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Save, together with the other ranks of the meeting. ``contents`` returns what this rank saves.

    Rank 0 also makes the draft and moves it. It calls ``finish`` when it has moved the draft, before it
    answers the other ranks. ``guard`` is a path that rank 0 locks during the save, in addition to the target.
    """
    summaries: list[SaveSummary] = []  # of all ranks, on rank 0

    def prepare() -> tuple[ContentsToSave, SaveSummary]:
        own = contents()
        outlines = {key: outline(tensor, key in own.buffers) for key, tensor in own.tensors.items()}
        return own, SaveSummary(str(target), own.groups, outlines, own.buffers, own.checksum)

    with ExitStack() as held:

        def begin(parts: Sequence[SaveSummary]) -> list[tuple[str, list[Place]]]:
            """Compare the ranks, make a draft under a lock, and divide the work."""
            for part in itertools.starmap(SaveSummary, parts):
                named = {key: TensorOutline(*its) for key, its in part.outlines.items()}
                summaries.append(part._replace(outlines=named))
            check_alike(summaries)
            target.parent.mkdir(parents=True, exist_ok=True)
            for path in filter(None, (guard, target)):
                held.enter_context(folders.locked(path))
            draft = folders.make_draft(target, meeting.id, existing, manifest.NAME)
            held.callback(rmtree, draft, ignore_errors=True)
            return [(str(draft), share) for share in divide(summaries)]

        own, (draft, share) = meeting.agree("prepare its part", prepare, begin)

        def write() -> tuple[None, Written | None]:
            path = Path(draft, f"__{meeting.rank}_0.distcp")
            return None, write_pieces(path, own.tensors, share) if share else None

        def complete(answers: Sequence[Written | None]) -> list[None]:
            written = [Written(*each) if each else None for each in answers]
            _complete_draft(Path(draft), meeting.id, summaries, written, own.extra)
            folders.commit(Path(draft), target)
            try:
                folders.sync_folder(target.parent)
                folders.remove_leftovers(target)
                finish()
            except OSError as error:
                warnings.warn(f"{target} is saved, but: {one_line(error)}", stacklevel=2)
            return [None] * len(answers)

        meeting.agree("write its files", write, complete)


def _complete_draft(
    draft: Path,
    save_id: str,
    summaries: Sequence[SaveSummary],
    written: Sequence[Written | None],
    extra: bytes,
) -> None:
    """Add the files that make the draft a checkpoint. The manifest is written last."""
    tensors = saved_tensors(summaries, written)
    files: dict[str, manifest.SavedFile] = {}
    for name, data in ((EXTRA, extra), (".metadata", metadata_for_other_tools(save_id, tensors))):
        folders.write_file(draft / name, data)
        files[name] = manifest.SavedFile(len(data), manifest.sha256(data))
    for each in filter(None, written):
        path = draft / each.file
        if not path.is_file() or path.stat().st_size != each.size:
            raise CheckpointError(
                f"rank 0 does not find the {each.size} bytes of {each.file} that were written to "
                f"{draft}: the ranks must share the file system of a checkpoint"
            )
        files[each.file] = manifest.SavedFile(each.size, each.sha256)
    groups = {name: its for each in summaries for name, its in each.groups.items()}
    whole = manifest.to_bytes(manifest.Manifest(save_id, files, tensors, groups))
    manifest.from_bytes(whole)  # this is a check: it raises if a load could not read the file
    folders.write_file(draft / manifest.NAME, whole)
