"""Folders are moved into place whole: which ones may be replaced, and what a killed saver leaves behind."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from muon_tutorial.checkpoint import CheckpointManager, folders, save_checkpoint
from muon_tutorial.errors import CheckpointError

from .models import trained

SOMEBODY = "ab" * 16  # a save's id


def test_only_a_fresh_folder_is_written_to_and_only_a_checkpoint_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("years")
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", *trained(1))
    for name in ("mine", "file", "empty"):
        with pytest.raises(CheckpointError, match="is not an empty folder: choose another one"):
            save_checkpoint(tmp_path / name, *trained(1))
    for name in ("mine", "file"):
        with pytest.raises(CheckpointError, match="is not a checkpoint in this format, so it is not repl"):
            save_checkpoint(tmp_path / name, *trained(1), existing="replace")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "mine"]


def test_a_lock_waits_a_moment_for_a_holder_that_is_ending(tmp_path: Path) -> None:
    with contextlib.ExitStack() as dying:
        dying.enter_context(folders.locked(tmp_path / "a"))
        threading.Timer(0.2, dying.close).start()
        with folders.locked(tmp_path / "a", patience=30.0):
            assert os.listdir(tmp_path) == [".a.lock"]


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / f".{name}.draft-{SOMEBODY}").mkdir()
        (tmp_path / f".{name}.draft-{SOMEBODY}" / "file").touch()
    with folders.locked(tmp_path / "step-00000001"):
        CheckpointManager(tmp_path).save(3, *trained(1))
        left = sorted(os.listdir(tmp_path))
    assert left == [f".step-00000001.draft-{SOMEBODY}", ".step-00000001.lock", "latest", "step-00000003"]
    CheckpointManager(tmp_path).save(4, *trained(1))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000003", "step-00000004"]
