"""Tensors of which a rank holds some pieces, and their files as ``torch.distributed.checkpoint`` writes them.

It speaks that library's protocols, and knows nothing of optimizers. (A module of its
own, because importing the library takes a tenth of a second, which a rank that saves nothing need not spend.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import CheckpointError

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


def write(folder: Path, entries: dict[str, Any]) -> None:
    """Write entries: tensors in pieces, and other objects. Must be called by all ranks.

    Raises:
        CheckpointError: a rank could not.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _named_failures(f"{folder} could not be written"):
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(folder), planner=planner)


def read(folder: Path, entries: dict[str, Any], *, alone: bool = False) -> None:
    """Read into entries: tensors in place, other objects replaced. All ranks must call, unless ``alone``.

    Raises:
        CheckpointError: a rank could not.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _named_failures(f"{folder} could not be read"):
        dcp.load(entries, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=alone)


def read_metadata(folder: Path) -> Metadata:
    """What the checkpoint holds, without the data.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} holds no finished checkpoint: its file .metadata is missing")
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CheckpointError(
            f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """Turn the library's failure, which is no ``Exception``, into one line; a lone process is no warning."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from cause
