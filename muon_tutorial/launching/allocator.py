"""A rank keeps memory that it freed for its next step, where the C library can be told so."""

from __future__ import annotations

import ctypes
import os
import sys

KEPT = 256 << 20
"""Bytes that a rank may keep."""
LARGEST = 32 << 20
"""Bytes of the largest tensor that is made in memory of this kind; glibc allows no more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed: every page that it gives back is zeroed by the system when it is
    needed again, a quarter of a step whose buckets have some megabytes. Whoever sets MALLOC_… decides it.
    """
    decided = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not decided:
        mallopt(_MMAP_THRESHOLD, LARGEST)
        mallopt(_TRIM_THRESHOLD, KEPT)
