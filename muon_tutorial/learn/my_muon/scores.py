"""Scores of exercises with a par: comments at the top of the reader's my_muon.py, and a table of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..course.series import FOLDER, rows
from .blocks import HEAD
from .keep import FILE, NotKeptError, read_text, write_text

PARS = {name: (lesson, float(par), unit) for lesson, name, par, unit in rows(FOLDER / "pars.txt")}
"""For each function with a par: its lesson, its par with the lesson's own parameters, and the unit."""
_SCORE = re.compile(r"^# score in lesson \d\d: (\w+) (\d+\.?\d*), par (\d+\.?\d*)$\n?", re.MULTILINE)


def scores_of(text: str) -> dict[str, tuple[float, float]]:
    """The scores in a file by name, each with the par that it had; other grids have other pars."""
    found = (score.groups() for score in _SCORE.finditer(text))
    return {name: (float(mine), float(par)) for name, mine, par in found if name in PARS}


def keep_score(function: Any, mine: float, par: float, folder: Path | None = None) -> str:
    """Write a score into the reader's file if none is better; returns what the reader should know of it."""
    name, path = getattr(function, "__name__", ""), (folder or Path.cwd()) / FILE
    if getattr(function, "__module__", None) != "__main__" or name not in PARS or not par:
        return ""
    try:
        best = scores_of(text := read_text(path))
        if name not in best or mine * best[name][1] < best[name][0] * par:
            best[name] = mine, par
            each = ((PARS[name][0], name, *best[name]) for name in PARS if name in best)
            lines = ("# score in lesson {}: {} {:.10g}, par {:.10g}\n".format(*score) for score in each)
            write_text(path, "".join(lines) + (_SCORE.sub("", text) or HEAD))
    except (NotKeptError, OSError) as error:
        return f"This score is not in {FILE}: {str(error).rstrip('.')}."
    return ""


def say_scores(folder: Path | None = None) -> str:
    """All exercises with a par, and the reader's best scores, as a table. It never raises an error."""
    try:
        text, lines = read_text((folder or Path.cwd()) / FILE), []
    except (NotKeptError, OSError) as error:
        text, lines = "", [f"{str(error).rstrip('.')}."]
    best = scores_of(text)
    for name, (lesson, usual, unit) in PARS.items():
        mine, par = best.get(name, (None, usual))
        score = "no score yet" if mine is None else f"{mine:,.10g}"
        lines.append(f"{lesson:8}{name:21}{score:>12}{par:>10,.10g}  {unit}")
    if damaged := re.search(r"^# score in lesson .*", _SCORE.sub("", text), re.MULTILINE):
        lines.append(f"{FILE} has a line that is no score. Delete it, or correct it: {damaged[0][:60]}")
    return "\n".join([f"{'lesson':8}{'exercise':21}{'your best':>12}{'par':>10}", *lines])
