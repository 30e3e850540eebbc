"""The three files of a run: the job, the ranks' store, and the board of phases.

On Linux they live in memory, without a name, so that not even SIGKILL of a whole process group leaves one
behind. Elsewhere they lie in one temporary folder, which the launching process removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from .phase import SLOT


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths that open the run's files, and the descriptors behind them (none where they have names)."""

    job: str
    store: str
    board: str
    descriptors: tuple[int, ...] = ()

    @classmethod
    def behind(cls, descriptors: tuple[int, ...]) -> RunFiles:
        """Return the files behind three descriptors of this process."""
        job, store, board = (f"/proc/self/fd/{descriptor}" for descriptor in descriptors)
        return cls(job, store, board, descriptors)

    def discard(self) -> None:
        """Remove the folder of named files, when the launching process can no longer do it."""
        if not self.descriptors:
            shutil.rmtree(os.path.dirname(self.job), ignore_errors=True)


@contextlib.contextmanager
def run_files(job: bytes, world_size: int) -> Iterator[RunFiles]:
    """Lay out the files of one run, the job written and every phase empty; they are gone on exit."""
    with _unnamed_files() if sys.platform == "linux" else _named_files() as files:
        _write(files.job, job)
        _write(files.board, bytes(SLOT * world_size))
        yield files


@contextlib.contextmanager
def _unnamed_files() -> Iterator[RunFiles]:
    descriptors = tuple(os.memfd_create(f"muon-{name}") for name in ("job", "store", "board"))
    try:
        yield RunFiles.behind(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def _named_files() -> Iterator[RunFiles]:
    folder = tempfile.mkdtemp(prefix="muon-launch-")
    try:
        job, store, board = (os.path.join(folder, name) for name in ("job", "store", "board"))
        yield RunFiles(job, store, board)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
