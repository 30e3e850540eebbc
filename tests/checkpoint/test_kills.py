"""A saver killed anywhere leaves the old checkpoint or the new one, and the next save succeeds."""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

from muon_tutorial.checkpoint import CheckpointManager, folders, load_checkpoint, piece_files, save_checkpoint
from muon_tutorial.errors import CheckpointError, RankFailedError
from muon_tutorial.launching.launch import launch

from ..configs.setups import error_of
from ..exhaustive import left_out
from .models import Pair, bits, fresh, same, trained

Bits = dict[str, Tensor]
OLD, NEW = trained(2), trained(4)
OTHER = trained(3)


# --- savers that are killed at the n-th file system call; a hundred take seconds, because they are forks ----

SAVED, REFUSED, BROKEN = 0, 3, 4
"""The exit codes of a saver that is not killed: it saved, it was refused, or it had another error."""

# Each file system call of a save is a point. A write has a second point, half way through.
_CALLS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "close")),
    (builtins, "open"),
    (fcntl, "flock"),
    (folders, "_exchange"),
)


@contextlib.contextmanager
def counted(act: Callable[[int], None]) -> Iterator[list[tuple[str, str]]]:
    """Call ``act`` with the number of each point that is reached; yields the points (call, target)."""
    passed: list[tuple[str, str]] = []

    def point(name: str, what: Any) -> None:
        passed.append((name, str(what)))
        act(len(passed))

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            point(name, args[0])
            return real(*args, **kwargs)

        return call

    def write_to(file: Any, data: memoryview) -> None:
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            point("write", "")
            file.write(part)
            file.flush()

    real_write = piece_files.write_to
    before = [(where, name, getattr(where, name)) for where, name in _CALLS]
    try:
        for where, name, real in before:
            setattr(where, name, counting(name, real))
        piece_files.write_to = write_to
        yield passed
    finally:
        piece_files.write_to = real_write
        for where, name, real in before:
            setattr(where, name, real)


def passed_by(save: Callable[[], object]) -> list[str]:
    """The names of the calls at the points that a save passes, in order."""
    with counted(lambda number: None) as passed:
        save()
    return [name for name, _ in passed]


def forked(save: Callable[[], object], signal_at: int | None = None, signum: int = signal.SIGKILL) -> int:
    """Start a saver; returns its process id. If ``signal_at`` is given, it signals itself at that point."""

    def act(number: int) -> None:
        if number == signal_at:
            os.kill(os.getpid(), signum)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
        child = os.fork()
    if child:
        return child
    code = BROKEN
    try:
        with counted(act):
            save()
        code = SAVED
    except CheckpointError:
        code = REFUSED
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    """Wait for a saver; returns one of the codes above, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass(frozen=True, slots=True)
class Scene:
    """The state before a save, a function that saves, and one that loads."""

    before: Callable[[Path], object]
    save: Callable[[Path, Pair], object]
    load: Callable[[Path, Pair], object]
    left: frozenset[str]  # the names in the folder after a successful save


def save_to(folder: Path, pair: Pair) -> None:
    save_checkpoint(folder / "a", *pair)


def replace_at(folder: Path, pair: Pair) -> None:
    save_checkpoint(folder / "a", *pair, existing="replace")


def load_from(folder: Path, pair: Pair) -> None:
    load_checkpoint(folder / "a", *pair)


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        CheckpointManager(folder).save(step, *OLD)


STEPS = frozenset({"latest", "step-00000002", "step-00000003"})
SCENES = {
    "fresh": Scene(lambda folder: None, save_to, load_from, frozenset("a")),
    "an empty folder": Scene(lambda folder: (folder / "a").mkdir(), save_to, load_from, frozenset("a")),
    "in place of another": Scene(lambda folder: save_to(folder, OLD), replace_at, load_from, frozenset("a")),
    "a third step": Scene(
        lambda folder: save_steps(folder, 1, 2),
        lambda folder, pair: CheckpointManager(folder).save(3, *pair),
        lambda folder, pair: CheckpointManager(folder).load(*pair),
        STEPS,
    ),
    "a step again, in a thread": Scene(
        lambda folder: save_steps(folder, 1, 2, 3),
        lambda folder, pair: CheckpointManager(folder).save(3, *pair, wait=False).wait(),
        lambda folder, pair: CheckpointManager(folder).load(*pair),
        STEPS,
    ),
}


@pytest.fixture(params=["exchange", "two renames"])
def renames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both ways to replace a folder by another."""
    if request.param == "two renames":
        cannot = Mock(side_effect=OSError(errno.EINVAL, "Invalid argument"))
        monkeypatch.setattr(folders, "_exchange", cannot)


def loaded(scene: Scene, folder: Path) -> Bits | None:
    """The state that a load gives now; None if there is no checkpoint."""
    pair = fresh()
    before = bits(*pair)
    told = error_of(lambda: scene.load(folder, pair))
    if told == ("nothing", ""):
        return bits(*pair)
    assert told[0] == "CheckpointError"
    assert "there is no checkpoint folder" in told[1] or "holds no" in told[1]
    assert same(before, bits(*pair))
    return None


def check_old_or_new(scene: Scene, folder: Path, had: Bits | None, told_saved: bool) -> None:
    """Assert that the old or the new checkpoint is there, and that a retry leaves only the new one."""
    found = loaded(scene, folder)
    is_new = found is not None and same(found, bits(*NEW))
    is_old = (found is None) if had is None else (found is not None and same(found, had))
    assert is_new or is_old
    assert is_new or not told_saved
    # A retry must replace the checkpoint if the killed save completed it.
    again = replace_at if scene.save is save_to and is_new else scene.save
    again(folder, NEW)
    found = loaded(scene, folder)
    assert found is not None
    assert same(found, bits(*NEW))
    assert set(os.listdir(folder)) == scene.left


def prepared(scene: Scene, folder: Path) -> Bits | None:
    folder.mkdir()
    scene.before(folder)
    return loaded(scene, folder)


def kill_at_points(scene: Scene, root: Path, points: Callable[[list[str]], list[int]]) -> int:
    """Kill a saver at each of these points, beginning each time from the same state."""
    had = prepared(scene, root / "template")
    shutil.copytree(root / "template", root / "counted")
    chosen = points(passed_by(lambda: scene.save(root / "counted", NEW)))
    for number in chosen:
        folder = root / str(number)
        shutil.copytree(root / "template", folder)
        end = end_of(forked(lambda folder=folder: scene.save(folder, NEW), number))  # type: ignore[misc]
        assert end == -signal.SIGKILL, number
        check_old_or_new(scene, folder, had, told_saved=False)
        shutil.rmtree(folder)
    return len(chosen)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("renames")
@pytest.mark.parametrize("kills", ["a few", left_out("at every call, and within some of the writes")])
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_leaves_the_old_or_the_new(name: str, kills: str, tmp_path: Path) -> None:
    """The saver is killed at four points or, exhaustively, at up to twenty writes and all other calls."""
    draw = random.Random(name)

    def points(passed: list[str]) -> list[int]:
        if kills == "a few":
            return sorted(draw.sample(range(1, len(passed) + 1), 4))
        writes = [number for number, call in enumerate(passed, 1) if call == "write"]
        assert writes
        kept = draw.sample(writes, min(20, len(writes)))
        return [number for number, call in enumerate(passed, 1) if call != "write" or number in kept]

    assert kill_at_points(SCENES[name], tmp_path, points) >= 4


def stopped_within(save: Callable[[], object], point: int) -> int:
    """Start a saver that stops at a point; returns its process id."""
    child = forked(save, point, signal.SIGSTOP)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return child


def points_under_lock(scene: Scene, root: Path) -> tuple[int, int]:
    """The first point at which a saver holds its lock, and the last."""
    prepared(scene, root / "counted")
    with counted(lambda number: None) as passed:
        scene.save(root / "counted", NEW)
    unlocks = [at for at, (name, what) in enumerate(passed, 1) if name == "unlink" and ".lock" in what]
    return [name for name, _ in passed].index("flock") + 2, unlocks[-1]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("fresh", "goes on"),
        ("in place of another", "is killed"),
        ("a third step", "goes on"),
        ("a third step", "is killed"),
    ],
)
def test_of_two_savers_one_wins_and_the_other_is_told(name: str, end: str, tmp_path: Path) -> None:
    scene = SCENES[name]
    first, last = points_under_lock(scene, tmp_path)
    draw = random.Random(name + end)
    for number in (first, draw.randrange(first + 1, last), last):
        folder = tmp_path / str(number)
        had = prepared(scene, folder)
        child = stopped_within(lambda folder=folder: scene.save(folder, NEW), number)  # type: ignore[misc]
        with pytest.raises(
            CheckpointError, match=rf"process {child} on \S+ is saving to|is not an empty folder"
        ):
            scene.save(folder, OTHER)
        os.kill(child, signal.SIGCONT if end == "goes on" else signal.SIGKILL)
        assert end_of(child) == (SAVED if end == "goes on" else -signal.SIGKILL)
        check_old_or_new(scene, folder, had, told_saved=end == "goes on")


# --- real ranks ---------------------------------------------------------------------------------------------


def save_and_die(rank: int, folder: str, victim: int, share: float) -> None:
    """Replace the checkpoint. The rank ``victim`` is killed after this share of the save's points."""
    calls = passed_by(lambda: save_checkpoint(Path(folder, "counted"), *NEW))
    point = max(1, round(share * len(calls)))

    def act(number: int) -> None:
        if number == point and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    with counted(act):
        save_checkpoint(Path(folder, "a"), *NEW, existing="replace")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, pytest.param(24, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_leaves_the_old_or_the_new(rounds: int, tmp_path: Path) -> None:
    scene, draw = SCENES["in place of another"], random.Random(rounds)
    for number in range(rounds):
        folder = tmp_path / str(number)
        had = prepared(scene, folder)
        faults = str(folder), number % 2, draw.uniform(0.05, 0.95)
        with pytest.raises(RankFailedError) as caught:
            launch(save_and_die, 2, args=faults, timeout=2.0, output="quiet")
        assert caught.value.rank == number % 2
        shutil.rmtree(folder / "counted")
        check_old_or_new(scene, folder, had, told_saved=False)
