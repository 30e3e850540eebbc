"""What ranks tell each other through the process group's store, as JSON: nothing that is read can run code.

torchrun's store listens on every network interface, and whoever reaches it can write to it.
"""

from __future__ import annotations

import base64
import importlib
import json
import zlib
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

_HERE, _LIBRARY = __package__, "torch.distributed.checkpoint"
_CLASSES = {
    "SaveSummary": f"{_HERE}.compare_ranks",
    "TensorOutline": f"{_HERE}.compare_ranks",
    "Found": f"{_HERE}.loading",
    "SavedFile": f"{_HERE}.manifest",
    "Written": f"{_HERE}.pieces_on_disk",
    "Prepared": f"{_HERE}.saving",
    "_StoragePrefix": f"{_LIBRARY}.filesystem",
    "_StorageInfo": f"{_LIBRARY}.filesystem",
    "ChunkStorageMetadata": f"{_LIBRARY}.metadata",
    "MetadataIndex": f"{_LIBRARY}.metadata",
    "TensorProperties": f"{_LIBRARY}.metadata",
    "SavePlan": f"{_LIBRARY}.planner",
    "TensorWriteData": f"{_LIBRARY}.planner",
    "WriteItem": f"{_LIBRARY}.planner",
    "WriteItemType": f"{_LIBRARY}.planner",
    "WriteResult": f"{_LIBRARY}.storage",
}
"""The records that are read, and where they are defined."""
_LARGEST = 1 << 30  # bytes of one record


def pack(value: Any) -> bytes:
    """Return a record as bytes.

    Raises:
        CheckpointError: a part of it is of a class that is not read.
    """
    return zlib.compress(json.dumps(_plain(value)).encode(), 1)


def unpack(data: bytes) -> Any:
    """Return the record; of bytes that ``pack`` did not make, an error.

    Raises:
        CheckpointError: they are damaged, or somebody else wrote them.
    """
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, _LARGEST)
        if not reader.eof:
            raise ValueError("it is too long, or cut off")
        return _rebuilt(json.loads(text))
    except Exception as error:  # whatever a record's class says of fields that do not fit
        raise CheckpointError(f"the ranks' store holds what no rank wrote: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    name = type(value).__name__
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, (tuple, set)):  # torch.Size is a tuple
        return {name: [_plain(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(part)] for key, part in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"Path": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if _CLASSES.get(name) == type(value).__module__:
        if isinstance(value, Enum):
            return {name: value.value}
        if is_dataclass(value):
            return {name: {field.name: _plain(getattr(value, field.name)) for field in fields(value)}}
    if hasattr(value, "item"):  # numpy's numbers
        return _plain(value.item())
    raise CheckpointError(f"a {name} is nothing that ranks tell each other")


def _rebuilt(value: Any) -> Any:
    if isinstance(value, list):
        return [_rebuilt(part) for part in value]
    if not isinstance(value, dict):
        return value
    [(name, its)] = value.items()
    if name in _CONTAINERS:
        return _CONTAINERS[name](_rebuilt(part) for part in its)
    if name == "dict":
        return {_rebuilt(key): _rebuilt(part) for key, part in its}
    if name == "bytes":
        return base64.b64decode(its)
    if name == "Path":
        return Path(its)
    if name == "torch":
        found = getattr(torch, its)
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise ValueError(f"torch.{its}")
        return found
    kind = getattr(importlib.import_module(_CLASSES[name]), name)
    return kind(**{key: _rebuilt(part) for key, part in its.items()}) if isinstance(its, dict) else kind(its)


_CONTAINERS = {"tuple": tuple, "set": set, "Size": torch.Size}
