"""Phase 1 during backward: a bucket's gradients are sent as soon as all of them exist.

Buckets have their own process group, and are sent strictly in the plan's reverse order, which is about the
order in which backward completes them. So all ranks issue the same collectives in the same order, even if
their gradients come in different orders, or the ranks also send other data. Backward waits for no collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Walk
from ..engine.order import Task, take_turn
from ..errors import GradientError, TutorialError
from .agreement import checksum
from .reduce_gradients import pack_gradients, reduce_gradients
from .step import PlanStep


@dataclass(eq=False)
class EarlyReduction:
    """The buckets of one step that are sent during backward.

    ``run`` runs a generator in a world with its own process groups. While ``paused``, gradients accumulate
    and are not sent. ``begun`` is the number of buckets that have been sent, and ``sent`` contains a checksum
    of each. Once ``finished``, all sums are complete and the step can use them. If this rank cannot step,
    ``error`` says why.
    """

    step: PlanStep
    run: Callable[[Walk], Any]
    paused: bool = False
    begun: int = 0
    finished: bool = False
    error: TutorialError | None = None
    arrived: set[int] = field(default_factory=set)
    sent: dict[int, Tensor] = field(default_factory=dict)
    flight: list[Task] = field(default_factory=list)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buckets = self.step.buckets[::-1]
        self.members = [frozenset(matrix.param for matrix in bucket.matrices) for bucket in self.buckets]

    @torch.no_grad()
    def arrive(self, index: int) -> None:
        """Record that backward has produced a parameter's gradient. Send buckets that are now complete."""
        if self.finished or any(index in self.members[place] for place in range(self.begun)):
            raise GradientError(
                "a backward() has added to a gradient that is already on its way to the other ranks: put "
                "every backward() of a step except the last into `with optimizer.no_sync():`, and call "
                "step() or optimizer.zero_grad() before the next step"
            )
        if self.paused:
            return
        self.arrived.add(index)
        while self.begun < len(self.buckets) and self.members[self.begun] <= self.arrived:
            self._begin()

    def _begin(self) -> None:
        """Send the next bucket. If a gradient cannot be sent, send zeros, and refuse the step later."""
        bucket = self.buckets[self.begun]
        try:
            flat = pack_gradients(bucket)
        except (TutorialError, RuntimeError) as error:
            self.error = self.error or GradientError(f"a gradient of {bucket.name}: {error}")
            flat = torch.zeros(bucket.model_numel, dtype=bucket.plan.gradient.dtype, device=bucket.device)
        self.sent[self.begun] = checksum(flat)
        task = Task(self.begun, reduce_gradients(bucket, flat))
        self.begun += 1
        self.flight += self.run(take_turn([task], self.values))

    @torch.no_grad()
    def finish(self) -> TutorialError | None:
        """Send the remaining buckets and give the averaged gradients to the step, like ``PlanStep.ready``.

        All ranks must call it equally often. A second call does nothing. An error is returned if a gradient
        could not be sent, or has changed since it was sent.
        """
        if self.finished:
            return self.error
        during_backward = self.begun
        while self.begun < len(self.buckets):
            self._begin()
        while self.flight:
            flight, self.flight = self.flight, []
            self.flight = self.run(take_turn(flight, self.values))
        if any(self.values.get(place) is None for place in range(len(self.buckets))):
            raise GradientError("a bucket's gradients were lost on their way: start the ranks again")
        self.step.averaged = {self.buckets[place].plan.index: it for place, it in self.values.items()}
        self.step.sent_early = True
        if self.error is None and any(self._has_changed(place) for place in range(during_backward)):
            self.error = GradientError(
                "gradients have changed since they were sent to the other ranks during backward(): clip with "
                "ready_gradients(max_norm), scale the loss instead of gradients, or leave out "
                "overlap_grad_reduce"
            )
        self.finished, self.values = True, {}
        return self.error

    def _has_changed(self, place: int) -> bool:
        """Whether a bucket's bits have changed since it was sent. (Version counters miss some writes.)"""
        return not torch.equal(checksum(pack_gradients(self.buckets[place])), self.sent[place])

    def drop(self) -> None:
        """Forget gradients that have arrived, and start over."""
        if self.begun and not self.finished:
            raise GradientError(
                "gradients that backward() has begun to send cannot be dropped, as other ranks wait for the "
                "rest of them: call step() or ready_gradients() first, on all ranks; put a "
                "backward() that you may drop into `with optimizer.no_sync():`"
            )
        self.begun, self.finished, self.error, self.values = 0, False, None, {}
        self.arrived.clear()
        self.sent.clear()
