"""The points of exercises and builds, counted from the lessons' texts."""

from __future__ import annotations

import re

from scripts.files import FOLDER, ROOT

HEADER = re.compile(
    r"^\*(Easy|Medium|Hard) · (\d+) minutes? · (required|optional)( · par \d+ [^*]+)?\*$", re.MULTILINE
)
"""The line above an exercise."""
POINTS = {"Easy": 1, "Medium": 2, "Hard": 4}
"""Points of an exercise, by its level. Each stage of a build's test counts as a hard exercise."""


def text_of(lesson: str) -> str:
    """The text of a lesson, without the comment signs of its prose."""
    [path] = (FOLDER / "src").glob(f"{lesson}_*.py")
    return re.sub("^#(?! %%) ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def exercises_of(lesson: str) -> list[tuple[str, int]]:
    """A lesson's exercises in order: the stub and the points of each."""
    text = text_of(lesson)
    stubs = [cell for cell in text.split("\n# %% ") if cell.startswith('tags=["stub"')]
    return [(stub, POINTS[level[0]]) for stub, level in zip(stubs, HEADER.findall(text), strict=True)]


def test_of(build: str) -> str:
    """The test of a build, as ``python -m muon_tutorial.learn.builds`` writes it for readers."""
    return (ROOT / "muon_tutorial/learn/builds/tests" / f"{build}.py").read_text(encoding="utf-8")


def points_of(test: str) -> int:
    """The most points that a build's test gives."""
    words = re.findall(r"\w+", test.partition("builds.run(")[2])
    return POINTS["Hard"] * sum(f"def {word}(" in test for word in words)
