"""The values that a checkpoint accepts as ``extra``: numbers, text, tensors, and containers of these.

``torch.save`` writes them and ``torch.load(weights_only=True)`` reads them. A value that could not be read
back this way is refused when it is saved, and the error names it.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pickle import PicklingError, UnpicklingError
from typing import Any

import torch

from ..errors import CheckpointError


def dump_plain(name: str, value: Any) -> bytes:
    """Return the bytes of a file that holds ``value``; an error calls it ``name``."""
    data = _dumped(value)
    if data is None:
        where, culprit = _culprit(name, value)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"{where} is a {kind}, which could run code when it is read: a checkpoint takes numbers, text, "
            "tensors, and dicts, lists and tuples of these"
        )
    return data


def load_plain(data: bytes) -> Any:
    """Return the value in a file's bytes, with tensors on the CPU; never runs code from them."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise CheckpointError("it is compressed, but torch.save does not compress")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _dumped(value: Any) -> bytes | None:
    """The bytes, if they can be read back."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        load_plain(buffer.getvalue())
    except (UnpicklingError, TypeError, AttributeError, RuntimeError, ValueError, PicklingError):
        return None
    return buffer.getvalue()


def _culprit(name: str, value: Any) -> tuple[str, Any]:
    """The path to the innermost part that cannot be saved, and that part."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    for where, part in parts:
        if _dumped(part) is None:
            return _culprit(where, part)
    return name, value
