"""The text of a my_muon.py, made of blocks between marks: how to complete it, and what is wrong with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REFERENCE = Path(__file__).with_name("reference.py")
HEAD = '''"""My answers from the course. The optimizer that they make is in my_muon_complete.py."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
'''
_OF_REFERENCE = re.compile(r"^# ── lesson \d\d: (\w+) ──\n.*?\n\n\n", re.MULTILINE | re.DOTALL)
"""A block of the reference: it has no end mark, and ends at two blank lines."""
_MARK = re.compile(r"^# ── (?:lesson (\d\d): |end of )(\w+) ──$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """One answer: its lesson and name, its source without the marks, and the source's first line number."""

    lesson: str
    name: str
    source: str
    line: int = 0

    def __str__(self) -> str:
        body = self.source.strip("\n")
        return f"# ── lesson {self.lesson}: {self.name} ──\n{body}\n\n\n# ── end of {self.name} ──\n"


class BrokenFileError(ValueError):
    """The blocks of a file cannot be told apart. The message names the line."""


def blocks_of(text: str) -> dict[str, KeptBlock]:
    """The blocks of a file, by name; raises BrokenFileError if a mark has no partner."""
    found: dict[str, KeptBlock] = {}
    opened: re.Match | None = None
    for mark in _MARK.finditer(text):
        line = text.count("\n", 0, mark.start()) + 1
        if (opened is None) != (mark[1] is not None) or (opened and opened[2] != mark[2]):
            what = f"{opened[2]} has no end" if opened else f"{mark[2]} has no beginning"
            raise BrokenFileError(f"line {line}: the block of {what}")
        if opened:
            start = text.count("\n", 0, opened.end()) + 2
            found[mark[2]] = KeptBlock(opened[1], mark[2], text[opened.end() + 1 : mark.start()], start)
        opened = None if opened else mark
    if opened:
        line = text.count("\n", 0, opened.start()) + 1
        raise BrokenFileError(f"line {line}: the block of {opened[2]} has no end")
    return found


def with_block(text: str, block: KeptBlock) -> str:
    """The file with this block in place of the block of the same name, or at the end if there is none."""
    if block.name not in blocks_of(text):
        return f"{(text or HEAD).rstrip()}\n\n\n{block}"
    start = text.index(f"# ── lesson {blocks_of(text)[block.name].lesson}: {block.name} ──")
    end = f"# ── end of {block.name} ──"
    return text[:start] + str(block).rstrip() + text[text.index(end, start) + len(end) :]


@cache
def reference() -> tuple[str, Mapping[str, KeptBlock]]:
    """The text of the complete file, and its blocks, in the order of lessons."""
    text = _OF_REFERENCE.sub(r"\g<0># ── end of \1 ──\n\n\n", REFERENCE.read_text(encoding="utf-8"))
    return text, blocks_of(text)


def completed(mine: Mapping[str, KeptBlock]) -> str:
    """The reference with the reader's blocks in place of its own."""
    text, due = reference()
    for name, block in mine.items():
        if name in due:
            text = with_block(text, KeptBlock(due[name].lesson, name, f"# yours\n{block.source}"))
    return text


def problem_of(block: KeptBlock) -> str | None:
    """Why a block cannot be used, with the line in the file; None if it can."""
    try:
        tree = ast.parse(block.source)
    except SyntaxError as error:
        return f"line {block.line + (error.lineno or 1) - 1}: {error.msg}"
    place = f"line {block.line}: " if block.line else ""  # an answer that is not in the file yet has no line
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if block.name not in defined:
        return f"{place}the block of {block.name} does not define it"
    try:
        scope: dict[str, object] = {}
        exec(compile(HEAD + block.source, "my_muon.py", "exec"), scope)
    except Exception as error:
        return f"{place}the block of {block.name} raised {type(error).__name__}: {error}"
    asked = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "group" in asked - used:
        return f"{place}{block.name} never uses `group`. Pass it on in each call"
    return None
