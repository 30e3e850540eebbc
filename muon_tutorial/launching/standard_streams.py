"""Handles standard input, output and error of a process, even if they are closed or broken."""

from __future__ import annotations

import contextlib
import os
import sys


def say(line: str, code: int) -> int:
    """Print a line on standard error; return the exit code."""
    print(line, file=sys.stderr, flush=True)
    return code


def fill_standard_descriptors() -> None:
    """Open the null device for each of standard input, output and error that is closed (``>&-``).

    Otherwise a file that is opened later would get such a stream's number. ``sys.stdout`` and ``sys.stderr``
    are replaced if they are None.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # os.open takes the lowest free number: ``descriptor``
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def flush_output() -> None:
    """Flush standard output and error, even if one of them is closed or broken."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
