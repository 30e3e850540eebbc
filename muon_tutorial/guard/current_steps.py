"""An optimizer's current steps, one per mesh, made anew when a host has changed their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from ..parameters.describe_matrices import check_matrices
from ..plan.strategies import Plan
from ..step.single_process import AloneStep
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, NoMesh
from .changed_parameters import Changed, MadeFor, check_alternation, drop_replaced, follow_changes

if TYPE_CHECKING:
    from ..callbacks.callback_step import CallbackStep
    from ..worlds.local import LocalMesh

Groups = Sequence[dict[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


Step: TypeAlias = "PlanStep | CallbackStep | AloneStep"
"""A step over a plan, a step with a user's functions, or a single process's step. All have the same
methods."""


@dataclass(frozen=True, slots=True, eq=False)
class MeshStep:
    """A step and the world of its mesh.

    ``agreed`` are the lines of text that ranks compared when the step was made. Along the axes ``assumed``,
    plain parameters are only assumed to be the same; see ``MeshParameters``. ``own_along`` is an axis along
    which ranks have different parameters, if there is one.
    """

    step: Step
    world: LiveWorld | LocalMesh | NoMesh
    agreed: Sequence[str] = ()
    assumed: frozenset[str] = frozenset()
    own_along: str | None = None

    @property
    def plan(self) -> Plan | None:
        """The step's plan; None if a user's own functions or a single process make the step."""
        return self.step.plan if isinstance(self.step, PlanStep) else None


MakeSteps = Callable[[Groups, State, Sequence[MeshStep]], list[MeshStep]]
"""Makes the steps. All ranks must call it; they compare a plan only if it is not the previous plan."""


@dataclass(slots=True, eq=False)
class CurrentSteps:
    """An optimizer's steps, and the parameters and state that they were made for.

    ``alone`` is whether this process steps whole matrices by itself.
    """

    make: MakeSteps
    alone: bool
    made: list[MeshStep] = field(default_factory=list)
    made_for: MadeFor = field(default_factory=MadeFor)

    def forget(self) -> None:
        """Let the next call of ``current`` make the steps anew."""
        self.made_for = MadeFor()

    def current(
        self, groups: Groups, state: MutableMapping[Tensor, Any], before: Sequence[MeshStep] | None = None
    ) -> list[MeshStep]:
        """Return the steps for these groups and this state. If anything has changed, all ranks must call it.

        If the plan is the same as for the steps ``before``, ranks do not compare it again.

        Raises:
            NotAMatrixError: a parameter is no longer a matrix.
            UsageError: momentum would be lost, or no longer fits its parameter.
        """
        changed = self.made_for.changes(groups, state)
        if not changed:
            return self.made
        for number, group in enumerate(groups):
            check_matrices(group, number)
        check_alternation(groups, self.made_for, state)
        if Changed.PARAMETERS in changed:
            drop_replaced(self.made_for, groups, state)
        elif Changed.KINDS in changed:
            follow_changes(groups, self.made_for, state)
        if before is None:  # with the same parameters, ranks need not compare again
            same = not changed & (Changed.PARAMETERS | Changed.KINDS)
            before = self.made if same or self.alone else ()
        self.made = self.make(groups, state, before)
        self.alone = all(isinstance(mesh.step, AloneStep) for mesh in self.made)
        self.made_for = MadeFor.of(groups, state)
        return self.made
