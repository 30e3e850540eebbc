"""Opens a saved checkpoint, and checks its files against the manifest: their names, sizes and SHA-256.

Ranks that load together share the work of hashing: each file is read by one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from . import manifest
from .folders import OpenFolder, opened
from .manifest import Manifest
from .meeting_over_store import one_line


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheckpoint:
    """An open checkpoint. ``digest``: the SHA-256 of the file ``manifest.json``."""

    folder: OpenFolder
    manifest: Manifest
    digest: str


def open_checkpoint(folder: OpenFolder) -> OpenCheckpoint:
    """Read the manifest, and check that the folder holds the files that it lists, with their sizes."""
    sizes = folder.sizes()
    if manifest.NAME not in sizes:
        if ".metadata" in sizes:
            raise CheckpointError(
                f"{folder.path} has no {manifest.NAME}: save_checkpoint did not write it, or wrote it "
                "before format 2, with pickled objects, which are not read because they can run code. If "
                "you trust the folder, torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts "
                "it to one file"
            )
        raise CheckpointError(f"{folder.path} holds no checkpoint: its file {manifest.NAME} is missing")
    with folder.open(manifest.NAME) as file:
        data = file.read()
    try:
        found = manifest.from_bytes(data)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.path}: {error}") from error
    _check_files(folder, found, sizes)
    return OpenCheckpoint(folder, found, manifest.sha256(data))


def _check_files(folder: OpenFolder, found: Manifest, sizes: Mapping[str, int]) -> None:
    """Refuse files that are missing, not part of this checkpoint, or of another size."""
    for name in sorted({*sizes, *found.files} - {manifest.NAME}):
        if name not in found.files:
            raise CheckpointError(f"{folder.path} holds {name}, which is not part of the checkpoint")
        if name not in sizes:
            raise CheckpointError(f"{folder.path} lacks its file {name}")
        if sizes[name] < 0:
            raise CheckpointError(f"{folder.path / name} is not a plain file")
        if sizes[name] != found.files[name].size:
            raise CheckpointError(
                f"{folder.path / name} is damaged: it has {sizes[name]} bytes, and had "
                f"{found.files[name].size} when it was saved"
            )


def verify_hashes(saved: OpenCheckpoint, rank: int, ranks: int) -> None:
    """Compare the hashes of this rank's share of the files with the manifest; only one rank reads a file."""
    files = saved.manifest.files
    for name in sorted(files, key=lambda name: files[name].size)[rank::ranks]:
        digest = hashlib.sha256()
        with saved.folder.open(name) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != files[name].sha256:
            raise CheckpointError(
                f"{saved.folder.path / name} is damaged: its SHA-256 is not what {manifest.NAME} says"
            )


def damage_of(path: Path) -> str | None:
    """A line about damage in a checkpoint's files; None if there is no damage."""
    try:
        with opened(path) as folder:
            verify_hashes(open_checkpoint(folder), rank=0, ranks=1)
    except (CheckpointError, OSError) as error:
        return one_line(error)
    return None
