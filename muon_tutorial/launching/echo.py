"""Errors that only say that another rank was lost, or kept this one waiting: known by torch's words."""

from __future__ import annotations

import re

# What torch.distributed says when another rank failed, or did not come.
_ECHO = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|Application timeout|Socket [Tt]imeout|"
    r"[Ww]ait timeout|monitoredBarrier|connectFullMesh failed"
)
_CLOSED = re.compile(r"Connection (closed|reset)|Broken pipe")
_NOISE = re.compile(r"\[/\S+:\d+\] ?|\. This is typically caused by .*")  # Gloo's own file names and guesses
_LONGEST = 200  # characters


def is_echo(error: BaseException) -> bool:
    """Return whether an error is about another rank."""
    return isinstance(error, RuntimeError) and bool(_ECHO.search(str(error)))


def says_closed(text: str) -> bool:
    """Return whether an echo says that the other rank's process is gone, not only late."""
    return bool(_CLOSED.search(text))


def in_one_line(text: str) -> str:
    """Return an error's text on one line of bounded length, without Gloo's own file names."""
    line = _NOISE.sub("", " ".join(text.split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
