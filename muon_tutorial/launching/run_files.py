"""The three files of a launch: what the ranks must do, the store where they meet, and their phases.

On Linux the files are in memory, without a name, so that they disappear even if all processes are killed. On
other systems they are in a temporary folder, which the launching process removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import LaunchError
from .phase_and_line import SLOT

_NAMES = ("spec", "store", "phases")
_OPEN_FILES = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths that open a launch's files, and the files' descriptors (empty if the files have names)."""

    spec: str
    store: str
    phases: str
    descriptors: tuple[int, ...] = ()

    @classmethod
    def behind(cls, descriptors: tuple[int, ...]) -> RunFiles:
        """Return the files behind three descriptors of this process."""
        spec, store, phases = (f"{_OPEN_FILES}/{descriptor}" for descriptor in descriptors)
        return cls(spec, store, phases, descriptors)

    def discard(self) -> None:
        """Close or remove the files: called by the launching process or, after its end, by a rank."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        if not self.descriptors:
            shutil.rmtree(os.path.dirname(self.spec), ignore_errors=True)


@contextlib.contextmanager
def run_files(spec: bytes, world_size: int) -> Iterator[RunFiles]:
    """Make the files of one launch, write the spec, and leave phases empty; remove the files on exit.

    Raises:
        LaunchError: this is Linux without /proc, through which ranks open the files.
    """
    if sys.platform == "linux":
        if not os.path.isdir(_OPEN_FILES):
            raise LaunchError("/proc is hidden or not mounted, and ranks need it: mount -t proc proc /proc")
        files = RunFiles.behind(tuple(os.memfd_create(f"muon-{name}") for name in _NAMES))
    else:
        folder = tempfile.mkdtemp(prefix="muon-launch-")
        files = RunFiles(*(os.path.join(folder, name) for name in _NAMES))
    try:
        for path, data in ((files.spec, spec), (files.phases, bytes(SLOT * world_size))):
            with open(path, "wb") as file:
                file.write(data)
        yield files
    finally:
        files.discard()
