"""Tensors of which a rank holds some pieces, and their files as ``torch.distributed.checkpoint`` writes them.

It speaks that library's protocols, and knows nothing of optimizers. What it reads it finds in the manifest:
``.metadata``, which is a pickle, is written for other tools and never read here. (A module of its own,
because importing the library takes a tenth of a second, which a rank that saves nothing need not spend.)
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import CheckpointError
from .folders import OpenFolder
from .manifest import Manifest, SavedBox, SavedFile, SavedTensor
from .meeting import one_line
from .plain_data import load_plain

Offset = tuple[int, ...]


class TensorInPieces(Tensor):
    """A tensor of the whole shape, of which only ``pieces`` are here, by the offset of each.

    It has no data of its own and takes part in no arithmetic: ``torch.distributed.checkpoint`` asks it, by
    the methods with double underscores, which pieces it has, and for the tensor behind each.
    """

    pieces: dict[Offset, Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], pieces: Mapping[Offset, Tensor], dtype: torch.dtype, device: torch.device
    ) -> TensorInPieces:
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor.pieces = dict(pieces)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CheckpointError(f"a TensorInPieces only describes what a rank holds; it cannot {func}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = ", ".join(f"{tuple(piece.shape)} at {offset}" for offset, piece in self.pieces.items())
        return f"TensorInPieces(shape={tuple(self.shape)}, held: {held or 'nothing'})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:  # noqa: A002
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), self.size()),
            )
            for chunk, piece in zip(self.__create_chunk_list__(), self.pieces.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(Size(offset), piece.shape) for offset, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[tuple(index.offset or ())]


class PieceWriter:
    """Writes this rank's pieces to a file of its own, by the library's plans, and hashes what passes."""

    def __init__(self, entries: Mapping[str, TensorInPieces], save_id: str) -> None:
        self._entries, self._save_id = dict(entries), save_id
        self._planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan(self, is_first: bool) -> SavePlan:
        """What this rank could write."""
        self._planner.set_up_planner(self._entries, StorageMeta(save_id=self._save_id), is_first)
        return self._planner.create_local_plan()

    def divide(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank is to write, replicas once; for rank 0."""
        divided, metadata = self._planner.create_global_plan(plans)
        return _Writer(Path(), self._save_id).prepare_global_plan(divided), metadata

    def write(self, plan: SavePlan, folder: Path) -> Written:
        """Write this rank's share of the plan, and see it onto the disk.

        Raises:
            OSError: the file cannot be written.
        """
        writer = _Writer(folder, self._save_id)
        try:
            results = writer.write_data(self._planner.finish_plan(plan), self._planner).value()
        except Exception as error:
            if writer.fs.failure is None:
                raise
            raise writer.fs.failure from error  # torch.save says "unexpected pos" of a full disk
        return Written(results, writer.fs.files)


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written: where each piece is, and its files."""

    results: list[WriteResult]
    files: dict[str, SavedFile]


def write_metadata(folder: Path, save_id: str, metadata: Metadata, written: Sequence[Written]) -> SavedFile:
    """Write ``.metadata``, which other tools of the library read (this package does not); for rank 0."""
    writer = _Writer(folder, save_id)
    writer.finish(metadata, [each.results for each in written])
    [file] = writer.fs.files.values()
    return file


def saved_tensors(metadata: Metadata) -> dict[str, SavedTensor]:
    """What the library has noted of the tensors it wrote, as the manifest says it."""
    found = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = []
        for chunk in tensor.chunks:
            its = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            where = its.relative_path, its.offset, its.length
            boxes.append(SavedBox(tuple(chunk.offsets), tuple(chunk.sizes), *where))
        found[key] = SavedTensor(tuple(tensor.size), tensor.properties.dtype, tuple(boxes))
    return found


def read(folder: OpenFolder, manifest: Manifest, entries: Mapping[str, TensorInPieces]) -> None:
    """Read this rank's pieces, into the tensors behind them. Asks no other rank.

    Raises:
        CheckpointError: a piece is not what the manifest says.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(entries), _metadata(manifest), True)
    _read_boxes(folder, manifest, planner)


class _HashedFile(io.RawIOBase):
    """A file that is written once, from its start to its end."""

    def __init__(self, file: IO[bytes], note_failure: Callable[[OSError], None]) -> None:
        self._file, self._note_failure = file, note_failure
        self.sha256, self.size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self._note_failure(error)
            raise
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # who asks is about to sync
        return self._file.fileno()


class _HashedFiles(FileSystem):
    """The library's files, hashed as they are written. ``failure`` is the first that the system reported."""

    def __init__(self) -> None:
        self.files: dict[str, SavedFile] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            with open(path, mode) as file:
                stream = _HashedFile(cast(IO[bytes], file), self._note)
                yield stream
        except OSError as error:
            self._note(error)
            raise
        self.files[Path(path).name] = SavedFile(stream.size, stream.sha256.hexdigest())

    def _note(self, error: OSError) -> None:
        self.failure = self.failure or error


class _Writer(dcp.FileSystemWriter):
    """The library's writer of one file a rank, with hashes and without the saver's paths in its metadata."""

    fs: _HashedFiles

    def __init__(self, folder: Path, save_id: str) -> None:
        super().__init__(folder)
        self.fs = _HashedFiles()
        self.save_id = save_id

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _metadata(manifest: Manifest) -> Metadata:
    """The manifest in the library's words."""
    found: dict[str, Any] = {
        key: TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            Size(tensor.shape),
            [ChunkStorageMetadata(Size(box.offset), Size(box.shape)) for box in tensor.boxes],
        )
        for key, tensor in manifest.tensors.items()
    }
    return Metadata(found)


def _read_boxes(folder: OpenFolder, manifest: Manifest, planner: dcp.DefaultLoadPlanner) -> None:
    """Read what the library's plan asks for, each box once."""
    items: dict[SavedBox, list[ReadItem]] = {}
    boxes = {(key, box.offset): box for key, it in manifest.tensors.items() for box in it.boxes}
    for item in planner.create_local_plan().items:
        at = item.storage_index
        items.setdefault(boxes[at.fqn, tuple(at.offset or ())], []).append(item)
    with ExitStack() as files:
        opened: dict[str, IO[bytes]] = {}
        for box, its in items.items():
            if box.file not in opened:
                opened[box.file] = files.enter_context(folder.open(box.file))
            saved = _saved_box(
                folder, opened[box.file], box, manifest.tensors[its[0].storage_index.fqn].dtype
            )
            for item in its:
                target = planner.resolve_tensor(item)
                source = tuple(
                    slice(first, first + length)
                    for first, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                target.copy_(saved[source])


def _saved_box(folder: OpenFolder, file: IO[bytes], box: SavedBox, dtype: torch.dtype) -> Tensor:
    file.seek(box.start)
    try:
        tensor = load_plain(file.read(box.size))
    except Exception as error:
        raise CheckpointError(f"{folder.path / box.file} cannot be read: {one_line(error)}") from error
    if not _is_plain(tensor) or tensor.shape != box.shape or tensor.dtype != dtype:
        raise CheckpointError(f"{folder.path / box.file} holds something else than manifest.json says")
    return tensor


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
