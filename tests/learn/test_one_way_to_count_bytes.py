"""The course counts bytes in one way: what one rank sends, on a ring; where ranks differ, their mean."""

from __future__ import annotations

import json
import re
from base64 import b64decode

import pytest

from scripts.files import FOLDER

LESSONS = {path.stem[:2]: path for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))}
COUNTED = re.compile(r"\b(bytes|entries|[kMG]?B|on a ring)\b")
OTHER_WAYS = re.compile(
    r"\b(receiv\w+|fetch\w*|moves|moved|hand(s|ed)? over|groups? sends?|sent by (all|a group))\b"
    r"|(?<!mean )\bof (all|(a|one)( \w+)? group)( ranks| sends?)\b"
)
EXCEPTIONS = {  # by lesson: the beginning of its one sentence that may contain such a word
    "07": "Your own cuts have moved bytes",  # counts nothing
    "10": "Each receiver gets the same entries",  # says why you send that many
    "11": "Your code will have moved the bytes",  # counts nothing
}


def text_of(lesson: str) -> str:
    """A lesson's texts, one line a paragraph, its outputs, and the words in its pictures."""
    cells = json.loads(LESSONS[lesson].read_text(encoding="utf-8"))["cells"]
    said = [re.sub(r"(?<!\n)\n(?!\n)", " ", "".join(cell["source"])) for cell in cells]
    shown = json.dumps([cell.get("outputs") for cell in cells], ensure_ascii=False)
    drawn = "\n".join(b64decode(each).decode() for each in re.findall(r"svg\+xml;base64,([\w+/=]+)", shown))
    printed = re.sub(r"base64,[\w+/=]+", "", shown).replace("\\n", "\n")
    return "\n".join([*said, printed, *re.findall("<!-- (.*?) -->", drawn)])


def other_counts(text: str) -> list[str]:
    said = re.split(r"(?<=[.?!])\s+|[\n<>]+", text)
    return [each for each in said if COUNTED.search(each) and OTHER_WAYS.search(each)]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_counts_what_one_rank_sends(lesson: str) -> None:
    found, allowed = other_counts(text_of(lesson)), EXCEPTIONS.get(lesson)
    assert {each.startswith(allowed or "no exception") for each in found} == ({True} if allowed else set())


def test_lessons_print_the_same_numbers_for_the_same_step() -> None:
    assert "We always count what *one rank sends*, on a ring." in text_of("03")
    sent = dict(re.findall(r"\bzero1  +([a-z_ ]+?)  +([\d,]+)", text_of("10")))
    dp = [int(count.replace(",", "")) for phase, count in sent.items() if phase != "tp gather"]
    assert ("zero1", f"{sum(dp):,}") in re.findall(r"fp32  (\w+) +([\d,]+)", text_of("13"))
