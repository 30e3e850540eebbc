"""Sends a function to ranks: by name if ranks can import it, otherwise by value and with its source.

Functions and classes of a notebook cell, a script or a prompt are sent by value (cloudpickle), with the
globals they use. The cells' text is sent with them, so that tracebacks in a rank show the cell's lines.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from cloudpickle import dumps, loads  # type: ignore[import-untyped]

from ..errors import UsageError

__all__ = ["cell_labels", "cell_sources", "dumps", "loads", "pack", "unpack_error"]


MOVE = "move it to a module, and import it from there"


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return ``fn`` and its arguments as bytes for ``loads`` in a rank.

    Raises:
        UsageError: something that the function uses cannot be sent; the error names it.
    """
    try:
        return dumps((fn, args, dict(kwargs)))
    except Exception as error:
        raise UsageError(_what_cannot_travel(fn, args, kwargs, error)) from None


def unpack_error(data: bytes | None) -> BaseException | None:
    """Return the exception that a rank raised, if it was sent and can be rebuilt here."""
    if data is None:
        return None
    try:
        return loads(data)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the exception's own class may raise anything
        return None


def cell_sources() -> dict[str, list[str]]:
    """For code without a file, such as a cell, map the file name in tracebacks to the code's lines."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


def cell_labels() -> dict[str, str]:
    """Map the cells' file names in tracebacks to the names that IPython shows (``Cell In[3]``)."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    describe = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if describe is None:
        return {}
    named = {name: describe(name) for name in cell_sources()}
    return {name: " ".join(label) for name, label in named.items() if label}


def _closure(fn: FunctionType) -> dict[str, Any]:
    values = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def _what_cannot_travel(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> str:
    """Return a message that names the argument, enclosed variable or global that `error` is about."""
    name = getattr(fn, "__name__", repr(fn))
    parts = {f"argument {index}": value for index, value in enumerate(args)}
    parts |= {f"argument {keyword!r}": value for keyword, value in kwargs.items()}
    if isinstance(fn, FunctionType):
        parts |= {f"the enclosed variable {each!r}": value for each, value in _closure(fn).items()}
        used = [each for each in fn.__code__.co_names if each in fn.__globals__]
        parts |= {f"the global {each!r}": fn.__globals__[each] for each in used}
    for role, value in parts.items():
        try:
            dumps(value)
        except Exception as refusal:
            kind, reason = type(value).__name__, str(refusal).strip() or type(refusal).__name__
            remedy = MOVE if callable(value) else "create it inside the function"
            return f"{role} of {name}(), a {kind}, cannot be sent to a rank ({reason}); {remedy}"
    return f"{name}() cannot be sent to a rank ({error}); {MOVE}"
