"""Writes a rank's pieces of tensors to a file, and reads its pieces from files that may be cut differently.

The files have the layout of ``torch.distributed.checkpoint``, so that PyTorch's tools can read them. A load
finds pieces by the manifest; the pickle ``.metadata`` is written only for PyTorch's tools.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Size, Tensor

from ..errors import CheckpointError
from ..plan.layout import Box
from .compare_ranks import SaveSummary
from .folders import OpenFolder
from .manifest import Manifest, SavedBox, SavedTensor
from .meeting_over_store import one_line
from .plain_data import load_plain
from .rank_contents import Offset, TensorInPieces

Place = tuple[str, Offset]
"""A piece: the tensor's name in the checkpoint, and where the piece begins."""


class Written(NamedTuple):
    """The file that a rank wrote: its name, size and SHA-256, and where each piece begins and ends."""

    file: str
    size: int
    sha256: str
    places: dict[Place, tuple[int, int]]


def divide(summaries: Sequence[SaveSummary]) -> list[list[Place]]:
    """Divide the writing: each piece is written by one of the ranks that hold it.

    All ranks write about the same number of elements. Returns the pieces of each rank.
    """
    holders: dict[Place, list[int]] = {}
    for rank, summary in enumerate(summaries):
        for key, tensor in summary.outlines.items():
            for offset in tensor.boxes:
                holders.setdefault((key, offset), []).append(rank)
    shares: list[list[Place]] = [[] for _ in summaries]
    elements = [0] * len(summaries)
    for (key, offset), ranks in holders.items():
        is_buffer = key in summaries[ranks[0]].buffers  # may differ: take all from one rank
        writer = ranks[0] if is_buffer else min(ranks, key=lambda rank: elements[rank])
        shares[writer].append((key, offset))
        elements[writer] += math.prod(summaries[writer].outlines[key].boxes[offset][0])
    return shares


def write_pieces(path: Path, entries: Mapping[str, TensorInPieces], share: Sequence[Place]) -> Written:
    """Write these pieces to a file, each as ``torch.save`` writes a tensor, and sync it to disk."""
    digest = hashlib.sha256()
    places: dict[Place, tuple[int, int]] = {}
    with open(path, "xb") as file:
        for key, offset in share:
            piece, buffer, start = entries[key].pieces[offset].detach().cpu(), io.BytesIO(), file.tell()
            if piece.untyped_storage().nbytes() != piece.nbytes:
                piece = piece.clone()  # torch.save would save the whole storage
            torch.save(piece, buffer)
            write_to(file, buffer.getbuffer())
            digest.update(buffer.getbuffer())
            places[key, offset] = start, file.tell()
        file.flush()
        os.fsync(file.fileno())
        return Written(path.name, file.tell(), digest.hexdigest(), places)


def write_to(file: IO[bytes], data: memoryview) -> None:
    file.write(data)


def saved_tensors(
    summaries: Sequence[SaveSummary], written: Sequence[Written | None]
) -> dict[str, SavedTensor]:
    """The manifest's record of each tensor, from all ranks' summaries and files."""
    boxes: dict[str, list[SavedBox]] = {}
    for summary, each in zip(summaries, written, strict=True):
        if each is None:
            continue
        for (key, offset), (start, end) in each.places.items():
            shape = summary.outlines[key].boxes[offset][0]
            boxes.setdefault(key, []).append(SavedBox(offset, shape, each.file, start, end - start))
    alike = {key: tensor for each in summaries for key, tensor in each.outlines.items()}
    return {
        key: SavedTensor(
            tensor.shape, getattr(torch, tensor.dtype.removeprefix("torch.")), tuple(boxes.get(key, ()))
        )
        for key, tensor in alike.items()
    }


def metadata_for_other_tools(save_id: str, tensors: Mapping[str, SavedTensor]) -> bytes:
    """The file ``.metadata``, which tells ``torch.distributed.checkpoint`` where the boxes are."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # a slow import for rank 0 alone
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(Size(box.offset), Size(box.shape)) for box in tensor.boxes]
        described[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), Size(tensor.shape), chunks)
        for box in tensor.boxes:
            places[MetadataIndex(key, Size(box.offset))] = _StorageInfo(box.file, box.start, box.size)
    return pickle.dumps(Metadata(described, None, places, StorageMeta(save_id=save_id)))


def read_pieces(folder: OpenFolder, manifest: Manifest, entries: Mapping[str, TensorInPieces]) -> None:
    """Read this rank's pieces into the tensors of ``entries``. Does not communicate.

    Raises:
        CheckpointError: a box is not what the manifest says, or the boxes do not cover a piece.
    """
    for key, entry in entries.items():
        mine = [(Box(offset, tuple(its.shape)), its) for offset, its in entry.pieces.items()]
        missing = [torch.ones(piece.shape, dtype=torch.bool) for _, piece in mine]
        for saved in manifest.tensors[key].boxes:
            box = Box(saved.offset, saved.shape)
            shared = [box.overlap(own) for own, _ in mine]
            if not any(both.numel for both in shared):
                continue
            tensor = read_plain(folder, saved.file, saved.start, saved.size)
            is_plain = (
                type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
            )
            if not is_plain or tensor.shape != saved.shape or tensor.dtype != entry.dtype:
                raise CheckpointError(f"{folder.path / saved.file} does not hold what manifest.json says")
            for (own, piece), left, both in zip(mine, missing, shared, strict=True):
                if both.numel:
                    here = both.seen_from(own).slices
                    piece[here] = tensor[both.seen_from(box).slices]
                    left[here] = False
        if any(left.any() for left in missing):
            raise CheckpointError(f"{folder.path}: boxes of {key} overlap, and do not cover all of it")


def read_plain(folder: OpenFolder, name: str, start: int = 0, size: int = -1) -> Any:
    """Read what ``torch.save`` wrote into a file, from ``start`` on; never runs code from the file."""
    with folder.open(name) as file:
        file.seek(start)
        data = file.read(size)
    try:
        return load_plain(data)
    except Exception as error:
        raise CheckpointError(f"{folder.path / name} cannot be read: {one_line(error)}") from error
