"""Lesson 16: the diary of a run, a line for each event, in a file that outlives ranks that are killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DIARY = "diary.jsonl"


def write_line(diary: Path, writes: bool, event: str, **facts: Any) -> None:
    """Append a line, if this is the rank that writes. It is in the file when this returns."""
    if writes:
        with diary.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")
