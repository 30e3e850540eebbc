"""The course counts bytes in one way: what one rank sends, on a ring. Lessons that add ranks up say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.notebooks import read_text, sources

OTHER_WAYS = re.compile(r"\b(receives?|received|hands? over|handed over)\b", re.IGNORECASE)
BYTES = re.compile(r"\b(bytes|entries|numbers)\b")


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.?!])\s+(?=[A-Z*`(])", " ".join(text.split()))


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.stem)
def test_no_lesson_counts_bytes_that_are_received_or_handed_over(source: Path) -> None:
    cells = read_text(source.read_text(encoding="utf-8")).cells
    said = [each for cell in cells for each in sentences(cell.source)]
    counted = [each for each in said if OTHER_WAYS.search(each) and BYTES.search(each)]
    assert counted == []


def test_the_convention_is_stated_where_bytes_are_first_counted() -> None:
    [third] = sources(["03"])
    assert "the whole course counts bytes in this way: what *one rank sends* on a ring" in third.read_text(
        encoding="utf-8"
    ).replace("\n# ", " ")
