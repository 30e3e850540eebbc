"""The results of a training run as plain data, in bytes, seconds, and nats per byte of text."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .settings import TrainSettings


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: the global batch's mean loss before the step, and the seconds that rank 0 took.

    ``seconds`` include the wait for slower ranks. ``optimizer_seconds`` is the part after that: from when all
    ranks have their gradients to the last new parameter.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    optimizer_seconds: float


@dataclass(frozen=True, slots=True)
class TextFacts:
    """A training text: its source, the number of bytes read, and their SHA-256."""

    source: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PhaseTraffic:
    """One phase of a step, on the rank that sends most in a step. ``sent_bytes`` follows the ring model."""

    phase: str
    requests: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The findings of the built-in check at one step.

    ``differing``: the number of parameter elements, over all ranks, that differ from the single-process
    optimizers' results with the same gradients; ``largest_difference`` is the largest difference.
    ``gradient_error``: the largest error of an element of the reduced gradients, in units of its bound.
    Matrices that stay cut under ``gram`` do not count in ``differing``; ``cut_error`` is their largest
    distance from the single-process result in the Gram form, in units of its bound. ``audit``: the report of
    the step's audit, on one line; ``is_muon``: whether the audit found no fault.
    """

    step: int
    elements: int
    differing: int
    largest_difference: float
    gradient_error: float
    cut_error: float = 0.0
    audit: str = ""
    is_muon: bool = True

    @property
    def passed(self) -> bool:
        """Whether parameters and gradients are equal or within bounds, and the audit found no fault."""
        return self.differing == 0 and self.gradient_error <= 1 and self.cut_error <= 1 and self.is_muon


@dataclass(frozen=True, slots=True)
class RunResult:
    """A complete run. ``loss_before`` and ``loss_after`` are means over the same held-out batches.

    ``records``: the steps of this launch. ``earlier``: the steps of earlier launches of this run, perhaps
    on another grid. ``state_bytes`` has one entry per rank; ``adamw_state_bytes`` is what AdamW would
    keep on every rank if the model was replicated.
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
        return (*self.earlier, *self.records)

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of this launch's steps, without the first step (a warm-up) if there are others.

        The median is None if no step was left to take.
        """
        warm = self.records[1:] or self.records
        return statistics.median_high([record.seconds for record in warm]) if warm else None

    @property
    def optimizer_share(self) -> float | None:
        """The optimizer's fraction of the time, over the steps that ``step_seconds`` covers."""
        warm = self.records[1:] or self.records
        if not warm:
            return None
        return sum(record.optimizer_seconds for record in warm) / sum(record.seconds for record in warm)
