"""Plain values as JSON: messages between ranks through their store, and hyperparameters in a manifest.

Reading them never runs code. That matters because torchrun's store listens on every network interface, and
everyone who can reach it can write to it.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from ..errors import CheckpointError

_LARGEST = 1 << 30  # bytes of one record
_CONTAINERS = {"tuple": tuple, "set": set}


def pack(value: Any) -> bytes:
    """Return numbers, text, and containers of these as bytes."""
    return zlib.compress(json.dumps(to_json("what a rank tells", value)).encode(), 1)


def unpack(data: bytes) -> Any:
    """Return what was packed, with named tuples as plain tuples.

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
        CheckpointError: a part of it is not a number, text or such a container; ``what`` names the value.
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
    """Return the value that ``to_json`` was given."""
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
