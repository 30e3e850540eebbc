"""Writes the glossary, and the parts of texts and README that depend on the order of the lessons.

    python scripts/series.py

These are the list of links, the set-up cell and the last line of each text of ``notebooks/src``, the table
of lessons in the README, minutes and points in ``docs/publishing.md``, and ``notebooks/GLOSSARY.md``. A
notebook whose text has changed must then be built again.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.errors import UsageError
from muon_tutorial.learn.course import glossary, series
from scripts.files import FOLDER, ROOT, answered, parser_of, write_changed
from scripts.points import exercises_of, points_of, test_of

README, PUBLISHING = ROOT / "README.md", ROOT / "docs" / "publishing.md"
GLOSSARY = FOLDER / "GLOSSARY.md"
SETUP = """\
# Set-up: installs nothing where the package is installed, and draws the first picture.
import importlib.util, pathlib, subprocess, sys
if importlib.util.find_spec("muon_tutorial") is None:  # look here and in the repository's root; do not touch the installed torch
    here, root = pathlib.Path.cwd(), pathlib.Path.cwd().parent / "pyproject.toml"
    ours = here.name == "notebooks" and root.is_file() and 'name = "muon-tutorial"' in root.read_text(encoding="utf-8")
    places = [here, root.parent] if ours else [here]
    wheels = [str(wheel) for place in places for wheel in sorted(place.glob("muon_tutorial-*.whl"), reverse=True)]
    sys.path += [str(place) for place in places if (place / "muon_tutorial" / "learn").is_dir()]
    if not wheels and importlib.util.find_spec("muon_tutorial") is None:
        raise ModuleNotFoundError("upload this lesson's self-contained copy (python scripts/pack.py makes it), or the wheel")
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "cloudpickle", *wheels[:1]], check=True)
"""  # noqa: E501
_REFUSAL = next(line for line in SETUP.splitlines(keepends=True) if "raise" in line)
SETUP_HEAD = '# %% tags=["setup"] jupyter={"source_hidden": true}\n'
HERO_HEAD = '# %% tags=["setup", "hero"] jupyter={"source_hidden": true}\n'
_PARAMETERS_HEAD = '# %% tags=["parameters"]\n'
_SETUP_CELL = re.compile(r'^# %% tags=\["setup".*?(?=^# %%)', re.MULTILINE | re.DOTALL)
_LINKS = re.compile(r"^# (?:- )?\*Previous:.*?\n(?=#?\n)", re.MULTILINE | re.DOTALL)
_COLAB = re.compile(r"^#\n# \*In Colab:.*?\n(?=#?\n)", re.MULTILINE | re.DOTALL)
_COUNTED = re.compile(r"^\| (\d\d(?:, \d\d)*|`\w+\.py`) \| [\d +]* \| [\d +]* \|", re.MULTILINE)
_READ_ON = re.compile(r"\n#\n# \*Read on:.*\n\Z")
_README_PART = re.compile(r"(?<=<!-- made by scripts/series.py -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def setup() -> str:
    """The lines of a set-up cell; if the repository is known, missing packages are installed from there."""
    archive = series.archive()
    return SETUP.replace(_REFUSAL, f'        wheels = ["{archive}"]\n') if archive else SETUP


def with_series(text: str, lesson: series.Lesson) -> str:
    """A lesson's text with its current list of links, set-up cell and last line, which says what to read.

    A set-up cell tagged ``hero`` keeps its place, and its last lines show the lesson's picture.

    Raises:
        UsageError: the text has no place for these parts.
    """
    if not (_PARAMETERS_HEAD in text or HERO_HEAD in text) or not _LINKS.search(text):
        raise UsageError(f"the text of lesson {lesson.number} has no list of links or no `parameters` cell")
    links = textwrap.indent(series.navigation(lesson) + "\n", "# ")
    text = _LINKS.sub(lambda _: links, _COLAB.sub("", text), count=1)
    text = f"{_READ_ON.sub('', text).rstrip()}\n#\n# {series.read_on(lesson)}\n"
    if HERO_HEAD in text:
        cell = f"{HERO_HEAD}{setup()}{series.hero_lines(lesson)}\n"
        return _SETUP_CELL.sub(lambda _: cell, text)
    cell = f"{SETUP_HEAD}{setup()}\n{_PARAMETERS_HEAD}"
    return _SETUP_CELL.sub("", text).replace(_PARAMETERS_HEAD, cell, 1)


def wanted() -> dict[Path, str]:
    """Each file that this script writes, and its text; UsageError if one has no place for its parts."""
    if not README.is_file() or not _README_PART.search(_read(README)):
        raise UsageError(f"{README} is missing, or has no part between this script's markers")
    texts = {lesson: FOLDER / "src" / f"{lesson.stem}.py" for lesson in series.LESSONS}
    return {
        **{path: with_series(_read(path), lesson) for lesson, path in texts.items() if path.exists()},
        PUBLISHING: _COUNTED.sub(_counted, _read(PUBLISHING)),
        README: _README_PART.sub(lambda _: f"\n{series.table()}\n\n{series.paths()}\n", _read(README)),
        GLOSSARY: glossary.page(),
    }


def _counted(row: re.Match[str]) -> str:
    """The beginning of a row about lessons or a build: its name, minutes with all exercises, and points."""
    build = row[1].strip("`").removesuffix(".py")
    if build in series.BUILDS:
        minutes = series.BUILDS[build][1]
        return f"| {row[1]} | {minutes} | {points_of(test_of(build))} |"
    lessons = [series.lesson(number) for number in row[1].split(", ")]
    took = " + ".join(str(each.minutes + each.optional) for each in lessons)
    points = " + ".join(str(sum(points for _, points in exercises_of(each.number))) for each in lessons)
    return f"| {row[1]} | {took} | {points} |"


def main() -> int:
    return answered("series", lambda: write_changed(wanted()))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    sys.exit(main())
