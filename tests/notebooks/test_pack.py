"""Self-contained copies run in an environment without our packages; a copy that cannot be made is refused."""

from __future__ import annotations

import ast
import errno
import io
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import nbformat
import pytest
from nbformat import NotebookNode

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import series
from scripts import pack, pages
from scripts.notebooks import FOLDER, ROOT
from scripts.series import SETUP

from ..exhaustive import left_out
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


def test_the_wheel_holds_the_package_and_its_recordings_alike_in_two_builds(
    wheel: bytes,
) -> None:
    assert pack.wheel() == wheel
    names = names_in(wheel)
    assert {"muon_tutorial/__init__.py", "muon_tutorial/learn/inputs/recorded/step_dp2_tp2.json"} <= set(
        names
    )
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
    hero = "hero" in original.cells[1].metadata.tags
    [changed] = [place for place, cell in enumerate(original.cells) if "*In Colab:*" in cell.source]
    assert changed == (2 if hero else 0)
    assert copy.metadata == original.metadata
    for place, (mine, theirs) in enumerate(zip(copy.cells, original.cells, strict=True)):
        assert (mine == theirs) is (place not in (1, changed))
    shows = f"\n\n{series.hero_lines(lesson).rstrip()}" if hero else ""
    assert copy.cells[1].source == f"carried = True{shows}"
    assert copy.cells[1].metadata["jupyter"] == {"source_hidden": True}
    assert "GLOSSARY.md" not in copy.cells[changed].source
    assert "*In Colab:* nothing to install" in copy.cells[changed].source


def test_the_cell_says_what_it_is_before_the_long_text(source: str) -> None:
    lines = source.splitlines()
    assert lines[0].startswith("#@title Set-up")
    assert max(map(len, lines)) <= 110
    assert lines.index('unpack("""') < 30
    ast.parse(source)


def test_without_hatchling_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="hatchling"):
        pack.wheel()


@pytest.mark.parametrize("script", ["pack", *map(left_out, ["pages", "reference", "series"])])
def test_the_scripts_start_from_anywhere_without_an_installed_package(script: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = bare.run([sys.executable, ROOT / "scripts" / f"{script}.py", "--help"], cwd=tmp_path, env=kept)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {script}.py")
    assert list(tmp_path.iterdir()) == []


def python_says(python: Path, code: str, cwd: Path) -> str:
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(cwd), "PIP_NO_INDEX": "1"}
    done = bare.run([python, "-"], input=code, cwd=cwd, env=env)
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
    """A host with pip, cloudpickle, and a torch of its own that has nothing but a version."""
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


def test_in_a_hosted_notebook_the_cell_uses_a_checkout_or_installs_a_wheel_and_not_torch_or_tells(
    wheel: bytes, tmp_path: Path
) -> None:
    python, beside, notebooks = hosted(tmp_path), tmp_path / "content", tmp_path / "checkout" / "notebooks"
    said = python_says(python, SETUP, tmp_path).splitlines()
    assert said[-1].startswith("ModuleNotFoundError: upload this lesson's self-contained copy")
    assert "pip" not in said[-1]
    for folder in (beside, notebooks, tmp_path / "checkout" / "muon_tutorial" / "learn"):
        folder.mkdir(parents=True)
    (tmp_path / "checkout" / "muon_tutorial" / "__init__.py").touch()
    (tmp_path / "checkout" / "pyproject.toml").write_text('[project]\nname = "muon-tutorial"\n')
    assert "checkout/muon_tutorial/__init__.py" in python_says(python, SETUP + TELL, notebooks)
    (beside / "muon_tutorial-0.1.0-py3-none-any.whl").write_bytes(wheel)
    version, origin = python_says(python, SETUP + TELL, beside).split()
    assert version == "2.9.0+cu126"
    assert "site-packages/muon_tutorial/" in origin
    (beside / "muon_tutorial-0.1.0-py3-none-any.whl").unlink()
    assert python_says(python, SETUP + TELL, beside).split() == [version, origin]


@pytest.mark.parametrize(
    ("cwd", "project"),
    [
        ("lessons", "muon-tutorial"),  # not the folder of a repository's notebooks
        ("notebooks", "somebody-elses"),
        ("muon/notebooks", "muon-tutorial"),  # two folders up
    ],
)
def test_what_lies_in_folders_above_is_not_installed_or_imported_unless_it_is_the_repositorys_root(
    cwd: str, project: str, wheel: bytes, tmp_path: Path
) -> None:
    python, notebooks = hosted(tmp_path), tmp_path / "shared" / cwd
    for folder in (notebooks, tmp_path / "shared" / "muon_tutorial" / "learn"):
        folder.mkdir(parents=True)
    (tmp_path / "shared" / "muon_tutorial-0.1.0-py3-none-any.whl").write_bytes(wheel)
    (tmp_path / "shared" / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    said = python_says(python, SETUP + TELL, notebooks).splitlines()
    assert said[-1].startswith("ModuleNotFoundError: upload this lesson's self-contained copy")


def test_where_the_package_is_installed_the_cell_does_nothing(tmp_path: Path) -> None:
    code = f"import sys; before = list(sys.path)\n{SETUP}\nassert sys.path == before"
    stopped = "import subprocess; subprocess.run = None\n"
    ours = f"import sys; sys.path.append({str(ROOT)!r})\n"
    assert python_says(Path(sys.executable), stopped + ours + code, tmp_path) == ""


WHAT_IS_THERE = f"""
from importlib.util import find_spec
names = {[*bare.HOST, "cloudpickle", "rich", "muon_tutorial"]}
print([find_spec(name) is not None for name in names])
"""


def test_a_copy_runs_where_only_what_a_host_has_is_installed(source: str, tmp_path: Path) -> None:
    python = bare.linked_venv(tmp_path / "venv")
    assert (
        python_says(python, WHAT_IS_THERE, tmp_path)
        == "[True, True, True, True, True, False, False, False]\n"
    )
    copy = pack.packed(committed(FIRST), FIRST, source)
    assert bare.run_in(python, copy, tmp_path / "run") == []


def test_a_students_copy_has_no_solution_and_its_builds_are_still_completed(
    wheel: bytes, tmp_path: Path
) -> None:
    folds = stubs = 0
    for original in map(committed, series.LESSONS):
        copy = pack.without_solutions(original)
        kept = [cell for cell in original.cells if "solution" not in cell.metadata.get("tags", ())]
        for mine, theirs in zip(copy.cells, kept, strict=True):
            changed = "<summary>A solution of th" in theirs.source
            assert changed or mine == theirs
            assert re.search(r"<summary>[^<]*solution|builds/reference", mine.source, re.IGNORECASE) is None
            assert mine.source.count("<details>") == mine.source.count("</details>")
            folds += changed
            stubs += "stub" in mine.metadata.get("tags", ())
    assert folds == 5 + 3  # builds and open tasks
    assert stubs > 100
    encoded = pack.with_encoded_references(wheel)
    files = zipfile.ZipFile(io.BytesIO(encoded))
    assert files.namelist() == names_in(wheel)
    hidden = [name for name in files.namelist() if name.startswith(pack.REFERENCES) and "__" not in name]
    assert len(hidden) == 4
    assert all(b"def " not in files.read(name) for name in hidden)
    (tmp_path / "pipeline.py").write_text("step = 'mine'\n")
    names = "print(builds.ring.all_reduce.__name__, builds.pipeline.step, 'own' in builds.__file__)"
    cell = pack.setup_cell(encoded, *map(pack.installed, pack.CARRIED))
    asked = f"{cell}\nfrom muon_tutorial.learn import builds\n{names}"
    python = bare.linked_venv(tmp_path / "venv")
    assert python_says(python, asked, tmp_path) == "all_reduce mine True\n"


def test_students_copies_are_written_on_request(tmp_path: Path) -> None:
    assert pack.main(["03", "--for-students", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    assert pack.is_untouched(path)
    assert "Solution</summary>" not in path.read_text(encoding="utf-8")


SECOND = series.LESSONS[1]
MAIN = {
    "pack": pack.main,
    "pages": pages.main,
    "pages --still": lambda names: pages.main(["--still", *names]),
}
Refusal = Callable[..., str]

for_both = pytest.mark.parametrize("script", ["pack", "pages --still"])


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """A function that runs a script, which must refuse, and returns the one line that it prints. No wheel is
    built.
    """
    monkeypatch.setattr(pack, "wheel", lambda: b"a wheel")

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
