"""What ranks tell each other through the process group's store, as JSON: nothing that is read can run code.

torchrun's store listens on every network interface, and whoever reaches it can write to it.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from ..errors import CheckpointError

_LARGEST = 1 << 30  # bytes of one record


def pack(value: Any) -> bytes:
    """Return numbers, text, and containers of these as bytes.

    Raises:
        CheckpointError: a part of it is something else.
    """
    return zlib.compress(json.dumps(_plain(value)).encode(), 1)


def unpack(data: bytes) -> Any:
    """Return what was packed, named tuples as tuples; of bytes that ``pack`` did not make, an error.

    Raises:
        CheckpointError: they are damaged, or somebody else wrote them.
    """
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, _LARGEST)
        if not reader.eof:
            raise ValueError("it is too long, or cut off")
        return _rebuilt(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise CheckpointError(f"the ranks' store holds what no rank wrote: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(part)] for key, part in value.items()]}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [_plain(part) for part in value]}
    raise CheckpointError(f"a {type(value).__name__} is nothing that ranks tell each other")


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(name, its)] = value.items()
    if name == "dict":
        return {_rebuilt(key): _rebuilt(part) for key, part in its}
    return _CONTAINERS[name](_rebuilt(part) for part in its)


_CONTAINERS = {"tuple": tuple, "set": set, "list": list}
