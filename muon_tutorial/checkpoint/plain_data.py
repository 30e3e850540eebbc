"""Turns plain values into bytes, and back. Reading never runs code.

The messages that ranks exchange are JSON, and so are the hyperparameters in a manifest. Messages go through
the ranks' store; torchrun's store listens on every network interface, so others may write to it. ``extra`` is
written by ``torch.save``: numbers, text, tensors, and containers of these. A value that
``torch.load(weights_only=True)`` could not read back is refused when it is saved, and the error names it.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pickle import PicklingError, UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

_LARGEST = 1 << 30  # bytes of one record
_CONTAINERS = {"tuple": tuple, "set": set}


def pack(value: Any) -> bytes:
    """Return numbers, text, and containers of these as bytes."""
    return zlib.compress(json.dumps(to_json("what a rank tells", value)).encode(), 1)


def unpack(data: bytes) -> Any:
    """Return the packed value; named tuples become plain tuples.

    Raises:
        CheckpointError: ``pack`` did not make these bytes.
    """
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, _LARGEST)
        if not reader.eof:
            raise ValueError("it is too long, or cut off")
        return from_json(json.loads(text))
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise CheckpointError(f"the ranks' store holds a value that no rank wrote: {error}") from error


def to_json(what: str, value: Any) -> Any:
    """Return a value in a form that JSON can hold; tuples, sets and dicts with any keys keep their kind.

    Raises:
        CheckpointError: a part is no number, text or container. The error's message begins with ``what``.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_json(what, part) for part in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {"dict": {key: to_json(what, part) for key, part in value.items()}}
        return {"pairs": [[to_json(what, key), to_json(what, part)] for key, part in value.items()]}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [to_json(what, part) for part in value]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: convert it to numbers or text"
    )


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    [(name, its)] = value.items()
    if name == "dict":
        return {key: from_json(part) for key, part in dict(its).items()}
    if name == "pairs":
        return {from_json(key): from_json(part) for key, part in its}
    if name not in _CONTAINERS or not isinstance(its, list):
        raise ValueError(f"a value of the kind {name!r}")
    return _CONTAINERS[name](from_json(part) for part in its)


def dump_plain(name: str, value: Any) -> bytes:
    """Return the bytes of a file that holds ``value``; error messages refer to the value as ``name``."""
    if (where := _dtensor_in(name, value)) is not None:
        raise CheckpointError(
            f"{where} is a DTensor, of which only rank 0's piece would be saved: pass its full_tensor()"
        )
    data = _dumped(value)
    if data is None:
        where, culprit = _culprit(name, value)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"{where} is a {kind}, which could run code when it is read: a checkpoint takes numbers, text, "
            "tensors, and dicts, lists and tuples of these"
        )
    return data


def checksum(value: Any) -> int:
    """Return a checksum of plain values: equal for equal values, on any device and in any process."""
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
        held = value.detach().cpu().contiguous()
        kind = zlib.crc32(f"{held.dtype}{held.shape}".encode())
        return zlib.crc32(held.flatten().view(torch.uint8).numpy().tobytes(), kind)
    if isinstance(value, (Mapping, set, frozenset)):
        parts = value.items() if isinstance(value, Mapping) else value
        return zlib.crc32(repr(sorted(map(checksum, parts))).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([*map(checksum, value)]).encode())
    return zlib.crc32(repr(value).encode())


def load_plain(data: bytes) -> Any:
    """Return the value in a file's bytes, with tensors on the CPU; never runs code from them."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise CheckpointError("it is compressed, but torch.save does not compress")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _dumped(value: Any) -> bytes | None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        load_plain(buffer.getvalue())
    except (UnpicklingError, TypeError, AttributeError, RuntimeError, ValueError, PicklingError):
        return None
    return buffer.getvalue()


def _culprit(name: str, value: Any) -> tuple[str, Any]:
    """Find the innermost part that cannot be saved: its path, such as ``extra['x'][0]``, and its value."""
    for where, part in _parts(name, value):
        if _dumped(part) is None:
            return _culprit(where, part)
    return name, value


def _dtensor_in(name: str, value: Any) -> str | None:
    """Return the path of the first DTensor in a value."""
    if isinstance(value, DTensor):
        return name
    return next(filter(None, (_dtensor_in(*part) for part in _parts(name, value))), None)


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container, each with its path."""
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    return []
