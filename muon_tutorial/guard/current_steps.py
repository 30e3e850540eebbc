"""The steps that an optimizer takes now, one a mesh: made anew where a host has changed their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..engine.collective import Walk
from ..plan.strategies import Plan
from ..step.agreement import Fingerprint, Ranks
from ..step.single_process import AloneStep
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, drive, refuse
from ..worlds.local import LocalMesh
from .changed_parameters import Changed, MadeFor, drop_replaced, follow_changes

Groups = Sequence[dict[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


class Step(Protocol):
    """What the guard asks of a step, be it over a plan, through a user's functions, or of a process alone."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that step together."""

    @property
    def averages(self) -> bool:
        """Whether gradients are each rank's own until the step averages them."""

    def check_groups(self, groups: Groups) -> None:
        """Refuse what a group says of Newton–Schulz where this step cannot do it."""

    def agree(self, fingerprint: Fingerprint, rest: Sequence[Tensor] = ()) -> Walk:
        """Compare fingerprints, and find out which gradients there are, unless that is known."""

    def trust(self) -> None:
        """Take this rank's gradients for those that all ranks have."""

    def step(self) -> Walk:
        """One optimizer step."""

    def forget(self) -> None:
        """Gradients have been used, or have changed since."""


@dataclass(frozen=True, slots=True, eq=False)
class MeshStep:
    """A step and the world of the mesh that it runs on, or no world where it makes its own calls, or none.

    ``agreed`` describes what ranks compared when it was made, ``assumed`` the axes along which plain
    parameters are only taken to be the same (``MeshParameters``). ``apart``: the mesh has a world of its own,
    which answers this step in place of the one that walks the optimizer's: there may be several meshes.
    ``own_along`` is an axis along which each rank has parameters of its own, if there is one.
    """

    step: Step
    world: LiveWorld | LocalMesh | None
    agreed: Sequence[str] = ()
    assumed: frozenset[str] = frozenset()
    apart: bool = False
    own_along: str | None = None

    def answer(self, walk: Walk) -> Walk:
        """Have one of the step's generators answered by the world that is walking, or by the mesh's own."""
        if self.apart:
            return self.run(walk)
        return (yield from walk)

    def run(self, walk: Walk) -> Any:
        """Walk one of the step's generators to its end, outside of a step."""
        return run_in(self.world, walk)

    @property
    def plan(self) -> Plan | None:
        """The step's plan; a user's own functions, and a process alone, have none."""
        return self.step.plan if isinstance(self.step, PlanStep) else None


def run_in(world: LiveWorld | LocalMesh | None, walk: Walk) -> Any:
    """Walk a generator to its end: its requests are answered by a world, its calls by themselves."""
    return drive(walk, refuse) if world is None else world.run(walk)


MakeSteps = Callable[[Groups, State, Sequence[MeshStep]], list[MeshStep]]
"""Makes the steps for these parameters. Must be called by all ranks. What comes out as ranks agreed on it for
steps made before is not compared again."""


@dataclass(slots=True, eq=False)
class CurrentSteps:
    """An optimizer's steps, and what they were made for.

    ``alone``: this process steps by itself, over whole matrices.
    """

    make: MakeSteps
    alone: bool
    made: list[MeshStep] = field(default_factory=list)
    made_for: MadeFor = field(default_factory=MadeFor)

    def forget(self) -> None:
        """Have the steps made anew before they are walked again."""
        self.made_for = MadeFor()

    def current(
        self, groups: Groups, state: MutableMapping[Tensor, Any], before: Sequence[MeshStep] | None = None
    ) -> list[MeshStep]:
        """The steps over these groups and this state.

        What ranks agreed on for the steps ``before`` is compared again only where it comes out otherwise.
        All ranks must call where anything has changed.

        Raises:
            UsageError: momentum would be lost, or does not fit its parameter any more.
        """
        changed = self.made_for.changes(groups, state)
        if not changed:
            return self.made
        if Changed.PARAMETERS in changed:
            drop_replaced(self.made_for, groups, state)
        elif Changed.KINDS in changed:
            follow_changes(groups, self.made_for, state)
        if before is None:  # with the same parameters there is nothing to agree on again
            same = not changed & (Changed.PARAMETERS | Changed.KINDS)
            before = self.made if same or self.alone else ()
        self.made = self.make(groups, state, before)
        self.alone = all(isinstance(mesh.step, AloneStep) for mesh in self.made)
        self.made_for = MadeFor.of(groups, state)
        return self.made
