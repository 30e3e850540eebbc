"""Finds where a thread is or where an error came from: the innermost line that is not a library's."""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Iterable
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (sysconfig.get_path("stdlib"), _TORCH, os.path.dirname(__file__))
_COMMUNICATION = os.path.join(_TORCH, "distributed")
_LIVE_WORLD = os.path.join(os.path.dirname(os.path.dirname(__file__)), "worlds", "live.py")


def own_line(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return file, line and text of the first frame of a stack that is not a library's; ``""`` if none is.

    `stack` has the innermost frame first, as ``traceback.walk_stack`` yields it.
    """
    for frame, number in stack:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            source = linecache.getline(code.co_filename, number).strip()
            place = f'File "{code.co_filename}", line {number}, in {code.co_name}'
            return f"{place}: {source}" if source else place
    return ""


def is_communicating(stack: Iterable[tuple[FrameType, int]]) -> bool:
    """Return whether a stack passes through torch.distributed, or through a live world's ``wait``."""
    return any(
        code.co_filename.startswith(_COMMUNICATION)
        or (code.co_filename == _LIVE_WORLD and code.co_name == "wait")
        for code in (frame.f_code for frame, _ in stack)
    )
