"""What a fault is, what was seen of it, and how it ended: plain records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal, get_args

Starter = Literal["launch", "spawn", "torchrun", "train", "LocalWorld", "one process"]

Verdict = Literal[
    "named",  # one named error on every rank that could speak, and it says which rank
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
    "not guarded",  # the package has no guard against this kind yet: the case was not run
]
VERDICTS: tuple[str, ...] = get_args(Verdict)
GOOD = ("named", "survived")

TIMEOUT = 4.0
"""Seconds a rank waits for the others in every case."""
PATIENCE = 2.0
"""Seconds beyond the timeout after which a case counts as a hang."""


STRUCK = "struck"
"""The file in a case's folder that says when its fault happened (monotonic seconds)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault: the ``number``-th drawn from ``seed``. ``rank`` breaks, or nobody alone where it is None.

    ``dice`` decides what the other fields leave open: which matrix, which byte.
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
        """How many ranks there are."""
        return self.dp * self.tp

    @property
    def random(self) -> Random:
        """The case's own dice, the same on all ranks."""
        return Random(self.dice)

    def __str__(self) -> str:
        who = "every rank" if self.rank is None else f"rank {self.rank}"
        grid = f"dp={self.dp} tp={self.tp}"
        return f"{self.kind}, {self.phase}, {who}, {self.strategy}, {grid}, {self.starter}"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank saw of a case. ``error`` is empty where it met none; ``named``: it is the package's own.

    ``unchanged``: after the error its tensors were as before. ``equal``: at the end they were the oracle's.
    None where that was not looked at. Times are in seconds.
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

    ``message`` and ``blamed`` are what the starter said, and the rank it named; ``line_due``: its words
    should have been one line. ``seconds`` are counted from the fault to the end, where that is known.
    """

    records: tuple[RankRecord, ...] = ()
    message: str = ""
    message_type: str = ""
    named: bool = True
    blamed: int | None = None
    line_due: bool = False
    seconds: float = 0.0
    limit: float = TIMEOUT + PATIENCE
    signals: tuple[str, ...] = ()  # that ended a rank and were not the fault itself
    orphans: tuple[str, ...] = ()
    executed: bool = False
    half_loaded: bool = False
    retry_refused: str = ""
    struck: bool = True  # False: the run was over before the fault came
    equal: bool | None = None  # of a case without records


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case and its verdict; ``detail`` is one line, ``seconds`` what it took."""

    case: Case
    verdict: Verdict
    detail: str
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether it ended as it should."""
        return self.verdict in GOOD

    def as_json(self) -> dict[str, Any]:
        """For the file beside the table."""
        row = asdict(self.case) | {"verdict": self.verdict, "detail": self.detail}
        return row | {"seconds": round(self.seconds, 3)}
