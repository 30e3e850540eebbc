"""``save_checkpoint``: writes a model and its optimizer into a folder, completely or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError
from . import folders, manifest
from .compare_ranks import SaveSummary, TensorOutline, check_alike, outline
from .folders import Existing
from .meeting import Meeting, call_meeting, one_line
from .piece_files import Place, Written, divide, metadata_for_other_tools, saved_tensors, write_pieces
from .plain_data import dump_plain
from .rank_contents import HeldBoxes, Rename, Saveable, TensorInPieces, contents_of_rank, in_pieces

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
        extra: more values for rank 0 to save, such as a step or a scheduler's ``state_dict()``. A load
            returns ``extra``: numbers, text, tensors, and dicts, lists and tuples of these.
        rename: a function from the model's name of a parameter to the name under which it is saved. Needed if
            ranks have different parameters with equal names (experts, pipeline stages).
        existing: what to do with a folder that is not empty: ``"refuse"`` it, or ``"replace"`` a checkpoint.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, another process is saving to it, ranks
            hold different values of something that should be the same, or a rank did not do its part within
            the timeout of the default process group. Raised on all ranks.
    """
    target = folders.target_of(path)
    meeting = call_meeting("save_checkpoint")
    Save(meeting, target, existing, lambda: contents_to_save(model, optimizer, extra, rename)).run()


@dataclass(frozen=True, slots=True, eq=False)
class ContentsToSave:
    """What this rank has to save: tensors with their boxes, the parameters' records, ``extra`` as bytes."""

    tensors: dict[str, tuple[Tensor, HeldBoxes]]
    buffers: set[str]
    groups: dict[str, dict[str, Any]]
    extra: bytes


def contents_to_save(
    model: nn.Module, optimizer: Saveable, extra: Mapping[str, Any] | None, rename: Rename | None
) -> ContentsToSave:
    """Find out what this rank has to save; the tensors are the model's own, not copies."""
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"extra must be a dict of values to save with the model, not {extra!r}")
    contents = contents_of_rank(model, optimizer, rename)
    _warn_of_extra_state(model)
    tensors = {f"model.{name}": placed for name, placed in contents.tensors.items()}
    for item in contents.stepped:
        tensors |= {item.key(entry): (its, item.boxes_of(entry)) for entry, its in item.tensors.items()}
    buffers = {f"model.{name}" for name in contents.buffers}
    groups = {item.name: item.record for item in contents.stepped}
    for name, record in groups.items():
        manifest.record_to_json(name, record)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    saved_extra = dump_plain("extra", dict(extra or {})) if is_first else b""
    return ContentsToSave(tensors, buffers, groups, saved_extra)


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


@dataclass(slots=True, eq=False)
class Save:
    """One save. ``contents`` returns what this rank saves. Rank 0 also makes the draft and moves it.

    Rank 0 calls ``finish`` when it has moved the draft, before it answers the other ranks. ``guard`` is a
    path that rank 0 locks during the save, in addition to the folder.
    """

    meeting: Meeting
    folder: Path
    existing: Existing
    contents: Callable[[], ContentsToSave]
    guard: Path | None = None
    finish: Callable[[], None] = lambda: None
    _draft: Path = Path()
    _summaries: list[SaveSummary] = field(default_factory=list)
    _files: dict[str, manifest.SavedFile] = field(default_factory=dict)

    def run(self) -> None:
        """Save, together with the other ranks of the meeting."""
        rank = self.meeting.rank
        with ExitStack() as held:
            (entries, extra), (draft, share) = self.meeting.agree(
                "prepare its part", self._prepare, lambda parts: self._begin(parts, held)
            )

            def write() -> tuple[None, Written | None]:
                if rank == 0:
                    self._write(EXTRA, extra)
                path = Path(draft, f"__{rank}_0.distcp")
                return None, write_pieces(path, entries, share) if share else None

            self.meeting.agree("write its files", write, self._complete)

    def _prepare(self) -> tuple[tuple[dict[str, TensorInPieces], bytes], SaveSummary]:
        contents = self.contents()
        entries = {key: in_pieces(*placed) for key, placed in contents.tensors.items()}
        outlines = {key: outline(entry, key in contents.buffers) for key, entry in entries.items()}
        summary = SaveSummary(str(self.folder), contents.groups, outlines, contents.buffers)
        return (entries, contents.extra), summary

    def _begin(self, parts: Sequence[SaveSummary], held: ExitStack) -> list[tuple[str, list[Place]]]:
        """Compare the ranks, make a draft under a lock, and divide the work."""
        self._summaries = [
            SaveSummary(folder, groups, {key: TensorOutline(*its) for key, its in outlines.items()}, buffers)
            for folder, groups, outlines, buffers in parts
        ]
        check_alike(self._summaries)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for target in (self.guard, self.folder):
            if target is not None:
                held.enter_context(folders.locked(target))
        self._draft = folders.make_draft(self.folder, self.meeting.id, self.existing, manifest.NAME)
        held.callback(rmtree, self._draft, ignore_errors=True)
        return [(str(self._draft), share) for share in divide(self._summaries)]

    def _write(self, name: str, data: bytes) -> None:
        folders.write_file(self._draft / name, data)
        self._files[name] = manifest.SavedFile(len(data), manifest.sha256(data))

    def _complete(self, answers: Sequence[Written | None]) -> list[None]:
        """Add the files that make the draft complete, and move it into place."""
        written = [Written(*each) if each else None for each in answers]
        tensors = saved_tensors(self._summaries, written)
        self._write(".metadata", metadata_for_other_tools(self.meeting.id, tensors))
        for each in filter(None, written):
            self._files[each.file] = manifest.SavedFile(each.size, each.sha256)
        for name, file in self._files.items():
            path = self._draft / name
            if not path.is_file() or path.stat().st_size != file.size:
                raise CheckpointError(
                    f"rank 0 does not find the {file.size} bytes of {name} that were written to "
                    f"{self._draft}: the ranks must share the file system of a checkpoint"
                )
        groups = {name: its for each in self._summaries for name, its in each.groups.items()}
        data = manifest.to_bytes(manifest.Manifest(self.meeting.id, self._files, tensors, groups))
        manifest.from_bytes(data)  # this is a check: it raises if a load could not read the file
        self._write(manifest.NAME, data)
        folders.commit(self._draft, self.folder)
        try:
            folders.sync_folder(self.folder.parent)
            folders.remove_leftovers(self.folder)
            self.finish()
        except OSError as error:
            warnings.warn(f"{self.folder} is saved, but: {one_line(error)}", stacklevel=2)
        return [None] * len(answers)
