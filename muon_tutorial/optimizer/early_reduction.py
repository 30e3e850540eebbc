"""Phase 1 while backward still runs: a bucket's gradients set out as soon as all of them are there.

Buckets go in the opposite order of the plan's, as backward goes through a model, and each after the one
before it, however early it is complete. So all ranks ask for the same collectives in the same order, whatever
order their gradients come in. Knows hooks and buckets; what a step does with the result is ``step/``'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.collective import Walk
from ..engine.order import Task, take_turn
from ..errors import GradientError
from ..step.reduce_gradients import reduce_gradients
from ..step.step import PlanStep
from .changed_parameters import GradientVersion, gradient_version


@dataclass(eq=False)
class EarlyReduction:
    """The buckets of one step on their way; ``run`` walks a generator in this rank's world.

    ``paused``: gradients are being accumulated, and stay where they are. ``begun`` buckets have set out.
    """

    step: PlanStep
    run: Callable[[Walk], Any]
    paused: bool = False
    begun: int = 0
    arrived: set[int] = field(default_factory=set)
    sent: dict[int, GradientVersion] = field(default_factory=dict)
    flight: list[Task] = field(default_factory=list)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buckets = self.step.buckets[::-1]
        self.members = [frozenset(matrix.param for matrix in bucket.matrices) for bucket in self.buckets]

    @torch.no_grad()
    def arrive(self, index: int) -> None:
        """Take note that backward has left a parameter's gradient, and send what is complete.

        Raises:
            GradientError: that gradient is already on its way.
        """
        if self.paused:
            return
        if index in self.sent:
            raise GradientError(
                "a second backward() has added to a gradient that is already on its way to the other ranks: "
                "put all but a step's last backward() into `with optimizer.no_sync():`"
            )
        self.arrived.add(index)
        while self.begun < len(self.buckets) and self.members[self.begun] <= self.arrived:
            self._begin()

    def _begin(self) -> None:
        """Let the next bucket set out, and those on their way go on."""
        for index in self.members[self.begun]:
            self.sent[index] = gradient_version(self.step.parameters[index].param)
        task = Task(self.begun, reduce_gradients(self.buckets[self.begun]))
        self.begun += 1
        self.flight = self.run(take_turn([task, *self.flight], self.values))

    @torch.no_grad()
    def finish(self) -> GradientError | None:
        """Send what is left and leave the averaged gradients in the step, as ``PlanStep.ready`` would.

        All ranks must call. Returns what keeps this rank from stepping: a gradient was written to after it
        had been sent.
        """
        while self.begun < len(self.buckets):
            self._begin()
        while self.flight:
            self.flight = self.run(take_turn(self.flight, self.values))
        stale = any(
            gradient_version(self.step.parameters[index].param) != version
            for index, version in self.sent.items()
        )
        self.step.take_sent({self.buckets[place].plan.index: it for place, it in self.values.items()})
        self._begin_anew()
        if not stale:
            return None
        return GradientError(
            "gradients have changed since they were sent to the other ranks during backward(), and would "
            "step otherwise than they stand here: clip by ready_gradients(max_norm), scale the loss in place "
            "of gradients, or leave out overlap_grad_reduce"
        )

    def drop(self) -> None:
        """Forget gradients that were sent, once all have arrived. Where some were, all ranks must call."""
        if self.begun:
            self.finish()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.begun, self.flight, self.values = 0, [], {}
        self.arrived.clear()
        self.sent.clear()


def send_early(reduction: EarlyReduction, params: Sequence[Tensor], owner: object) -> list[Any]:
    """Have ``reduction`` told of every gradient that ``backward()`` leaves, while ``owner`` lives.

    Returns the handles by which the hooks are removed earlier.
    """
    handles = [
        param.register_post_accumulate_grad_hook(lambda _, index=index: reduction.arrive(index))
        for index, param in enumerate(params)
        if param.requires_grad and param.is_leaf
    ]
    weakref.finalize(owner, _remove, handles)
    return handles


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
