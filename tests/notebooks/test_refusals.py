"""``pack.py`` and ``pages.py`` refuse with one line and exit code 2, before anything is written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import nbformat
import pytest

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import series
from scripts import pack, pages
from scripts.notebooks import FOLDER

FIRST, SECOND = series.LESSONS[:2]
MAIN = {
    "pack": pack.main,
    "pages": pages.main,
    "pages --still": lambda names: pages.main(["--still", *names]),
}
Refusal = Callable[..., str]

for_both = pytest.mark.parametrize("script", ["pack", "pages --still"])


@pytest.fixture(autouse=True)
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "wheel", lambda: b"a wheel")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The one line that a script prints when it refuses."""

    def refused(script: str, *arguments: object) -> str:
        capsys.readouterr()
        assert MAIN[script]([str(each) for each in arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err.partition(": ")[0]) == ("", 1, script.partition(" ")[0])
        return err

    return refused


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of notebooks with only the first lesson, from which copies and pages are made."""
    notebooks = tmp_path / "note books é"
    notebooks.mkdir()
    shutil.copy(FOLDER / FIRST.file, notebooks)
    for script in (pack, pages):
        monkeypatch.setattr(script, "FOLDER", notebooks)
    return notebooks


@pytest.mark.parametrize(
    ("script", "names"),
    [
        *[(script, names) for script in MAIN for names in (["99"], ["9", "00"], ["00", "9"])],
        ("pack", [""]),
        ("pages", [FIRST.stem, "99"]),
        ("pages", ["00", "--still", "Untitled"]),
    ],
)
def test_an_unknown_lesson_is_named_beside_known_ones_too(
    script: str, names: list[str], refusal: Refusal, tmp_path: Path
) -> None:
    said = refusal(script, *names, "--out", tmp_path / "new")
    reasons = {"pack": f"no lesson has the number {{!r}}; there are 00 to {series.LESSONS[-1].number}"}
    reason = reasons.get(script, "no lesson's name starts with {!r}")
    assert any(reason.format(name) in said for name in names)
    assert list(tmp_path.iterdir()) == []


@for_both
def test_what_cannot_be_written_to_is_named_and_kept(
    script: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "index.html").write_text("the one before")
    refused = f"cannot write to {tmp_path}"
    assert f"{refused}/file: File exists (it is a file)\n" in refusal(
        script, "00", "--out", tmp_path / "file"
    )
    assert f"{refused}/file/below: Not a d" in refusal(script, "00", "--out", tmp_path / "file" / "below")
    monkeypatch.setattr("scripts.files.os.access", lambda *asked: False)
    assert f"{refused}: no permission\n" in refusal(script, "00", "--out", tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "index.html").read_text() == "the one before"


@for_both
@pytest.mark.parametrize("content", [None, b"", b'{"cells": [', b"[]", b"\xff\xfe", b'{"cells": []}'])
def test_a_missing_or_broken_notebook_is_named(
    script: str, content: bytes | None, refusal: Refusal, checkout: Path, tmp_path: Path
) -> None:
    if content is not None:
        (checkout / SECOND.file).write_bytes(content)
    assert "notebooks.py build 01" in refusal(script, "00", "01", "--out", tmp_path / "new")
    assert list(tmp_path.glob("new/*")) == []


def test_a_widgets_cell_that_raises_is_named(refusal: Refusal, checkout: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(checkout / FIRST.file, as_version=4)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += "\n1 / 0"
    nbformat.write(notebook, checkout / FIRST.file)
    said = refusal("pages", "00", "--out", tmp_path / "new")
    assert said.endswith("ZeroDivisionError: division by zero; --still runs no cell\n")


def test_an_interrupt_ends_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.pages.page_of", Mock(side_effect=KeyboardInterrupt))
    assert pages.main(["00", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.startswith("pages: interrupted")


def test_a_copy_that_was_run_is_made_anew_and_one_with_answers_or_a_committed_notebook_is_kept(
    refusal: Refusal, tmp_path: Path
) -> None:
    path = tmp_path / "r\u00e9sum\u00e9 of mine" / FIRST.file
    assert pack.main(["00", "--out", str(path.parent)]) == 0
    fresh = path.read_bytes()
    copy = nbformat.read(path, as_version=4)
    copy.cells[-1].metadata["scrolled"] = True
    nbformat.write(copy, path)
    assert pack.main(["00", "--out", str(path.parent)]) == 0
    assert path.read_bytes() == fresh
    copy.cells[-1].source += "\nmy answer"
    nbformat.write(copy, path)
    for work in (path.read_bytes(), (FOLDER / FIRST.file).read_bytes()):
        path.write_bytes(work)
        assert "may hold edits" in refusal("pack", "00", "--out", path.parent)
        assert path.read_bytes() == work


def test_a_write_that_stops_half_way_leaves_what_stood_there(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert pack.main(["00", "--out", str(tmp_path)]) == 0
    before = (tmp_path / FIRST.file).read_bytes()

    def full(path: Path, text: str, encoding: str) -> None:
        with path.open("w", encoding=encoding) as file:
            file.write(text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in refusal("pack", "00", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FIRST.file]
    assert (tmp_path / FIRST.file).read_bytes() == before


def test_a_dependency_that_cannot_be_carried_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="pip install no-such-package"):
        pack.installed("no-such-package")
    (tmp_path / "bare-1.0.dist-info").mkdir()  # as some system packages do: without a list of files
    (tmp_path / "bare-1.0.dist-info" / "METADATA").write_text("Name: bare\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="pip install bare"):
        pack.installed("bare")
