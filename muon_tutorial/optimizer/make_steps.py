"""From an optimizer's parameters to its steppers: one for each mesh that parameters lie on.

The plan is compared across ranks once, when it is made: where ranks differ, every one of them raises the
same error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..callbacks.calls import CallbackStep
from ..callbacks.config import DistributedConfig, checked_assignments
from ..engine.collective import Walk
from ..errors import StrategyError, TutorialError
from ..parameters.matrices import TpDim, describe_matrices, named_params, split_parts
from ..parameters.meshes import Share, same_tensors
from ..plan.bucket import Bucket
from ..plan.matrix import Matrix
from ..plan.strategies import Builder, Plan, fingerprint, owner
from ..step.step import ParameterState, PlanStep
from ..worlds.live import LiveWorld, check_same, drive, refuse
from ..worlds.local import LocalMesh

Groups = Sequence[dict[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One stepper and what runs its walks: the seat on a mesh, or nothing where it makes its own calls."""

    stepper: PlanStep | CallbackStep
    seat: LiveWorld | LocalMesh | None

    def run(self, walk: Walk) -> Any:
        """Walk a generator of the stepper's to its end."""
        return drive(walk, refuse) if self.seat is None else self.seat.run(walk)

    @property
    def plan(self) -> Plan | None:
        """The stepper's plan; a user's own functions have none."""
        return self.stepper.plan if isinstance(self.stepper, PlanStep) else None


class Planning(Protocol):
    """How an optimizer comes by its steppers."""

    def legs(self, groups: Groups, state: State) -> list[Leg]:
        """Make them for these parameters. Must be called by all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class StrategyPlanning:
    """A strategy on one mesh."""

    builder: Builder
    world: LiveWorld | LocalMesh
    tp_dim: TpDim
    window: int

    def legs(self, groups: Groups, state: State) -> list[Leg]:
        """One leg: the whole plan.

        Raises:
            PlanMismatchError: ranks made different plans.
        """

        def make() -> Plan:
            plan = self.builder(describe_matrices(groups, self.world.at, self.tp_dim), self.world.grid)
            if plan.expects == "local":
                _check_no_ddp(plan.strategy, groups)
            return plan

        plan = _compared(make, self.world)
        stepper = PlanStep(plan, self.world.at, _slots(groups, state), self.window)
        stepper.fill_state()
        return [Leg(stepper, self.world)]


@dataclass(slots=True, eq=False)
class ConfigPlanning:
    """A ``DistributedConfig``: its helper's plan where it has one, else its functions, called one by one."""

    config: DistributedConfig
    _known: Assigned | None = None

    def legs(self, groups: Groups, state: State) -> list[Leg]:
        """One leg a mesh, or one for the user's functions.

        Raises:
            ConfigError: ``assign_fn`` broke its contract.
            PlanMismatchError: ranks made different plans.
        """
        params = [param for group in groups for param in group["params"]]
        if self._known is None or not same_tensors(self._known.params, params):
            self._known = _assign(self.config, params)
        if not self.config.planned:
            return [self._calling_leg(self._known, groups, state)]
        return [self._planned_leg(share, self._known, groups, state) for share in self._known.shares]

    def _calling_leg(self, known: Assigned, groups: Groups, state: State) -> Leg:
        names = _names(groups)

        def lines(assignments: dict[int, int]) -> list[str]:
            return [
                f"{name}: {_described(param)}, to rank {assignments[index]}"
                for index, (name, param) in enumerate(zip(names, known.params, strict=True))
            ]

        assignments = check_same(known.assignments, lines, known.state.get("agree_group"))
        caller = CallbackStep(
            replace(self.config, state=known.state), assignments, names, _slots(groups, state)
        )
        caller.fill_state()
        return Leg(caller, None)

    def _planned_leg(self, share: Share, known: Assigned, groups: Groups, state: State) -> Leg:
        names, slots = _names(groups), _slots(groups, state)
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        members = list(share.matrices)

        def make() -> Plan:
            matrices: list[Matrix] = []
            for place, index in enumerate(members):
                whole = replace(share.matrices[index], index=place, name=names[index], group=numbers[index])
                matrices += split_parts(whole, groups[numbers[index]].get("parts"), first=len(matrices))
            assignments = known.assignments()
            places = [share.place(assignments[members[matrix.param]]) for matrix in matrices]
            if self.config.async_gpu_parallelism:
                return owner(matrices, share.seat.grid, assign=places)
            return _one_by_one(owner(matrices, share.seat.grid, assign=places, bucket_bytes=1))

        plan = _compared(make, share.seat)
        window = 1 + self.config.prefetch_count
        stepper = PlanStep(plan, share.seat.at, [slots[index] for index in members], window)
        stepper.fill_state()
        return Leg(stepper, share.seat)


def _one_by_one(plan: Plan) -> Plan:
    """A plan of one matrix a bucket, whose phases say which: owners do not work side by side."""

    def named(bucket: Bucket) -> Bucket:
        name = bucket.entries[0].matrix.name
        return replace(bucket, phases=(f"gather {name} to its owner", f"scatter {name} from its owner"))

    return replace(plan, buckets=tuple(named(bucket) for bucket in plan.buckets))


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """What a config said about these parameters, asked once. ``state`` is this optimizer's own copy."""

    params: Sequence[Tensor]
    state: dict[str, Any]
    shares: Sequence[Share]
    answer: dict[int, int] | TutorialError

    def assignments(self) -> dict[int, int]:
        """The rank of each parameter.

        Raises:
            ConfigError: ``assign_fn`` broke its contract on this rank.
        """
        if isinstance(self.answer, TutorialError):
            raise self.answer
        return self.answer


def _assign(config: DistributedConfig, params: list[Tensor]) -> Assigned:
    """Survey the parameters if a helper can, and ask ``assign_fn``.

    An error on one rank is kept until ranks compare plans, so that all learn of it.
    """
    state = dict(config.state)
    shares = () if config.planner is None else config.planner.survey(params, state).shares
    try:
        return Assigned(params, state, shares, checked_assignments(config, params, state))
    except TutorialError as error:
        return Assigned(params, state, shares, error)


def _check_no_ddp(strategy: str, groups: Groups) -> None:
    """Refuse parameters of a DistributedDataParallel module for a plan that averages gradients itself.

    Nothing on a parameter tells: the modules that are alive are looked through, once a plan.
    """
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    wrapped = {id(param) for module in modules for param in module.parameters()}
    for number, group in enumerate(groups):
        for name, param in named_params(group, number):
            if id(param) in wrapped:
                raise StrategyError(
                    f"{name} belongs to a DistributedDataParallel module, which averages its gradient; "
                    f"strategy {strategy!r} would average it again: leave DDP out, or take 'round_robin'"
                )


def _compared(make: Callable[[], Plan], world: LiveWorld | LocalMesh) -> Plan:
    if isinstance(world, LocalMesh):
        plan = make()
        world.compare(fingerprint(plan))
        return plan
    return check_same(make, fingerprint, world.group(world.grid.axes) if world.grid.axes else None)


def _slots(groups: Groups, state: State) -> list[ParameterState]:
    return [ParameterState(param, group, state[param]) for group in groups for param in group["params"]]


def _names(groups: Groups) -> list[str]:
    return [name for number, group in enumerate(groups) for name, _ in named_params(group, number)]


def _described(param: Tensor) -> str:
    shape = f"shape {tuple(param.shape)}" if isinstance(param, DTensor) else f"{param.ndim} dimensions"
    return f"{shape}, {param.dtype}"
