"""Hooks that run when ``backward()`` produces a gradient.

The hooks make a gradient refuse to be clipped if the step has yet to average it, or tp cuts it by hand. With
``overlap_grad_reduce``, hooks also send the gradient to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..errors import StrategyError, TutorialError
from ..step.parameter_state import same_tensors
from ..step.step import PlanStep
from ..step.unreduced_gradient import hook_gradients, mark_gradients
from ..worlds.live import LiveWorld
from .check_clipping import cut_by_hand
from .current_steps import MeshStep

if TYPE_CHECKING:
    from ..step.early_reduction import EarlyReduction


@dataclass(eq=False)
class GradientHooks:
    """The hooks on the parameters of an optimizer and its companions. Deleting this object removes them.

    ``overlap`` is whether gradients are sent during ``backward()``. ``reduction`` sends the current step's
    gradients. Once ranks have agreed on the plan, ``apart`` contains the world that ``reduction`` uses.
    """

    overlap: bool = False
    reduction: EarlyReduction | None = None
    apart: list[LiveWorld] = field(default_factory=list)
    paused: bool = False
    _made: Sequence[MeshStep] | None = None
    _cut: Sequence[Tensor] = ()
    _marked: Sequence[Tensor] = ()
    _handles: list[Any] = field(default_factory=list)

    def attach(self, made: Sequence[MeshStep], params: Sequence[Tensor], beside: Sequence[Tensor]) -> None:
        """Hook the gradients of ``params``, and of other optimizers' parameters (``beside``).

        Raises:
            StrategyError: ``overlap`` is set, but this strategy does not average gradients itself.
        """
        if made is not self._made:
            self._cut = _cut_by_tp(made)
        marked = [*params, *beside] if any(mesh.step.averages for mesh in made) else self._cut
        if made is self._made and same_tensors(marked, self._marked):
            return
        if self.reduction is not None:
            self.reduction.drop()
        for handle in self._handles:
            handle.remove()
        self._made, self._marked = made, marked
        self._handles = mark_gradients(marked, self)
        self.reduction = self._early_reduction(made) if self.overlap else None
        if (reduction := self.reduction) is not None:
            self._handles += hook_gradients(params, lambda index, _: reduction.arrive(index), self)

    def _early_reduction(self, made: Sequence[MeshStep]) -> EarlyReduction | None:
        """Make the object that sends gradients during backward; None if there is no other rank."""
        mesh = made[0]
        if len(made) != 1 or not isinstance(mesh.step, PlanStep) or mesh.step.plan.expects != "local":
            raise StrategyError(
                "overlap_grad_reduce is for a strategy that averages gradients itself ('zero1', "
                "'layerwise'); with other strategies, DDP or FSDP2 already averages them during backward"
            )
        if not isinstance(mesh.world, LiveWorld):
            raise StrategyError(
                "overlap_grad_reduce needs one process per rank; a LocalWorld has one for all"
            )
        if not mesh.step.averages:
            return None
        from ..step.early_reduction import EarlyReduction

        apart = self.apart
        return EarlyReduction(mesh.step, lambda walk: apart[0].run(walk), paused=self.paused)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Send no gradients within this context."""
        before = self.paused
        self._set_paused(True)
        try:
            yield
        finally:
            self._set_paused(before)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        if self.reduction is not None:
            self.reduction.paused = paused

    def finish(self) -> TutorialError | None:
        """Wait for gradients that were sent during backward. If this rank cannot step, return the error."""
        return None if self.reduction is None else self.reduction.finish()


def _cut_by_tp(made: Sequence[MeshStep]) -> list[Tensor]:
    """Return Muon's matrices that tp cuts by hand, if ``ready_gradients()`` can clip by the whole norm."""
    cut, worlds = cut_by_hand(made), [mesh.world for mesh in made if isinstance(mesh.world, LiveWorld)]
    whole = all(world.grid.world_size == dist.get_world_size() for world in worlds)
    return cut["tp"] if cut.keys() == {"tp"} and whole and not any(mesh.own_along for mesh in made) else []
