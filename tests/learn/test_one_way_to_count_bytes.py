"""The course counts bytes in one way: what one rank sends, on a ring. A sum over ranks is called a sum."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.files import FOLDER

OTHER_WAYS = re.compile(r"\b(receives?|received|fetch(es|ed)?|moved)\b", re.IGNORECASE)
BYTES = re.compile(r"\d (bytes|entries|[kMG]B)\b")
ENDS = re.compile(r"(?<=[.?!])\s+|[\n<>]+")
LESSONS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def text_of(cell: dict[str, object]) -> str:
    """What a reader sees of a cell: its text, and its outputs without the bytes of pictures."""
    shown = json.dumps([cell["source"], cell.get("outputs")], ensure_ascii=False).replace("\\n", "\n")
    return re.sub(r"base64,[A-Za-z0-9+/=]+", "", shown)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_no_lesson_counts_bytes_that_are_received(lesson: Path) -> None:
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    said = [each for cell in cells for each in ENDS.split(text_of(cell))]
    assert [each for each in said if OTHER_WAYS.search(each) and BYTES.search(each)] == []


def test_the_convention_is_stated_where_bytes_are_first_counted() -> None:
    [third] = (each for each in LESSONS if each.stem.startswith("03"))
    cells = json.loads(third.read_text(encoding="utf-8"))["cells"]
    text = " ".join(" ".join("".join(cell["source"]) for cell in cells).split())
    assert "We always count what *one rank sends*, on a ring." in text
