"""Checkpoint folders on disk: made aside and moved into place whole, and read as one, whoever moves them.

Everything is written to a draft beside the target, ``.NAME.draft-ID``, synced, and renamed. A checkpoint
that is to be replaced changes places with the draft in one step, where the system can do that (Linux, on
local file systems); elsewhere it steps aside to ``.NAME.old-ID`` first, and whoever finds it there takes it
for the target. Drafts of savers that died are removed by the next one.

It assumes a file system that all ranks share, with POSIX renames and ``flock`` (of NFS: version 4). It knows
no format, but that a folder with a manifest is a checkpoint.
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

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>draft|old)-(?P<id>[0-9a-f]{32})")  # of nobody else
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_PATIENCE = 1.0  # seconds for a saver that was killed, whose process is still ending, to give up its lock
_TICK = 0.01  # seconds
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def target_of(path: str | os.PathLike[str]) -> Path:
    """The folder that a user names, which need not exist: what a link points to, in the place of the link."""
    target = Path(path).absolute()
    target = target.resolve() if target.is_symlink() else target
    if not target.name:
        raise CheckpointError(f"{target} is no place for a checkpoint: name a folder in it")
    return target


@contextlib.contextmanager
def locked(target: Path, to: str = "saving to", patience: float = _PATIENCE) -> Iterator[None]:
    """Hold the right to write to ``target``, a folder or file that need not exist. It ends with the process.

    One that is held is waited for, ``patience`` seconds.

    Raises:
        CheckpointError: another process holds it; says which, and what it does (``to``).
    """
    path = target.with_name(f".{target.name}.lock")
    descriptor = _open_lock(path, f"{to} {target}", patience)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):  # also where a forked process holds the descriptor
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
            if os.fstat(descriptor).st_ino == _inode(path):
                with contextlib.suppress(OSError):  # a full disk: its name only
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").partition("\n")[0]
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(f"{holder or 'another process'} is {does}") from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder may remove the file in between
        time.sleep(_TICK)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def make_draft(target: Path, save_id: str, existing: Existing, manifest: str) -> Path:
    """Make an empty folder to write to, beside the target, and remove what dead savers left there.

    To be called under ``locked(target)``.

    Raises:
        CheckpointError: what is at the target may not be replaced.
    """
    recover(target)
    remove_leftovers(target)
    if os.path.lexists(target) and not _is_empty_folder(target):
        if existing == "refuse":
            raise CheckpointError(
                f"{target} is not an empty folder: a checkpoint goes into a fresh one, or pass "
                'existing="replace" to put it in the place of an older checkpoint'
            )
        if existing == "put aside":
            if not (target / manifest).is_file():
                put_aside(target, save_id)
        elif not (target / manifest).is_file():
            raise CheckpointError(f"{target} is no checkpoint of this format, and is not replaced")
    draft = target.with_name(f".{target.name}.draft-{save_id}")
    draft.mkdir()
    return draft


def put_aside(target: Path, save_id: str) -> Path:
    """Rename what passes for a checkpoint and is none, so that it is in nobody's way, and is not lost."""
    aside = target.with_name(f"damaged-{target.name}-{save_id[:8]}")
    os.rename(target, aside)
    return aside


def commit(draft: Path, target: Path) -> None:
    """Put a draft in the target's place, at once. To be called under ``locked(target)``, then ``settle``."""
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


def settle(target: Path) -> None:
    """See a checkpoint that has taken its place onto the disk for good, and remove the one before it."""
    sync_folder(target.parent)
    remove_leftovers(target)


def recover(target: Path) -> None:
    """Put back a checkpoint that stepped aside for one that never came. Under ``locked(target)``."""
    aside = stepped_aside(target)
    if aside is not None:
        os.rename(aside, target)


def stepped_aside(target: Path) -> Path | None:
    """Where the target is, if it stepped aside and its saver died before the new one took its place."""
    if os.path.lexists(target):
        return None
    kinds = _leftovers(target)
    return next(
        (path for (kind, its), path in kinds.items() if kind == "old" and ("draft", its) in kinds), None
    )


def remove_leftovers(target: Path) -> None:
    """Remove the drafts of dead savers. To be called under ``locked(target)``: then no saver lives."""
    for path in _leftovers(target).values():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove(target: Path, save_id: str) -> None:
    """Remove a checkpoint so that no part of it ever passes for a whole one."""
    aside = target.with_name(f".{target.name}.draft-{save_id}")
    os.rename(target, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_all_leftovers(folder: Path) -> None:
    """Remove the drafts of dead savers, whatever their targets in this folder; those of living ones stay."""
    found = (_LEFTOVER.fullmatch(name) for name in os.listdir(folder))
    for name in {match["name"] for match in found if match}:
        with contextlib.suppress(CheckpointError), locked(folder / name, patience=0.0):
            recover(folder / name)
            remove_leftovers(folder / name)


def replace_file(target: Path, data: bytes, save_id: str) -> None:
    """Put a file in another's place, at once and for good. To be called under ``locked(target)``."""
    remove_leftovers(target)
    draft = target.with_name(f".{target.name}.draft-{save_id}")
    write_file(draft, data)
    os.replace(draft, target)
    sync_folder(target.parent)


def _leftovers(target: Path) -> dict[tuple[str, str], Path]:
    """By kind and save id."""
    if not target.parent.is_dir():
        return {}
    found = (_LEFTOVER.fullmatch(name) for name in os.listdir(target.parent))
    mine = [match for match in found if match and match["name"] == target.name]
    return {(match["kind"], match["id"]): target.parent / match[0] for match in mine}


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _exchange(one: Path, other: Path) -> None:
    """Have two paths change places in one step."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))


def read_file(path: Path, most: int) -> bytes:
    """Read a plain file of at most so many bytes; a pipe or a device would be waited for, or never end."""
    try:
        with _plain(os.open(path, _READING), path) as file:
            data = file.read(most + 1)
    except CheckpointError as error:
        raise OSError(errno.EINVAL, "not a plain file", str(path)) from error
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return data


def _plain(descriptor: int, path: Path) -> IO[bytes]:
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise CheckpointError(f"{path} is no plain file")
    return file


def write_file(path: Path, data: bytes) -> None:
    """Write a file and see it onto the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """See the names in a folder onto the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder held open: its files are those it had, even if another takes its place meanwhile."""

    path: Path
    descriptor: int

    def sizes(self) -> dict[str, int]:
        """The size of each entry in bytes; -1 of what is no plain file."""
        stat_of = partial(os.stat, dir_fd=self.descriptor, follow_symlinks=False)
        found = {name: stat_of(name) for name in os.listdir(self.descriptor)}
        return {name: it.st_size if stat.S_ISREG(it.st_mode) else -1 for name, it in found.items()}

    def open(self, name: str) -> IO[bytes]:
        """Open a plain file in the folder to read; never what a link points to."""
        flags = _READING | os.O_NOFOLLOW
        return _plain(os.open(name, flags, dir_fd=self.descriptor), self.path / name)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[OpenFolder]:
    """Hold a folder open, or the one that stepped aside from there."""
    try:
        descriptor = os.open(stepped_aside(path) or path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no checkpoint folder {path}") from None
    try:
        yield OpenFolder(path, descriptor)
    finally:
        os.close(descriptor)
