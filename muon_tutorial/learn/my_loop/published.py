"""Lesson 16: where two published projects, read at these commits, implement four ideas of this course."""

from __future__ import annotations

from pathlib import Path

from ..course.series import rows

SOURCES = {
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/",
    "Megatron-LM": "https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/",
}
IDEAS = {
    "owner": "decides which rank orthogonalizes which matrix, the costly ones spread evenly",
    "bucket": "says which matrices travel together",
    "way_back": "brings what was computed to those who keep the parameters",
    "momentum": "decides which rank keeps a matrix's momentum",
}
NAMES = tuple(rows(Path(__file__).with_name("published.txt")))
"""Functions and classes: project, name, place, idea of this course, and what it does."""


def say_published() -> str:
    """The four ideas, and for each how both projects use it: name, purpose and link."""
    lines = []
    for idea, what in IDEAS.items():
        lines.append(f"{idea.replace('_', ' ')}: {what}")
        for project, symbol, place, _, does in (each for each in NAMES if each[3] == idea):
            lines += [f"  {project}, {symbol}", f"    {does}", f"    {SOURCES[project]}{place}"]
    return "\n".join(lines)
