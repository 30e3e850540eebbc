"""What a training run reports, as plain data. Bytes, seconds, and nats per byte of text."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .settings import TrainSettings


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: the mean loss of the global batch before it, and how long rank 0 took.

    ``optimizer_seconds`` is the part from the last gradient to the last new parameter; waiting for slower
    ranks is in it.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    optimizer_seconds: float


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Which text it was: where from, bytes read, and their SHA-256."""

    source: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PhaseTraffic:
    """One phase of the optimizer's step, on the rank that sends most. Bytes sent are those of a ring."""

    phase: str
    requests: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """What the built-in check found at one step.

    ``differing`` counts parameter elements, over all ranks, that are not what the single-process optimizers
    make of the same gradients; ``largest_difference`` is the largest among them. ``gradient_error`` is the
    largest error of a reduced gradient element against the float64 mean, in units of its bound (1 is at it).
    Matrices that strategy ``gram`` leaves cut are counted apart: ``cut_error`` is how far the furthest of
    them is from the Gram form in one process, in units of that bound.
    """

    step: int
    elements: int
    differing: int
    largest_difference: float
    gradient_error: float
    cut_error: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every parameter is bitwise right, or within its bound, and every reduced gradient is."""
        return self.differing == 0 and self.gradient_error <= 1 and self.cut_error <= 1


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run, complete. Losses before and after are means over the same held-out batches.

    ``records`` are those of the steps taken now, ``earlier`` those before the one that a run went on from,
    perhaps on another grid. ``state_bytes`` has one entry a rank; ``adamw_state_bytes`` is what AdamW would
    keep on every rank for the same model replicated.
    """

    settings: TrainSettings
    text: TextFacts
    parameters: int
    loss_before: float
    loss_after: float
    records: tuple[StepRecord, ...]
    traffic: tuple[PhaseTraffic, ...]
    state_bytes: tuple[int, ...]
    adamw_state_bytes: int
    check: CheckVerdict | None
    earlier: tuple[StepRecord, ...] = ()

    @property
    def all_records(self) -> tuple[StepRecord, ...]:
        """The records of the whole run, as far as they are known."""
        return (*self.earlier, *self.records)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step taken now, the first one, which warms up, left out where there are others.

        None where no step was left to take.
        """
        warm = self.records[1:] or self.records
        return statistics.median_high([record.seconds for record in warm]) if warm else None

    @property
    def optimizer_share(self) -> float | None:
        """The optimizer's part of that time."""
        warm = self.records[1:] or self.records
        if not warm:
            return None
        return sum(record.optimizer_seconds for record in warm) / sum(record.seconds for record in warm)
