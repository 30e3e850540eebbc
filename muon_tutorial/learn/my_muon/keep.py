"""Write a right answer as a block into the reader's my_muon.py, if the whole optimizer runs with it.

The file beside the notebook is written whole or not at all, and a problem is reported in one line.
"""

from __future__ import annotations

import ast
import dis
import inspect
import os
import re
import sys
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ...errors import TutorialError
from ...launching.launch import launch
from ..course.series import FOLDER, rows
from . import blocks, on_ranks
from .blocks import BrokenFileError, KeptBlock, completed, problem_of, reference, with_block

FILE = "my_muon.py"
SO_FAR = dict(rows(FOLDER / "so_far.txt"))
"""What the functions of all earlier lessons can do together, and what they cannot do yet, by lesson."""
_PARAMETERS = {"dp", "tp", "steps", "seed", "backend", "bucket", "widgets"}


class NotKeptError(Exception):
    """A right answer cannot be written into the file; the message says why."""


@dataclass(frozen=True, slots=True)
class MyMuon:
    """The reader's file as found: its usable blocks, and what is wrong with its other blocks."""

    blocks: dict[str, KeptBlock]
    problems: tuple[str, ...] = ()


def keep(answers: Mapping[str, Any], folder: Path | None = None) -> str:
    """Write right answers, by name, into the reader's file; returns a sentence that says so, or why not.

    Answers of one exercise, such as save and load, are tried and written together.
    """
    if any(getattr(function, "__module__", None) != "__main__" for function in answers.values()):
        return ""
    path = (folder or Path.cwd()) / FILE
    who = f"{' and '.join(answers)} {'are' if len(answers) > 1 else 'is'}"
    try:
        lessons = reference()[1]
        found = {n: KeptBlock(lessons[n].lesson, n, source_with_helpers(n, f)) for n, f in answers.items()}
        if wrong := next(filter(None, map(problem_of, found.values())), None) or try_on_ranks(found):
            raise NotKeptError(wrong)
        write_text(path, reduce(with_block, found.values(), read_text(path)))
    except (NotKeptError, BrokenFileError, OSError) as error:
        return f"{who} not in {FILE} yet: {str(error).rstrip('.')}."
    return f"{who} in {FILE} now."


def read_text(path: Path) -> str:
    """The reader's file, empty if there is none; raises NotKeptError if it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig") if path.exists() else ""
    except UnicodeDecodeError:
        raise NotKeptError(f"{FILE} is not a text in UTF-8; move it away") from None


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, or leave it as it was."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def try_on_ranks(found: Mapping[str, KeptBlock]) -> str | None:
    """Complete the file with these blocks and run it on four ranks; return what goes wrong, or None."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_text(completed(found), encoding="utf-8")
        try:
            asked: dict[str, Any] = {"args": (str(path), 2, 2), "output": "quiet"}
            complaints = launch(on_ranks.try_file, 4, **asked, timeout=8.0, limit=120.0)
        except TutorialError as error:
            said = first_line(error).rstrip(":")
            busy = "; if your machine was busy, check again" if "within its limit" in said else ""
            return f"with it, the whole optimizer of the course fails on four ranks: {said}{busy}"
    wrong = next(filter(None, complaints), None)
    return f"in the whole optimizer of the course, on four ranks, {wrong}" if wrong else None


def first_line(error: Exception) -> str:
    """The first nonempty line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def source_with_helpers(name: str, function: Any) -> str:
    """The source of an answer with its name, and of the functions and constants that it uses.

    Raises NotKeptError if it has no source, or uses something that needs more than torch.
    """
    parts: dict[str, str] = {}
    known = set(vars(on_ranks.load_file(blocks.REFERENCE)))
    waiting = [(name, function)]
    while waiting:
        called, each = waiting.pop()
        parts[called] = _source(called, each)
        for used in sorted(_globals_of(each.__code__)):
            value = each.__globals__.get(used, ...)
            own = isinstance(value, types.FunctionType) and value.__module__ == "__main__"
            if own and used in known and used not in reference()[1]:
                raise NotKeptError(f"the file already defines {used}: rename your helper")
            if used in parts or used in known or value is ...:
                continue
            if own:
                waiting.append((used, value))
            else:
                parts[used] = _line_for(used, value)
    order = sorted(parts, key=lambda part: (parts[part].startswith("def "), part == name))
    return "\n\n".join(parts[part].rstrip() for part in order)


def _source(name: str, function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        [node] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        raise NotKeptError(f"the source of {name} cannot be found; write it as a def in a cell") from None
    if not isinstance(node, ast.FunctionDef) or node.name != name:
        raise NotKeptError(f"write it as `def {name}(…)` in a cell")
    return source


def _globals_of(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    loads = (each for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return {each.argval for each in loads}.union(*(_globals_of(each) for each in inner))


def _line_for(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        if value.__name__.split(".")[0] in {"torch", *sys.stdlib_module_names}:
            return f"import {value.__name__}{'' if name == value.__name__ else f' as {name}'}"
    elif name not in _PARAMETERS and isinstance(value, int | float | str | tuple):
        return f"{name} = {value!r}"
    what = "the lesson's own tools" if name == "lesson" else f"{name!r} of the notebook"
    remedy = "pass it as an argument, or write out its code"
    raise NotKeptError(f"it uses {what}, but the file must run with torch alone; {remedy}")


def read_mine(folder: Path | None = None) -> MyMuon:
    """Read the reader's file; never raises an error, whatever it contains."""
    try:
        every = blocks.blocks_of(read_text((folder or Path.cwd()) / FILE)).items()
        found = {name: block for name, block in every if name in reference()[1]}
    except (BrokenFileError, NotKeptError, OSError) as error:
        return MyMuon({}, (str(error),))
    problems = {name: wrong for name, block in found.items() if (wrong := problem_of(block))}
    good = {name: block for name, block in found.items() if name not in problems}
    return MyMuon(good, tuple(problems.values()))


def so_far(lesson: str, folder: Path | None = None) -> Any:
    """The course's functions, the reader's where they exist. Prints what they can do and whose they are."""
    mine = read_mine(folder)
    print(f"With {FILE} so far, {SO_FAR[lesson]}", say_whose(mine, lesson), sep="\n")
    module = types.ModuleType("my_muon_so_far")
    with patch.dict(sys.modules, {module.__name__: module}):  # dataclasses look up their module there
        exec(compile(completed(mine.blocks), FILE, "exec"), module.__dict__)
    return module


def say_whose(mine: MyMuon, lesson: str = "99") -> str:
    """How many functions of earlier lessons, and lines, are the reader's; if any, the names of the others."""
    due = [name for name, block in reference()[1].items() if block.lesson < lesson]
    yours = [name for name in due if name in mine.blocks]
    others = [name for name in due if name not in mine.blocks]
    lines, whole = lines_of(*(mine.blocks[name].source for name in yours)), lines_of(completed(mine.blocks))
    said = f"all {len(due)} functions are from the reference"
    if yours:
        said = f"{len(yours)} of its {len(due)} functions are yours ({lines} of the file's {whole} lines)"
    said += f"; from the reference: {', '.join(others)}" if yours and others else ""
    broken = f"\n{FILE}, {'; '.join(mine.problems)}. The reference stands in for it." if mine.problems else ""
    return f"{FILE}: {said}.{broken}"


def lines_of(*texts: str) -> int:
    """How many lines of the texts are not empty. A helper that stands in several blocks counts once."""
    parts = (part.strip() for text in texts for part in re.split(r"^(?=def )", text, flags=re.MULTILINE))
    return sum(bool(line.strip()) for part in dict.fromkeys(parts) for line in part.splitlines())


def complete(folder: Path | None = None) -> Path:
    """Write ``my_muon_complete.py`` next to the reader's file: its blocks, completed by the reference."""
    path = (folder or Path.cwd()) / "my_muon_complete.py"
    write_text(path, completed(read_mine(folder).blocks))
    return path
