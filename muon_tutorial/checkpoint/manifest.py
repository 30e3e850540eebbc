"""``manifest.json``: the tensors of a checkpoint, where their bytes are, and the hashes of the files.

This module handles only data and text, and opens no file. The manifest is JSON and holds everything that a
load must know before it reads a tensor, so the load unpickles nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError
from .plain_data import from_json, to_json
from .rank_contents import ADAMW_STATE

NAME = "manifest.json"
FORMAT = {"name": "muon_tutorial", "version": 2}
STATE = ("momentum_buffer", *ADAMW_STATE)

_HEAD, _BODY, _TAIL = b'{"sha256": "', b'",\n"manifest": ', b"}\n"


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file next to the manifest: its size in bytes and its SHA-256, in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedBox:
    """A box of a tensor. Its bytes lie at ``start`` in ``file``, in the format of ``torch.save``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A whole tensor: its shape, its dtype, and the boxes into which it was cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint. ``groups``: each stepped parameter's optimizer and hyperparameters."""

    save_id: str
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]
    groups: Mapping[str, dict[str, Any]]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def to_bytes(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: first the SHA-256 of the content, then the content."""
    files = {name: {"bytes": file.size, "sha256": file.sha256} for name, file in manifest.files.items()}
    content = {
        "format": FORMAT,
        "save_id": manifest.save_id,
        "files": files,
        "tensors": {key: _tensor_to_json(tensor) for key, tensor in manifest.tensors.items()},
        "groups": {name: record_to_json(name, record) for name, record in manifest.groups.items()},
    }
    return sealed(content)


def sealed(content: Mapping[str, Any]) -> bytes:
    """The content as JSON, with its SHA-256 in front of it."""
    body = json.dumps(content, indent=1).encode()
    return _HEAD + sha256(body).encode() + _BODY + body + _TAIL


def from_bytes(data: bytes) -> Manifest:
    """Read what ``to_bytes`` wrote; every byte is checked.

    Raises:
        CheckpointError: the manifest is damaged, has another format, or contradicts itself.
    """
    start = len(_HEAD) + 64 + len(_BODY)
    body = data[start : len(data) - len(_TAIL)]
    digest = sha256(body).encode()
    if data != _HEAD + digest + _BODY + body + _TAIL:
        raise CheckpointError("its manifest.json is damaged: the content does not match its hash")
    try:
        content = json.loads(body)
        if content["format"] != FORMAT:
            raise CheckpointError(f"it has the format {content['format']}; this version reads {FORMAT}")
        files = {
            _file_name(name): SavedFile(_count(file["bytes"]), str(file["sha256"]))
            for name, file in content["files"].items()
        }
        tensors = {
            str(key): _tensor_from_json(str(key), tensor, files) for key, tensor in content["tensors"].items()
        }
        groups = {str(name): _record_from_json(record) for name, record in content["groups"].items()}
        return Manifest(str(content["save_id"]), files, tensors, groups)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        kind = type(error).__name__
        raise CheckpointError(f"its manifest.json has unexpected content: {kind}: {error}") from error


def record_to_json(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's record in ``groups``, as values that JSON can hold."""
    group = {key: to_json(f"{key} of {name}", value) for key, value in record["group"].items()}
    return {**record, "group": group}


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    boxes = [
        {"offset": box.offset, "shape": box.shape, "file": box.file, "start": box.start, "bytes": box.size}
        for box in tensor.boxes
    ]
    return {"shape": tensor.shape, "dtype": str(tensor.dtype).removeprefix("torch."), "boxes": boxes}


def _file_name(name: str) -> str:
    """Return the name of a file; refuse a name that leads out of the checkpoint's folder."""
    _expect(
        name not in ("", ".", "..", NAME) and not set(name) & set("/\\\0"),
        f"the file name {name!r}, which leads out of the folder",
    )
    return name


def _tensor_from_json(key: str, found: Mapping[str, Any], files: Mapping[str, SavedFile]) -> SavedTensor:
    shape = _counts(found["shape"])
    dtype = getattr(torch, str(found["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"its manifest.json gives {key} an unknown dtype, {found['dtype']!r}")
    boxes = tuple(_checked_box(key, box, shape, dtype, files) for box in found["boxes"])
    _expect(
        sum(math.prod(box.shape) for box in boxes) == math.prod(shape),
        f"boxes of {key} that do not make up its shape {shape}",
    )
    return SavedTensor(shape, dtype, boxes)


def _checked_box(
    key: str,
    found: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    files: Mapping[str, SavedFile],
) -> SavedBox:
    """Refuse a box outside its tensor, outside its file, or with more elements than its bytes can hold."""
    offset, lengths = _counts(found["offset"]), _counts(found["shape"])
    place = _file_name(found["file"]), _count(found["start"]), _count(found["bytes"])
    box = SavedBox(offset, lengths, *place)
    fits = len(box.offset) == len(box.shape) == len(shape) and all(
        first + length <= whole for first, length, whole in zip(box.offset, box.shape, shape, strict=True)
    )
    _expect(fits, f"a box of {key} outside its shape {shape}")
    _expect(box.file in files, f"a box of {key} in the unlisted file {box.file!r}")
    _expect(
        box.start + box.size <= files[box.file].size and math.prod(box.shape) * dtype.itemsize <= box.size,
        f"a box of {key} of shape {box.shape} in {box.size} bytes of {box.file}, which cannot hold it",
    )
    return box


def _record_from_json(record: Mapping[str, Any]) -> dict[str, Any]:
    group = {key: from_json(value) for key, value in record["group"].items()}
    wrong = [key for key in group if key.startswith("param")]
    _expect(not wrong, f"{wrong} among hyperparameters")
    state = tuple(record["state"])
    _expect(set(state) <= set(STATE) and record["optimizer"] in ("muon", "adamw"), f"a state {state}")
    return {"optimizer": record["optimizer"], "state": state, "group": group}


def _count(value: Any) -> int:
    _expect(type(value) is int and value >= 0, f"a wrong number of bytes or elements: {value!r}")
    return int(value)


def _counts(values: Any) -> tuple[int, ...]:
    _expect(isinstance(values, list), f"a wrong shape: {values!r}")
    return tuple(_count(value) for value in values)


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise CheckpointError(f"its manifest.json has {what}")
