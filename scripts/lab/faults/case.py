"""Plain records: a fault, what was observed of it, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Starter = Literal["launch", "spawn", "torchrun", "train", "LocalWorld", "one process"]

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
    "executed pickle",
]
VERDICTS: tuple[str, ...] = get_args(Verdict)
GOOD = ("named", "survived")

TIMEOUT = 4.0
"""Seconds that a rank waits for the others in every case."""
PATIENCE = 2.0
"""Seconds beyond the timeout after which a case counts as a hang."""
STRUCK = "struck"
"""The file in a case's folder that holds the time of its fault (monotonic seconds)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault: the ``number``-th drawn from ``seed``. ``rank`` is at fault; None: no single rank is.

    ``dice`` seeds the choices that the other fields leave open: which matrix, which byte.
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

    ``unchanged``: its tensors were the same after the error as before. ``equal``: at the end they equalled
    the oracle's. ``unchanged`` and ``equal`` are None if they were not checked. Times are in seconds.
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

    ``message`` is the starter's error and ``blamed`` the rank it named; ``line_due``: that error should have
    been one line. ``seconds`` are counted from the fault to the end, if that is known.
    """

    records: tuple[RankRecord, ...] = ()
    message: str = ""
    message_type: str = ""
    named: bool = True
    blamed: int | None = None
    line_due: bool = False
    seconds: float = 0.0
    limit: float = TIMEOUT + PATIENCE
    signals: tuple[str, ...] = ()  # signals that ended a rank, except the fault itself
    orphans: tuple[str, ...] = ()
    executed: bool = False
    half_loaded: bool = False
    retry_refused: str = ""
    struck: bool = True  # False: the run ended before the fault came
    equal: bool | None = None  # for a case without records


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
