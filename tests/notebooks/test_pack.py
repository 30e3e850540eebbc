"""Self-contained copies: what is in them, and that they run where nothing of ours is installed."""

from __future__ import annotations

import ast
import errno
import io
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import series
from scripts import pack
from scripts.notebooks import FOLDER
from scripts.series import SETUP

from . import bare

FIRST = series.LESSONS[0]


@pytest.fixture(scope="module")
def wheel() -> bytes:
    return pack.wheel()


@pytest.fixture(scope="module")
def source(wheel: bytes) -> str:
    return pack.setup_cell(wheel, *map(pack.installed, pack.CARRIED))


def committed(lesson: series.Lesson) -> NotebookNode:
    return nbformat.read(FOLDER / lesson.file, as_version=4)


def names_in(archive: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


def test_the_wheel_has_the_same_bytes_from_two_builds(wheel: bytes) -> None:
    assert pack.wheel() == wheel


def test_the_wheel_holds_the_package_and_its_recordings(wheel: bytes) -> None:
    names = names_in(wheel)
    assert {"muon_tutorial/__init__.py", "muon_tutorial/learn/recorded/step_dp2_tp2.json"} <= set(names)
    assert [name for name in names if not name.startswith("muon_tutorial")] == []


def test_what_is_carried_beside_it_is_pure_python_and_has_its_licence() -> None:
    for name in pack.CARRIED:
        names = names_in(pack.installed(name))
        assert any("LICENSE" in each for each in names)
        assert [each for each in names if each.endswith((".so", ".pyc", ".dylib", ".pyd"))] == []
        assert pack.installed(name) == pack.installed(name)


@pytest.mark.parametrize("lesson", series.LESSONS, ids=lambda lesson: lesson.number)
def test_a_copy_is_the_committed_notebook_but_for_two_cells(lesson: series.Lesson) -> None:
    original = committed(lesson)
    copy = pack.packed(original, lesson, "carried = True")
    assert copy.cells[2:] == original.cells[2:]
    assert copy.metadata == original.metadata
    assert copy.cells[1].source == "carried = True"
    assert copy.cells[1].metadata["jupyter"] == {"source_hidden": True}
    assert "GLOSSARY.md" not in copy.cells[0].source
    assert "*In Colab:* nothing to install" in copy.cells[0].source


def test_the_cell_says_what_it_is_before_the_long_text(source: str) -> None:
    lines = source.splitlines()
    assert lines[0].startswith("#@title Set-up")
    assert max(map(len, lines)) <= 110
    assert lines.index('unpack("""') < 30
    ast.parse(source)


def test_written_copies_are_named_as_the_lessons_are(tmp_path: Path) -> None:
    assert pack.main([FIRST.number, "--out", str(tmp_path / "new")]) == 0
    [path] = (tmp_path / "new").iterdir()
    assert path.name == FIRST.file
    nbformat.validate(nbformat.read(path, as_version=4))


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """What ``pack.py`` says, in one line, when it refuses; the wheel is not built for that."""

    def refused(*arguments: object) -> str:
        monkeypatch.setattr(pack, "wheel", lambda: b"a wheel")
        capsys.readouterr()
        assert pack.main([str(each) for each in arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err[:6]) == ("", 1, "pack: ")
        return err

    return refused


@pytest.mark.parametrize("numbers", [["99"], ["9", "00"], ["00", "9"], [""]])
def test_an_unknown_number_is_refused_beside_known_ones_too(
    numbers: list[str], refusal: Refusal, tmp_path: Path
) -> None:
    assert "no lesson has the number" in refusal(*numbers, "--out", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder_is_refused_and_kept(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "it is a file" in refusal("00", "--out", tmp_path / "file")
    assert "Not a directory" in refusal("00", "--out", tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_committed_notebooks_are_never_written_over(refusal: Refusal, tmp_path: Path) -> None:
    shutil.copy(FOLDER / FIRST.file, tmp_path)
    assert "may hold somebody's work" in refusal("00", "--out", tmp_path)
    assert (tmp_path / FIRST.file).read_bytes() == (FOLDER / FIRST.file).read_bytes()


def test_a_copy_that_was_run_is_made_anew_and_one_with_answers_is_kept(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pack, "wheel", lambda: b"a wheel")
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
    refusal("00", "--out", path.parent)
    assert "my answer" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [None, b"", b'{"cells": [', b"[]", b"\xff\xfe", b'{"cells": []}'])
def test_a_missing_or_broken_notebook_is_refused_before_anything_is_written(
    content: bytes | None, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "notebooks").mkdir()
    shutil.copy(FOLDER / FIRST.file, tmp_path / "notebooks")
    if content is not None:
        (tmp_path / "notebooks" / series.LESSONS[1].file).write_bytes(content)
    monkeypatch.setattr(pack, "FOLDER", tmp_path / "notebooks")
    assert "notebooks.py build 01" in refusal("00", "01", "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_write_that_stops_half_way_leaves_what_stood_there(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pack, "wheel", lambda: b"a wheel")
    assert pack.main(["00", "--out", str(tmp_path)]) == 0
    before = (tmp_path / FIRST.file).read_bytes()

    def full(path: Path, text: str, encoding: str) -> None:
        with path.open("w", encoding=encoding) as file:
            file.write(text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in refusal("00", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FIRST.file]
    assert (tmp_path / FIRST.file).read_bytes() == before


def test_without_hatchling_or_a_readable_dependency_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="pip install no-such-package"):
        pack.installed("no-such-package")
    (tmp_path / "bare-1.0.dist-info").mkdir()  # as a system's packager leaves it: no list of its files
    (tmp_path / "bare-1.0.dist-info" / "METADATA").write_text("Name: bare\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="pip install bare"):
        pack.installed("bare")
    monkeypatch.setattr(pack, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="hatchling"):
        pack.wheel()


@pytest.mark.parametrize("script", ["pack", "pages", "series"])
def test_the_scripts_start_from_anywhere_without_an_installed_package(script: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(bare.ROOT / "scripts" / f"{script}.py"), "--help"],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {script}.py")


def python_says(python: Path, code: str, cwd: Path) -> str:
    done = subprocess.run(
        [python, "-"],
        input=code,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(cwd), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_cell_leaves_nothing_behind_and_prefers_what_the_host_has(source: str, tmp_path: Path) -> None:
    python, empty = bare.empty_venv(tmp_path / "venv"), tmp_path / "empty"
    empty.mkdir()
    where = "from importlib.util import find_spec; import os, sys; print(os.listdir())"
    show = (
        "print(*(os.path.relpath(find_spec(n).origin) for n in ('muon_tutorial', 'cloudpickle')), sep='\\n')"
    )
    here, own, needed = python_says(python, f"{source}\n{where}\n{show}", empty).splitlines()
    assert own.endswith("/own/muon_tutorial/__init__.py")
    assert needed.endswith("/needed/cloudpickle/__init__.py")
    assert "muon_tutorial-" in here
    assert list(empty.iterdir()) == []
    (empty / "cloudpickle.py").touch()
    assert python_says(python, f"{source}\n{where}\n{show}", empty).splitlines()[-1] == "cloudpickle.py"


def test_a_second_run_of_the_cell_changes_nothing(source: str, tmp_path: Path) -> None:
    code = f"import sys, types; sys.modules['muon_tutorial'] = types\nbefore = list(sys.path)\n{source}"
    assert python_says(Path(sys.executable), f"{code}\nprint(sys.path == before)", tmp_path) == "True\n"


def hosted(tmp_path: Path) -> Path:
    """A host with pip, cloudpickle and a torch of its own, which is nothing but a version."""
    python = bare.linked_venv(tmp_path / "venv", ("pip", "cloudpickle"))
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    for file, text in (
        ("torch/__init__.py", ""),
        ("torch-2.9.0+cu126.dist-info/METADATA", "Version: 2.9.0+cu126"),
    ):
        (site / file).parent.mkdir()
        (site / file).write_text(f"Name: torch\n{text}\n" if text else "")
    return python


TELL = """
from importlib.metadata import version; from importlib.util import find_spec
print(version("torch"), find_spec("muon_tutorial").origin)
"""


def test_in_a_hosted_notebook_the_cell_installs_a_wheel_and_not_torch(wheel: bytes, tmp_path: Path) -> None:
    python, beside = hosted(tmp_path), tmp_path / "content"
    beside.mkdir()
    (beside / "muon_tutorial-0.1.0-py3-none-any.whl").write_bytes(wheel)
    version, origin = python_says(python, SETUP + TELL, beside).split()
    assert version == "2.9.0+cu126"
    assert "site-packages/muon_tutorial/" in origin
    (beside / "muon_tutorial-0.1.0-py3-none-any.whl").unlink()
    assert python_says(python, SETUP + TELL, beside).split() == [version, origin]


def test_below_a_checkout_the_cell_uses_it(tmp_path: Path) -> None:
    python, notebooks = hosted(tmp_path), tmp_path / "checkout" / "notebooks"
    for folder in (notebooks, tmp_path / "checkout" / "muon_tutorial" / "learn"):
        folder.mkdir(parents=True)
    (tmp_path / "checkout" / "muon_tutorial" / "__init__.py").touch()
    assert "checkout/muon_tutorial/__init__.py" in python_says(python, SETUP + TELL, notebooks)


def test_where_nothing_is_near_the_cell_says_so_in_one_line(tmp_path: Path) -> None:
    said = python_says(hosted(tmp_path), SETUP, tmp_path).splitlines()
    assert said[-1].startswith("ModuleNotFoundError: upload this lesson's self-contained copy")
    assert "pip" not in said[-1]


def test_where_the_package_is_installed_the_cell_does_nothing(tmp_path: Path) -> None:
    code = f"import sys; before = list(sys.path)\n{SETUP}\nassert sys.path == before"
    stopped = "import subprocess; subprocess.run = None\n"
    ours = f"import sys; sys.path.append({str(bare.ROOT)!r})\n"
    assert python_says(Path(sys.executable), stopped + ours + code, tmp_path) == ""


WHAT_IS_THERE = f"""
from importlib.util import find_spec
names = {[*bare.HOST, "cloudpickle", "rich", "muon_tutorial"]}
print([find_spec(name) is not None for name in names])
"""


@pytest.mark.live
@pytest.mark.slow
def test_a_copy_runs_where_only_what_a_host_has_is_installed(source: str, tmp_path: Path) -> None:
    python = bare.linked_venv(tmp_path / "venv")
    assert (
        python_says(python, WHAT_IS_THERE, tmp_path)
        == "[True, True, True, True, True, False, False, False]\n"
    )
    copy = pack.packed(committed(FIRST), FIRST, source)
    assert bare.run_in(python, copy, tmp_path / "run") == []


@pytest.mark.live
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_all_copies_run_with_torch_numpy_matplotlib_old_widgets_and_a_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = bare.real_venv(tmp_path / "venv")
    before = listed(python)
    assert not {"cloudpickle", "rich", "muon-tutorial"} & set(before.lower().split())
    for path in pack.write(series.LESSONS, tmp_path / "copies"):
        start = time.perf_counter()
        assert bare.run_in(python, nbformat.read(path, as_version=4), tmp_path / path.stem) == []
        with capsys.disabled():
            print(f"{path.stem}: {time.perf_counter() - start:.1f} s")
    assert listed(python) == before


def listed(python: Path) -> str:
    """What is installed there, in pip's words."""
    command = [str(python), "-m", "pip", "list", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
