"""Turns the observations of a case into its verdict; starts nothing and reads no file.

The worst observation decides: a run that names the right rank but leaves an orphan gets the verdict "orphan".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .case import TIMEOUT, Case, Seen, Verdict

LIMIT = TIMEOUT + 2.0
"""Seconds from a fault to the end of its run; a run that takes longer counts as a hang."""
_NUMBER = r"\d+\b(?!\.\d)"
_RANKS = re.compile(rf"\branks? ({_NUMBER}(?:(?:, and|,| and|–| to) ?{_NUMBER})*)")
_TWO = re.compile(r"\branks (\d+) and (\d+) differ\b")  # if only two ranks hold a part, either may be wrong
_NOBODY = "no rank crashed"  # how a launch's text begins if every rank only waited
_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])")
_LONGEST = 300  # characters of detail


def judge(case: Case, seen: Seen) -> tuple[Verdict, str]:
    """The verdict, and one line that says why."""
    for verdict, detail in _findings(case, seen):
        return verdict, one_line(detail)
    raise AssertionError("every case ends somehow")


def _findings(case: Case, seen: Seen) -> Iterable[tuple[Verdict, str]]:
    """All verdicts that apply, the worst first, each with its reason."""
    errors = (seen.message, *(record.error for record in seen.records))
    said = list(dict.fromkeys(filter(None, errors)))  # without repetitions; ``seen.message`` comes first
    if seen.orphans:
        yield "orphan", f"still running: {', '.join(seen.orphans)}"
    if seen.signals:
        yield "abort", f"ended by {', '.join(seen.signals)}: {seen.message or 'without a message'}"
    if seen.seconds > LIMIT:
        yield "hang", f"{seen.seconds:.1f} s after the fault, {LIMIT:g} allowed: {' / '.join(said)}"
    if seen.half_loaded:
        yield "half load", f"tensors had changed when it was refused: {' / '.join(said)}"
    if seen.retry_refused:
        yield "retry refused", seen.retry_refused
    wrong = [record.rank for record in seen.records if record.equal is False]
    moved = [record.rank for record in seen.records if record.unchanged is False]
    loud = not seen.named or any(record.error and not record.named for record in seen.records)
    if said and not loud and moved:
        yield "silent difference", f"refused, yet something had changed on ranks {moved}: {said[0]}"
    if wrong or seen.equal is False:
        words = said[0] if said else "no error"
        yield "silent difference", f"not the oracle's bits on ranks {wrong}; {words}"
    if not said:
        yield "survived", "equal to the oracle" if seen.struck else "over before the fault came"
    yield from _words(case, seen, said)


def _words(case: Case, seen: Seen, said: list[str]) -> Iterable[tuple[Verdict, str]]:
    """Verdicts on the errors' texts: are they the package's own, on all ranks, about the right rank?"""
    raw = [record for record in seen.records if record.error and not record.named]
    if raw or not seen.named:
        kind = raw[0].error_type if raw else seen.message_type
        yield "traceback", f"{kind}: {said[0]}"
    if seen.line_due and "Traceback (most recent call last)" in seen.message:
        yield "traceback", seen.message[seen.message.index("Traceback") :]
    quiet = [record.rank for record in seen.records if not record.error]
    if seen.records and quiet and not seen.message:
        yield "unnamed", f"ranks {quiet} got no error: {said[0]}"
    if case.rank is None:
        yield "named", said[0]
        return
    verdicts = [blame(text, case.rank, seen.blamed, case.world_size) for text in said]
    bad: tuple[Verdict, ...] = ("wrong rank", "unnamed")
    yield from ((verdict, said[verdicts.index(verdict)]) for verdict in bad if verdict in verdicts)
    yield "named", said[0]


def blame(text: str, guilty: int, blamed: int | None = None, ranks: int = 0) -> Verdict:
    """Whether a message names the guilty rank; ``blamed`` is the rank that a launch's error carries.

    A message names a rank if it lists the rank alone, such as 2 in "rank 2: …, ranks 0, 1, 3: …". If it lists
    every rank alone, it names the first. A message about two ranks that differ names both.
    """
    if blamed is not None:
        return "named" if blamed == guilty else "wrong rank"
    if text.startswith(_NOBODY):
        return "unnamed"
    groups = [[int(digits) for digits in re.findall(r"\d+", found)] for found in _RANKS.findall(text)]
    if ranks == 2 and [0, 1] in map(sorted, groups):
        return "named"
    if (two := _TWO.search(text)) and guilty in map(int, two.groups()):
        return "named"
    alone = [group[0] for group in groups if len(group) == 1]
    if not groups or (not alone and guilty in groups[0] and len(groups) == 1 and len(groups[0]) > 1):
        return "unnamed"
    if alone and (alone[0] == guilty or (guilty in alone and len(set(alone)) <= 2)):
        return "named"
    return "wrong rank"


def one_line(text: str) -> str:
    """A message as one line for a table, without this machine's folders."""
    line = _FOLDERS.sub("…/", " ".join(text.split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
