"""Grades hand-ins: tries each student's ``my_muon.py`` and builds, and prints a table of points.

    python scripts/grade.py hand-ins/*/

It executes the students' code, so run it where nothing can be lost.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muon_tutorial.learn.course.series import BUILDS
from muon_tutorial.learn.my_muon import blocks, keep
from scripts.files import ROOT, parser_of
from scripts.points import POINTS, exercises_of, points_of, test_of

TESTS = {build: test_of(build) for build in BUILDS}


COUNTED = """\
from muon_tutorial.learn import builds
builds.on_green = lambda: open({path!r}, "a").write(".")
"""
"""Runs before a build's test: each green stage writes a dot to a file, so a student's prints do not count."""


def try_build(build: str, folder: Path) -> tuple[int, str]:
    """Run a build's test beside the reference's other builds; returns its points, and what went wrong."""
    if not (folder / f"{build}.py").exists():
        return 0, f"{build}: not handed in"
    with TemporaryDirectory() as made, TemporaryDirectory() as other:
        for path in folder.glob("*.py"):
            if path.stem == build or path.stem not in BUILDS:
                shutil.copy(path, made)
        dots = Path(other, "green")
        start = [sys.executable, "-c", COUNTED.format(path=str(dots)) + TESTS[build]]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        run = subprocess.run(start, cwd=made, env=environ, capture_output=True, text=True)
        green = len(dots.read_text()) if dots.exists() else 0
    points = POINTS["Hard"] * green
    if points == points_of(TESTS[build]):
        return points, ""
    wrong = re.search(r"^.*(?:raised \w+|Error): .*", run.stderr, re.MULTILINE)
    return points, f"{build}: {wrong[0] if wrong else 'its test ended before the last stage'}"


def answers() -> dict[tuple[str, ...], int]:
    """For each exercise whose functions go into my_muon.py: their names, and its points."""
    kept = blocks.reference()[1]
    lessons = dict.fromkeys(block.lesson for block in kept.values())
    stubs = [each for lesson in lessons for each in exercises_of(lesson)]
    named = {tuple(name for name in kept if f"def {name}(" in stub): points for stub, points in stubs}
    return {names: points for names, points in named.items() if names}


def try_my_muon(folder: Path) -> tuple[int, str]:
    """Run the reference with each answer of a student's my_muon.py; return points, and what went wrong."""
    mine, points = keep.read_mine(folder), 0
    wrong = list(mine.problems)
    if not mine.blocks and not wrong:
        wrong += [f"{keep.FILE}: no checker of the course has written a function into it"]
    for names, worth in answers().items():
        if set(names) <= set(mine.blocks):
            problem = keep.try_on_ranks({name: mine.blocks[name] for name in names})
            points += 0 if problem else worth
            wrong += [f"{', '.join(names)}: {problem}"] if problem else []
    return points, "; ".join(wrong)


def main(folders: list[str]) -> None:
    """Print a row of points for each folder, and below the row what went wrong."""
    if lost := [name for name in folders if not Path(name).is_dir()] or ([] if folders else ["(none named)"]):
        sys.exit(f"{__doc__}\nno such folder: {', '.join(lost)}")
    most = [sum(answers().values()), *map(points_of, TESTS.values())]
    for name, cells in (("", ["my_muon", *BUILDS, "points"]), ("at most", [*most, sum(most)])):
        print(f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells))
    for folder in map(Path, folders):
        tried = [try_my_muon(folder), *(try_build(build, folder) for build in BUILDS)]
        points = [each for each, _ in tried]
        print(f"{folder.name:<24}" + "".join(f"{cell:>10}" for cell in (*points, sum(points))))
        print("".join(f"    {wrong}\n" for _, wrong in tried if wrong), end="")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("folders", nargs="*", help="one for each student")
    main(parser.parse_args().folders)
