"""Recognizes, by type and text, errors that only report that another rank was lost or late."""

from __future__ import annotations

import re

from torch.distributed import DistError

from ..errors import CheckpointError

# Errors of torch.distributed say that another rank was late (_LATE), or that the connection to it is gone
# (_GONE). A data loader or a download may also lose a connection, so a _GONE error counts only if it comes
# from Gloo or is a DistError.
_LATE = re.compile(
    r"Timed out waiting|Application timeout|Socket [Tt]imeout|[Ww]ait timeout|monitoredBarrier|"
    r"connectFullMesh failed|Operation timed out!"
)
_GONE = re.compile(r"Connection (closed|reset|refused)|Broken pipe")
_FROM_GLOO = re.compile(r"\bgloo\b|\bGloo")
_NOISE = re.compile(r"\[/\S+:\d+\] ?|\. This is typically caused by .*")  # Gloo's file names and guesses
_LONGEST = 200


def is_about_lost_rank(error: BaseException) -> bool:
    """Return whether an error only reports that another rank was lost or late."""
    if isinstance(error, CheckpointError):
        return error.rank is not None
    if not isinstance(error, RuntimeError):
        return False
    text = text_of(error)
    if _LATE.search(text):
        return True
    return bool(_GONE.search(text)) and (isinstance(error, DistError) or bool(_FROM_GLOO.search(text)))


def text_of(error: BaseException) -> str:
    """Return what an error says, or ``""`` if its own ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return ""


def says_gone(text: str) -> bool:
    return bool(_GONE.search(text)) and not _LATE.search(text)


def in_one_line(text: str) -> str:
    """Return an error's text on one line of at most ``_LONGEST`` characters, without Gloo's file names."""
    line = _NOISE.sub("", " ".join(text.split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
