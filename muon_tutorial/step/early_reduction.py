"""Phase 1 while backward still runs: a bucket's gradients set out as soon as all of them are there.

Buckets go in the opposite order of the plan's, as backward goes through a model, and each after the one
before it, however early it is complete; and over a process group of their own. So all ranks ask for the same
collectives in the same order, whatever order their gradients come in and whatever else they ask. Nothing is
waited for during backward. Knows hooks and buckets; what a step does with the result is ``step/``'s.
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
from .reduce_gradients import pack_gradients, send_gradients
from .step import PlanStep


@dataclass(eq=False)
class EarlyReduction:
    """The buckets of one step on their way; ``run`` walks a generator in a world with groups of its own.

    ``paused``: gradients are being accumulated, and stay where they are. ``begun`` buckets have set out, and
    ``sent`` holds a checksum of what each of them was. ``finished``: all have arrived, and wait for the step.
    ``error`` is what keeps this rank from stepping.
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

    @property
    def on_its_way(self) -> bool:
        """Whether some gradients have set out, and not all have arrived."""
        return self.begun > 0 and not self.finished

    @torch.no_grad()
    def arrive(self, index: int) -> None:
        """Take note that backward has left a parameter's gradient, and send what is complete.

        Raises:
            GradientError: that gradient is already on its way.
        """
        if self.finished or any(index in self.members[place] for place in range(self.begun)):
            raise GradientError(
                "a backward() has added to a gradient that is already on its way to the other ranks: put all "
                "but a step's last backward() into `with optimizer.no_sync():`, before that one, and call "
                "step() or optimizer.zero_grad() before the next"
            )
        if self.paused:
            return
        self.arrived.add(index)
        while self.begun < len(self.buckets) and self.members[self.begun] <= self.arrived:
            self._begin()

    def _begin(self) -> None:
        """Let the next bucket set out. A gradient that cannot be sent goes as zeros, and the step refuses."""
        bucket = self.buckets[self.begun]
        try:
            flat = pack_gradients(bucket)
        except (TutorialError, RuntimeError) as error:
            self.error = self.error or GradientError(f"a gradient of {bucket.name}: {error}")
            device = bucket.matrices[0].parameter.param.device
            flat = torch.zeros(bucket.held, dtype=bucket.plan.gradient.dtype, device=device)
        self.sent[self.begun] = checksum(flat)
        task = Task(self.begun, send_gradients(bucket, flat))
        self.begun += 1
        self.flight += self.run(take_turn([task], self.values))

    @torch.no_grad()
    def finish(self) -> TutorialError | None:
        """Send what is left and leave the averaged gradients in the step, as ``PlanStep.ready`` would.

        All ranks must call, as often: a second time it does nothing. Returns what keeps this rank from
        stepping: a gradient that could not be sent, or that was written to since.
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
        self.step.take_sent({self.buckets[place].plan.index: it for place, it in self.values.items()})
        if self.error is None and any(self._has_changed(place) for place in range(during_backward)):
            self.error = GradientError(
                "gradients have changed since they were sent to the other ranks during backward(), and would "
                "step otherwise than they stand here: clip by ready_gradients(max_norm), scale the loss in "
                "place of gradients, or leave out overlap_grad_reduce"
            )
        self.finished, self.values = True, {}
        return self.error

    def _has_changed(self, place: int) -> bool:
        """Whether a bucket's gradients are others than were sent; by their bits, for not all writes count."""
        return not torch.equal(checksum(pack_gradients(self.buckets[place])), self.sent[place])

    def drop(self) -> None:
        """Forget gradients that have arrived, and begin anew.

        Raises:
            GradientError: some are still on their way, and other ranks may have sent more or fewer.
        """
        if self.on_its_way:
            raise GradientError(
                "gradients that were sent during backward() cannot be dropped on their way, for the other "
                "ranks wait for the rest: call step() or ready_gradients() first, on all ranks; put a "
                "backward() that you may drop into `with optimizer.no_sync():`"
            )
        self.begun, self.finished, self.error, self.values = 0, False, None, {}
        self.arrived.clear()
        self.sent.clear()
