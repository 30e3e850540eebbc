"""Writes checkpoint folders as drafts, moves complete drafts into place, and holds folders open for readers.

Everything is written to a draft next to the target, ``.NAME.draft-ID``, synced, and renamed. An older
checkpoint and the draft are exchanged in one step, if the system can do that (Linux, on local file
systems). Otherwise the older checkpoint is first renamed to ``.NAME.old-ID``. Readers use that folder as long
as the target is missing. The next save removes drafts of savers that died.

This module assumes a file system that all ranks share, with POSIX renames and ``flock`` (NFS version 4 has
both). It knows nothing about formats except that a folder with a manifest is a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from ..errors import CheckpointError

Existing = Literal["refuse", "replace", "put aside"]

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>draft|old)-(?P<id>[0-9a-f]{32})")  # only names made here
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_PATIENCE = 1.0  # Seconds to wait for a lock: a killed saver holds it until its process has ended.
_TICK = 0.01  # Seconds.
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def target_of(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder that need not exist; a symbolic link is followed."""
    target = Path(path).absolute()
    target = target.resolve() if target.is_symlink() else target
    if not target.name:
        raise CheckpointError(f"{target} cannot be a checkpoint: name a folder inside it")
    return target


@contextlib.contextmanager
def locked(target: Path, to: str = "saving to", patience: float = _PATIENCE) -> Iterator[None]:
    """Lock a folder or file, which need not exist, for writing. The lock ends when the process ends.

    If another process holds the lock, this waits for it, at most ``patience`` seconds.

    Raises:
        CheckpointError: another process still holds the lock. The message names that process and says what it
            is doing: ``to``, such as "saving to", and the target.
    """
    path = target.with_name(f".{target.name}.lock")
    descriptor = _open_lock(path, f"{to} {target}", patience)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):  # unlocks even if a fork has the descriptor open
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _open_lock(path: Path, does: str, patience: float) -> int:
    deadline = time.monotonic() + patience
    while True:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                with contextlib.suppress(OSError):  # on a full disk, the lock works without this text
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").partition("\n")[0]
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(f"{holder or 'another process'} is {does}") from None
        except FileNotFoundError:
            pass  # the lock's holder has removed the file
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # opened anew in the next round, because the holder may remove the file
        time.sleep(_TICK)


def make_draft(target: Path, save_id: str, existing: Existing, manifest: str) -> Path:
    """Make an empty folder for the draft, next to the target, and remove what dead savers left there.

    Must be called under ``locked(target)``.

    Raises:
        CheckpointError: the target exists and may not be replaced.
    """
    remove_leftovers(target)
    if os.path.lexists(target) and not _is_empty_folder(target):
        if existing == "refuse":
            raise CheckpointError(
                f"{target} is not an empty folder: choose another one, or pass "
                'existing="replace" to replace an older checkpoint'
            )
        if not (target / manifest).is_file():
            if existing != "put aside":
                raise CheckpointError(f"{target} is not a checkpoint in this format, so it is not replaced")
            put_aside(target, save_id)
    draft = target.with_name(f".{target.name}.draft-{save_id}")
    draft.mkdir()
    return draft


def put_aside(target: Path, save_id: str) -> Path:
    """Rename a damaged checkpoint, or another folder with a checkpoint's name. It is not deleted."""
    aside = target.with_name(f"damaged-{target.name}-{save_id[:8]}")
    os.rename(stepped_aside(target) or target, aside)
    return aside


def commit(draft: Path, target: Path) -> None:
    """Move a draft into the target's place. Must be called under ``locked(target)``."""
    sync_folder(draft)
    if not os.path.lexists(target) or _is_empty_folder(target):
        os.rename(draft, target)
        return
    try:
        _exchange(draft, target)
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
        aside = draft.with_name(draft.name.replace(".draft-", ".old-"))
        os.rename(target, aside)
        os.rename(draft, target)


def stepped_aside(target: Path) -> Path | None:
    """The path of an old checkpoint, if a saver renamed it and died before a new one took its place."""
    if os.path.lexists(target):
        return None
    kinds = _leftovers(target)
    return next(
        (path for (kind, its), path in kinds.items() if kind == "old" and ("draft", its) in kinds), None
    )


def names_in(folder: Path) -> set[str]:
    """The names in a folder, and the former names of checkpoints that savers renamed to ``.NAME.old-ID``."""
    names = os.listdir(folder)
    found = filter(None, map(_LEFTOVER.fullmatch, names))
    return {*names, *(match["name"] for match in found if match["kind"] == "old")}


def remove_leftovers(target: Path) -> None:
    """Remove the drafts of dead savers; rename an old checkpoint back if no new one took its place.

    Must be called under ``locked(target)``, which shows that no saver is alive.
    """
    if (aside := stepped_aside(target)) is not None:
        os.rename(aside, target)
    for path in _leftovers(target).values():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove(target: Path, save_id: str) -> None:
    """Rename a checkpoint, then remove it, so that no reader finds half a checkpoint."""
    aside = target.with_name(f".{target.name}.draft-{save_id}")
    os.rename(target, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_all_leftovers(folder: Path) -> None:
    """Remove the drafts of dead savers for all targets in this folder; drafts of living savers stay."""
    found = (_LEFTOVER.fullmatch(name) for name in os.listdir(folder))
    for name in {match["name"] for match in found if match}:
        with contextlib.suppress(CheckpointError), locked(folder / name, patience=0.0):
            remove_leftovers(folder / name)


def replace_file(target: Path, data: bytes, save_id: str) -> None:
    """Replace a file in one step, and sync it. Must be called under ``locked(target)``."""
    remove_leftovers(target)
    draft = target.with_name(f".{target.name}.draft-{save_id}")
    write_file(draft, data)
    os.replace(draft, target)
    sync_folder(target.parent)


def _leftovers(target: Path) -> dict[tuple[str, str], Path]:
    """Paths of the target's drafts and renamed checkpoints, by kind and save id."""
    if not target.parent.is_dir():
        return {}
    found = (_LEFTOVER.fullmatch(name) for name in os.listdir(target.parent))
    mine = [match for match in found if match and match["name"] == target.name]
    return {(match["kind"], match["id"]): target.parent / match[0] for match in mine}


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _exchange(one: Path, other: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))


def read_file(path: Path, most: int) -> bytes:
    """Read a plain file of at most ``most`` bytes. Other files are refused, because reading may never end."""
    with _plain(os.open(path, _READING), path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return data


def _plain(descriptor: int, path: Path) -> IO[bytes]:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def write_file(path: Path, data: bytes) -> None:
    """Write a file and sync it to disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """An open folder, whose files can be read even after another folder has taken its place."""

    path: Path
    descriptor: int

    def sizes(self) -> dict[str, int]:
        """The size of each entry in bytes; -1 if the entry is not a plain file."""
        stat_of = partial(os.stat, dir_fd=self.descriptor, follow_symlinks=False)
        found = {name: stat_of(name) for name in os.listdir(self.descriptor)}
        return {name: it.st_size if stat.S_ISREG(it.st_mode) else -1 for name, it in found.items()}

    def open(self, name: str) -> IO[bytes]:
        """Open a plain file in the folder for reading; never follows a symbolic link."""
        flags = _READING | os.O_NOFOLLOW
        return _plain(os.open(name, flags, dir_fd=self.descriptor), self.path / name)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[OpenFolder]:
    """Open a checkpoint's folder. If the folder is missing, open the folder that ``stepped_aside`` finds."""
    try:
        descriptor = os.open(stepped_aside(path) or path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no checkpoint folder {path}") from None
    try:
        yield OpenFolder(path, descriptor)
    finally:
        os.close(descriptor)
