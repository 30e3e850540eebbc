"""Plain records: a fault, the observations of its run, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Starter = Literal["launch", "spawn", "LocalWorld", "one process"]

Verdict = Literal[
    "named",  # one named error on every rank that could report, and it says which rank
    "survived",  # equal to the oracle, to the bit
    "wrong rank",
    "unnamed",
    "traceback",
    "hang",
    "abort",
    "orphan",
    "silent difference",
    "half load",
    "retry refused",
]
VERDICTS: tuple[str, ...] = get_args(Verdict)
GOOD = ("named", "survived")

TIMEOUT = 4.0
"""Seconds that a rank waits for the others in every case."""
STRUCK = "struck"
"""The file in a case's folder that holds the time of its fault (monotonic seconds)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault: the ``number``-th drawn from ``seed``. ``rank`` is at fault; None if no single rank is.

    ``dice`` seeds the remaining choices, such as which matrix or which byte.
    """

    seed: int
    number: int
    kind: str
    phase: str
    rank: int | None
    strategy: str
    dp: int
    tp: int
    starter: Starter
    dice: int

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    @property
    def random(self) -> Random:
        """The case's own random generator, the same on all ranks."""
        return Random(self.dice)

    def __str__(self) -> str:
        who = "every rank" if self.rank is None else f"rank {self.rank}"
        grid = f"dp={self.dp} tp={self.tp}"
        return f"{self.kind}, {self.phase}, {who}, {self.strategy}, {grid}, {self.starter}"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's record of a case. ``error`` is "" if there was none; ``named``: the error is one of the
    package's own.

    ``unchanged``: whether its tensors were the same after the error as before. ``equal``: whether its tensors
    were equal to the oracle's at the end. Both are None if they were not checked. Times are in seconds.
    """

    rank: int
    error: str = ""
    error_type: str = ""
    named: bool = True
    unchanged: bool | None = None
    equal: bool | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that was observed of a case.

    ``message`` is the error of the process that started the ranks, and ``blamed`` the rank that this error
    names. ``line_due``: the error should have been one line. ``seconds``: from the fault to the end.
    """

    records: tuple[RankRecord, ...] = ()
    message: str = ""
    message_type: str = ""
    named: bool = True
    blamed: int | None = None
    line_due: bool = False
    seconds: float = 0.0
    signals: tuple[str, ...] = ()  # signals that ended a rank, except the fault itself
    orphans: tuple[str, ...] = ()
    half_loaded: bool = False
    retry_refused: str = ""
    struck: bool = True  # False if the run ended before the fault happened
    equal: bool | None = None  # as in ``RankRecord``, for a case without records


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case and its verdict; ``detail`` is one line, ``seconds`` the case's duration."""

    case: Case
    verdict: Verdict
    detail: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD
