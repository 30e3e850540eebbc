"""A run folder: the settings, one line per step, the result and the picture of one run.

Only the launching process writes to the folder; under torchrun, only rank 0. The folder is created together
with its settings, or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.folders import locked, read_file, replace_file
from ..errors import RunFolderError

if TYPE_CHECKING:  # matplotlib takes a while
    from matplotlib.figure import Figure

METRICS = "metrics.jsonl"
"""The file of a run's steps, one line each."""

RESULT = "result.json"
"""The file of a run's result; it exists if the run is complete."""

_LARGEST_SETTINGS, _LARGEST = 1 << 20, 1 << 30  # the most bytes that are read of settings, and of records


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that belongs to one run."""

    path: Path

    @classmethod
    def create(cls, path: Path, settings: Mapping[str, Any]) -> RunFolder:
        """Make the folder, or fill an empty one, with ``settings.json``, in one atomic step.

        Raises:
            RunFolderError: the path cannot be written, or already holds something.
        """
        with _unwritable(path):
            if path.is_dir() and any(path.iterdir()):
                raise in_use(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            try:
                draft.chmod(0o755)
                (draft / "settings.json").write_text(_as_json(settings), encoding="utf-8")
                os.rename(draft, path)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return cls(path)

    @classmethod
    def reopen(cls, path: Path) -> tuple[RunFolder, dict[str, Any]]:
        """The folder of an earlier run, and its settings."""
        try:
            settings = json.loads(read_file(path / "settings.json", _LARGEST_SETTINGS))
        except (OSError, ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise RunFolderError(f"{path} is not a run folder: it has no readable settings.json")
        return cls(path), settings

    def held(self) -> AbstractContextManager[None]:
        """Lock the folder, so that only one job trains in it."""
        return locked(self.path, "training in")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one record to a file of JSON lines."""
        with _unwritable(self.path), open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self, name: str) -> list[dict[str, Any]]:
        """The readable records of a file of JSON lines; a truncated last line is left out."""
        with _unwritable(self.path):
            path = self.path / name
            text = read_file(path, _LARGEST).decode(errors="replace") if path.exists() else ""
        return [record for line in text.split("\n")[:-1] if (record := _as_record(line)) is not None]

    def write(self, name: str, content: Mapping[str, Any] | str) -> None:
        """Write a file, completely or not at all, and sync it; data is written as JSON."""
        with _unwritable(self.path):
            text = content if isinstance(content, str) else _as_json(content)
            replace_file(self.path / name, text.encode(), uuid.uuid4().hex)

    def draw(self, name: str, figure: Figure) -> None:
        with _unwritable(self.path):
            figure.savefig(self.path / name, dpi=150)


def in_use(path: Path) -> RunFolderError:
    return RunFolderError(f"the run folder {path} is already in use; choose another with --out")


def unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, … that does not exist."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], others) if not candidate.exists())


def _as_record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


@contextlib.contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise RunFolderError(f"cannot make the run folder {path}: there is a file with this name") from None
    except OSError as error:
        raise RunFolderError(f"cannot write the run folder {path}: {error.strerror or error}") from None
