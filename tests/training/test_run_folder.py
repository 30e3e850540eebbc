"""A run folder appears whole or not at all, and belongs to one run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muon_tutorial.errors import RunFolderError
from muon_tutorial.training.run_folder import RunFolder, unused


@pytest.mark.parametrize("stands", [False, True])
def test_a_new_or_empty_folder_holds_its_settings(stands: bool, tmp_path: Path) -> None:
    if stands:
        (tmp_path / "a" / "run").mkdir(parents=True)
    RunFolder.create(tmp_path / "a" / "run", {"lr": 1})
    assert json.loads((tmp_path / "a" / "run" / "settings.json").read_text()) == {"lr": 1}
    assert os.listdir(tmp_path / "a") == ["run"]


@pytest.mark.parametrize("looked_before", [False, True])
def test_a_used_folder_is_kept(looked_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder.create(tmp_path / "run", {"lr": 1})
    if looked_before:  # two runs at once: each looked before the other wrote
        monkeypatch.setattr(Path, "iterdir", lambda path: iter([]))
    said = "cannot write the run folder" if looked_before else "already in use"
    with pytest.raises(RunFolderError, match=said):
        RunFolder.create(tmp_path / "run", {"lr": 2})
    assert json.loads((tmp_path / "run" / "settings.json").read_text()) == {"lr": 1}
    assert os.listdir(tmp_path) == ["run"]


def test_settings_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RunFolder.create(tmp_path / "run", {"lr": object()})
    assert os.listdir(tmp_path) == []


def test_lines_are_appended_and_files_replaced(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    for step in range(2):
        folder.append("metrics.jsonl", {"step": step})
        folder.write("result.json", {"steps": step + 1})
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    assert json.loads((folder.path / "result.json").read_text()) == {"steps": 2}
    assert sorted(os.listdir(folder.path)) == ["metrics.jsonl", "result.json", "settings.json"]


def test_a_name_in_use_gets_a_number(tmp_path: Path) -> None:
    for name in ("run", "run-2"):
        assert unused(tmp_path / "run").name == name
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("kind", ["fifo", "endless", "too large"])
def test_settings_are_a_plain_file_of_a_sane_size(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("{}" + " " * (1 << 20))
    with pytest.raises(RunFolderError, match=r"has no readable settings\.json"):
        RunFolder.reopen(tmp_path)
