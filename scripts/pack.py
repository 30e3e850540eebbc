"""Makes self-contained copies of notebooks: each contains the package, and needs no other file or network.

    python scripts/pack.py [00 …] [--out FOLDER] [--for-students]

A copy is the committed notebook with its outputs, except for two cells. The first cell says that it is a
copy. The set-up cell holds wheels of the package and of dependencies that a notebook host may lack. Running
that cell unpacks the wheels for its kernel only, and installs nothing. torch, numpy, matplotlib and
ipywidgets come from the host.

With --for-students, solutions are left out. The exercises' references stay inside the package, because the
checkers and the cells after an unanswered stub need them. Those of the builds are encoded, so that nobody
reads them by chance.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import zipfile
import zlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import series
from scripts.files import FOLDER, ROOT, made, run_writer, write_all

TARGET = ROOT / "dist" / "notebooks"
CARRIED = ("cloudpickle",)  # dependencies in pure Python that a host with torch and Jupyter may lack
EPOCH = "1580601600"  # the time of each file in the wheel, so that its bytes depend only on the sources
TITLE = "#@title Set-up: this copy carries its package. Run me first."
MARK = "packed"  # under this key, the set-up cell's metadata hold a hash of the copy's cells
FOLD = re.compile(r"<details><summary>(?:S|A s)olution\b.*?</details>\n*", re.DOTALL)
"""A folded solution, of an exercise, a build or an open task."""
REFERENCES = "muon_tutorial/learn/builds/reference/"
_DATE = (2020, 2, 2, 0, 0, 0)
_LEFT_OUT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}


def unpack(own: str, *needed: str) -> None:
    """Make the packages in these wheels (zip files as base64 text) importable in this kernel and its ranks.

    Nothing is installed. If this environment already has one of the ``needed`` packages, that one is used.
    """
    import atexit
    import base64
    import io
    import shutil
    import sys
    import tempfile
    import zipfile

    if "muon_tutorial" in sys.modules:
        return
    folder = tempfile.mkdtemp(prefix="muon_tutorial-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, wheels in (("own", [own]), ("needed", needed)):
        for wheel in wheels:
            zipfile.ZipFile(io.BytesIO(base64.b64decode(wheel))).extractall(f"{folder}/{name}")
    sys.path[:] = [f"{folder}/own", *sys.path, f"{folder}/needed"]


def read_notebook(path: Path) -> NotebookNode:
    """A notebook with a cell; if the file is missing or broken, UsageError says how to restore it."""
    remedy = f"`python scripts/notebooks.py build {path.stem[:2]}` builds it again"
    if not path.is_file():
        raise UsageError(f"{path} is missing; {remedy}")
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        notebook.cells[0]
    except Exception as error:
        raise UsageError(f"{path} is not a whole notebook ({type(error).__name__}); {remedy}") from error
    return notebook


def wheel() -> bytes:
    """The package's wheel, built now; the same bytes for the same sources.

    Raises:
        UsageError: hatchling is not installed, or could not build the wheel; the message says why.
    """
    if find_spec("hatchling") is None:
        raise UsageError("hatchling, which builds the wheel, is not installed; install the extra `notebooks`")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
            cwd=ROOT,
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "TMPDIR": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it did not say why"])[-1]
            raise UsageError(f"hatchling could not build the wheel: {reason}")
        [built] = Path(folder).glob("*.whl")
        return built.read_bytes()


def installed(name: str) -> bytes:
    """The files of an installed pure-Python distribution, including its licence, as a zip archive.

    Raises:
        UsageError: the distribution is not installed, or its installation does not list its files.
    """
    try:
        found = distribution(name).files or []
    except PackageNotFoundError:
        found = []
    files = [file for file in found if file.suffix != ".pyc" and file.name not in _LEFT_OUT]
    if not any(file.suffix == ".py" for file in files):
        raise UsageError(f"{name} is not installed here, or not by pip; run `python -m pip install {name}`")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", compresslevel=9) as zipped:
        for file in sorted(files, key=str):
            zipped.writestr(zipfile.ZipInfo(str(file), _DATE), file.read_binary(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def with_encoded_references(archive: bytes) -> bytes:
    """The package's wheel with the builds' references encoded: importable, but not readable.

    The references must stay, as they stand in for builds that a student has not written.
    """
    whole, encoded = zipfile.ZipFile(io.BytesIO(archive)), io.BytesIO()
    with zipfile.ZipFile(encoded, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as zipped:
        for file in whole.infolist():
            text = whole.read(file)
            if file.filename.startswith(REFERENCES) and not file.filename.endswith("__init__.py"):
                said = base64.b64encode(zlib.compress(text)).decode()
                text = f"import base64, zlib\nexec(zlib.decompress(base64.b64decode({said!r})))\n".encode()
            zipped.writestr(file, text)
    return encoded.getvalue()


def without_solutions(notebook: NotebookNode) -> NotebookNode:
    """The same notebook without cells tagged ``solution`` and without folds of solutions."""
    copy = nbformat.from_dict(notebook)
    copy.cells = [cell for cell in copy.cells if "solution" not in cell.metadata.get("tags", ())]
    for cell in copy.cells:
        if cell.cell_type == "markdown":
            cell.source = FOLD.sub("", cell.source).rstrip()
    return copy


def setup_cell(*wheels: bytes) -> str:
    """The source of a set-up cell that carries these wheels, the package's own first."""
    texts = [textwrap.fill(base64.b64encode(each).decode(), 96) for each in wheels]
    carried = ", ".join(f'"""\n{text}\n"""' for text in texts)
    return f"{TITLE}\n{inspect.getsource(unpack)}\n\nunpack({carried})"


def packed(notebook: NotebookNode, lesson: series.Lesson, source: str) -> NotebookNode:
    """A self-contained copy of a notebook, with ``source`` as its hidden set-up cell."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells[:3]:
        cell.source = cell.source.replace(series.navigation(lesson), series.navigation_of_copy(lesson))
    cells = [cell for cell in copy.cells if "setup" in cell.metadata.get("tags", ())]
    if len(cells) != 1:
        raise UsageError(f"{lesson.file} has {len(cells)} set-up cells, not one")
    [cell] = cells
    hero = "hero" in cell.metadata.get("tags", ())
    cell.source = f"{source}\n\n{series.hero_lines(lesson).rstrip()}" if hero else source
    cell.metadata |= {"cellView": "form", "jupyter": {"source_hidden": True}, MARK: _digest(copy)}
    nbformat.validate(copy)
    return copy


def _digest(notebook: NotebookNode) -> str:
    said = [(cell.cell_type, cell.source) for cell in notebook.cells]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def is_untouched(path: Path) -> bool:
    """Whether a file is a copy that this script made and nobody edited; it may have been run."""
    try:
        notebook = nbformat.read(path, as_version=4)
        marks = [cell.metadata[MARK] for cell in notebook.cells if MARK in cell.metadata]
        return marks == [_digest(notebook)]
    except Exception:
        return False


def write(folder: Path, names: Sequence[str] = (), for_students: bool = False) -> None:
    """Write the copies of the lessons with these numbers, or of all; ``for_students`` without solutions.

    Raises:
        UsageError: a notebook is missing or broken, the folder cannot be written to, or a file there may hold
            edits, which would be lost. Nothing is written.
    """
    numbers = dict.fromkeys(names or [lesson.number for lesson in series.LESSONS])
    lessons = [series.lesson(number) for number in numbers]
    for path in [folder / lesson.file for lesson in lessons]:
        if path.exists() and path.stat().st_size and not is_untouched(path):
            raise UsageError(f"{path} may hold edits, so it is not overwritten. Move it, or use --out")
    originals = [read_notebook(FOLDER / lesson.file) for lesson in lessons]
    made(folder)
    own = wheel()
    if for_students:
        own, originals = with_encoded_references(own), [*map(without_solutions, originals)]
    source = setup_cell(own, *map(installed, CARRIED))
    pairs = [(each.file, packed(old, each, source)) for old, each in zip(originals, lessons, strict=True)]
    write_all(folder, {name: nbformat.writes(copy) + "\n" for name, copy in pairs})


def main(arguments: Sequence[str] | None = None) -> int:
    numbers = "numbers of lessons: 00, 01 …"
    return run_writer("pack", __doc__, write, arguments, TARGET, numbers, for_students="without solutions")


if __name__ == "__main__":
    sys.exit(main())
