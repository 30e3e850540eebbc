"""Damages checkpoints, as an accident would, before one process loads them.

To this module a checkpoint is just a folder of files. ``tests/checkpoint/test_untrusted.py`` forges them.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from muon_tutorial import Grid, LiveWorld, TutorialError, build_mesh, load_checkpoint, save_checkpoint

from . import saved_job
from .case import Case, Seen
from .saved_job import OTHER

OLD, NEW = 1, 2  # steps after which a job saves


def prepare(rank: int, root: str) -> None:
    """Save two states of a job, after ``OLD`` and after ``NEW`` steps, from four ranks."""
    world = LiveWorld(build_mesh(Grid.of(dp=4)))
    model, both = saved_job.build("zero1 all", world)
    for first, last in ((0, OLD), (OLD, NEW)):
        saved_job.train(model, both, first, last)
        save_checkpoint(Path(root, f"saved-{last}"), model, both, extra={"step": last})


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _a_file(folder: Path, dice: Random) -> Path:
    """A random file; larger ones are more likely."""
    found = files(folder)
    return dice.choices(found, [path.stat().st_size + 1 for path in found])[0]


def _flip_a_bit(folder: Path, other: Path, dice: Random) -> None:
    path = _a_file(folder, dice)
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _truncate(folder: Path, other: Path, dice: Random) -> None:
    path = dice.choice(files(folder))
    os.truncate(path, dice.randrange(path.stat().st_size))


def _append(folder: Path, other: Path, dice: Random) -> None:
    with open(dice.choice(files(folder)), "ab") as file:
        file.write(dice.randbytes(dice.randint(1, 5000)))


def _zero_a_block(folder: Path, other: Path, dice: Random) -> None:
    """Set a block to zeros, as a file system that has lost it would."""
    path = _a_file(folder, dice)
    data = bytearray(path.read_bytes())
    start = dice.randrange(0, len(data), 512)
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def _take_from_the_other(folder: Path, other: Path, dice: Random) -> None:
    """Replace a file by the file of that name in the other save."""
    path = dice.choice(files(folder))
    newer = other / path.relative_to(folder)
    shutil.copy(newer if newer.exists() else dice.choice(files(other)), path)


def _exchange(folder: Path, other: Path, dice: Random) -> None:
    """Exchange the names of two files of one save."""
    one, two = dice.sample(files(folder), 2)
    aside = one.with_name(one.name + ".aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


TAMPERINGS: Mapping[str, Callable[[Path, Path, Random], None] | None] = {
    "a bit flips in a file": _flip_a_bit,
    "a file is cut off": _truncate,
    "bytes are appended to a file": _append,
    "a block of a file is zeroed": _zero_a_block,
    "a file is missing": lambda folder, other, dice: dice.choice(files(folder)).unlink(),
    "a file comes from a newer save": _take_from_the_other,
    "two files change names": _exchange,
    "the disk is full while saving": None,
}
"""Changes to a checkpoint of four ranks before one process loads it; None: the save itself is disturbed."""


def tampered(case: Case, saves: Path, folder: Path) -> Seen:
    """Tamper with a copy of a checkpoint in ``folder``, load it, and record the result."""
    begun = time.monotonic()
    victim, other = folder / "checkpoint", saves / f"saved-{NEW}"
    tamper = TAMPERINGS[case.kind]
    if tamper is None:
        return _full_disk(case, victim, begun)
    shutil.copytree(saves / f"saved-{OLD}", victim)
    tamper(victim, other, case.random)
    return _loaded(victim, begun)


def _loaded(folder: Path, begun: float) -> Seen:
    """Load. After a refusal the tensors must be unchanged; otherwise they must equal the oracle's."""
    model, both = saved_job.build("", None)
    model.fill(OTHER)
    before = saved_job.digest(model, both)
    try:
        with _logged() as logged:
            load_checkpoint(folder, model, both)
    except Exception as error:
        moved = saved_job.digest(model, both) != before
        seen = _said(error, begun, half_loaded=moved)
        return replace(seen, message=f"{seen.message}\n{logged.getvalue()}".strip(), line_due=True)
    return Seen(equal=saved_job.holds(model, both, OLD), seconds=time.monotonic() - begun)


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collect what libraries log, because a user at a terminal would see it."""
    handler = logging.StreamHandler(found := io.StringIO())
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _said(error: Exception, begun: float, **more: Any) -> Seen:
    named, kind = isinstance(error, TutorialError), type(error).__name__
    said = str(error) or repr(error)
    return Seen(message=said, message_type=kind, named=named, seconds=time.monotonic() - begun, **more)


def _full_disk(case: Case, folder: Path, begun: float) -> Seen:
    """Save with a limit on file size, which a writer cannot distinguish from a full disk."""
    model, both = saved_job.trained("", None, OLD)
    seen = Seen(seconds=0.0)
    try:
        with _files_end_at(case.random.randrange(1, 2000)):
            save_checkpoint(folder, model, both, extra={"step": OLD})
    except Exception as error:
        seen = _said(error, begun)
    try:
        if seen.message:
            save_checkpoint(folder, model, both, extra={"step": OLD})
    except Exception as error:
        return Seen(message=seen.message, named=seen.named, retry_refused=f"{type(error).__name__}: {error}")
    loaded = _loaded(folder, begun)
    if loaded.message or not loaded.equal:
        return loaded
    return seen if seen.message else loaded


@contextmanager
def _files_end_at(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
