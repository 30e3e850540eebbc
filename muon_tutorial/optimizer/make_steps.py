"""From an optimizer's parameters to its steps: one for each mesh that parameters lie on.

The plan is compared across ranks once, when it is made: where ranks differ, every one of them raises the same
error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..callbacks.callback_step import CallbackStep
from ..callbacks.check_user_functions import checked_assignments
from ..callbacks.config import DistributedConfig
from ..callbacks.create_configs import INDEPENDENT, create_dtensor_config
from ..errors import StrategyError, TutorialError
from ..guard.changed_parameters import check_momentum
from ..guard.current_steps import Groups, MakeSteps, MeshStep, State
from ..parameters.describe_matrices import describe_matrices, named_params
from ..parameters.mesh_parameters import MeshParameters, same_tensors
from ..parameters.tensor_parallel import TpDim
from ..plan.matrix import Matrix, split_parts
from ..plan.strategies import Builder, Plan, find_builder, fingerprint, one_by_one, owner
from ..step.parameter_state import ParameterState, group_parts
from ..step.single_process import AloneStep
from ..step.step import PlanStep, check_gram_recipes
from ..worlds.live import LiveWorld, check_same
from ..worlds.local import LocalMesh
from .auto_recipes import Source, choose_recipes


@dataclass(slots=True, eq=False)
class DefaultSteps:
    """Makes the step of this process alone, with the memory of the one before; of DTensors, a config's."""

    _of_dtensors: ConfigSteps | None = None

    def __call__(self, groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        """One step; of DTensors one a mesh."""
        if self._of_dtensors is None and any(
            isinstance(param, DTensor) for group in groups for param in group["params"]
        ):
            self._of_dtensors = ConfigSteps(create_dtensor_config())
        if self._of_dtensors is not None:
            return self._of_dtensors(groups, state, before)
        kept = [mesh.step.workspace for mesh in before if isinstance(mesh.step, AloneStep)]
        check_momentum(groups, state)
        return [MeshStep(AloneStep(groups, state, *kept[:1]), None)]


@dataclass(frozen=True, slots=True, eq=False)
class WithRecipes:
    """Makes steps, and writes each shape's recipe into groups that leave it to ``"auto"``."""

    make: MakeSteps
    calibration: Source

    def __call__(self, groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        """The steps."""
        made = self.make(groups, state, before)
        choose_recipes(groups, made, self.calibration)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class StrategySteps:
    """Makes the step of a strategy on one mesh: the whole plan."""

    builder: Builder
    world: LiveWorld | LocalMesh
    tp_dim: TpDim
    window: int

    def __call__(self, groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        """One step.

        Raises:
            PlanMismatchError: ranks made different plans.
        """

        def make() -> Plan:
            plan = self.builder(describe_matrices(groups, self.world.at, self.tp_dim), self.world.grid)
            if plan.expects == "local":
                _check_no_ddp(plan.strategy, groups)
            check_gram_recipes(plan, groups)
            return plan

        parameters = _parameter_states(groups, state)
        return [_plan_step(make, self.world, parameters, self.window, _agreed(before, 0))]


@dataclass(slots=True, eq=False)
class ConfigSteps:
    """Makes the steps of a ``DistributedConfig``: by its helper's plan, or else through its functions."""

    config: DistributedConfig
    _known: Assigned | None = None

    def __call__(self, groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        """One step a mesh, or one for the user's functions.

        Raises:
            ConfigError: ``assign_fn`` broke its contract.
            PlanMismatchError: ranks made different plans.
        """
        params = [param for group in groups for param in group["params"]]
        if self._known is None or not same_tensors(self._known.params, params):
            self._known = _assign(self.config, params)
        if not self.config.planned:
            return [self._callback_step(self._known, groups, state, _agreed(before, 0))]
        return [
            self._planned_step(mesh, self._known, groups, state, _agreed(before, i))
            for i, mesh in enumerate(self._known.meshes)
        ]

    def _callback_step(
        self, known: Assigned, groups: Groups, state: State, agreed: Sequence[str]
    ) -> MeshStep:
        names = _names(groups)

        def lines(assignments: dict[int, int]) -> list[str]:
            return [
                f"{name}: {_described(param)}, to rank {assignments[index]}"
                for index, (name, param) in enumerate(zip(names, known.params, strict=True))
            ]

        assignments, said = check_same(known.assignments, lines, known.state.get("agree_group"), agreed)
        config = replace(self.config, state=known.state)
        step = CallbackStep(config, assignments, names, _parameter_states(groups, state))
        step.fill_state()
        return MeshStep(step, None, said)

    def _planned_step(
        self, mesh: MeshParameters, known: Assigned, groups: Groups, state: State, agreed: Sequence[str]
    ) -> MeshStep:
        names, parameters = _names(groups), _parameter_states(groups, state)
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        members = list(mesh.matrices)

        def make() -> Plan:
            matrices: list[Matrix] = []
            for position, index in enumerate(members):
                whole = replace(mesh.matrices[index], index=position, name=names[index], group=numbers[index])
                parts, transposed = group_parts(groups[numbers[index]])
                matrices += split_parts(whole, parts, len(matrices), transposed)
            assignments = known.assignments()
            owners = [mesh.position_of(assignments[members[matrix.param]]) for matrix in matrices]
            plan = owner(matrices, mesh.world.grid, assign=owners)
            return plan if self.config.async_gpu_parallelism else one_by_one(plan)

        window = 1 + self.config.prefetch_count
        made = _plan_step(make, mesh.world, [parameters[index] for index in members], window, agreed)
        crossing = self.config.state.get("process_groups", {})
        apart = (axis for axis in INDEPENDENT if axis in crossing and crossing[axis].size() > 1)
        return replace(made, assumed=mesh.assumed, apart=True, own_along=next(apart, None))


def _plan_step(
    make: Callable[[], Plan],
    world: LiveWorld | LocalMesh,
    parameters: Sequence[ParameterState],
    window: int,
    agreed: Sequence[str],
) -> MeshStep:
    """Make a plan, compare it across the ranks of a mesh, and fill the state that it asks for."""

    def lines(plan: Plan) -> list[str]:
        return [f"window {window}", *fingerprint(plan)]

    if isinstance(world, LocalMesh):
        plan = make()
        said = lines(plan)
        world.compare(said)
    else:
        plan, said = check_same(
            make, lines, world.group(world.grid.axes) if world.grid.axes else None, agreed
        )
    step = PlanStep(plan, world.at, parameters, window)
    step.fill_state()
    return MeshStep(step, world, said)


def choose_maker(
    strategy: str | Builder | None,
    world: LiveWorld | LocalMesh | None,
    tp_dim: TpDim,
    window: int,
    config: DistributedConfig | None,
) -> MakeSteps:
    """What makes an optimizer's steps, by its arguments.

    Raises:
        StrategyError: they do not go together.
    """
    if config is not None:
        if strategy is not None or world is not None:
            raise StrategyError("pass either distributed_config=, or strategy= and mesh=, not both")
        return ConfigSteps(config)
    if strategy is None and world is not None:
        raise StrategyError("a mesh needs a strategy: pass strategy=, or leave mesh out")
    if strategy is None:
        return DefaultSteps()
    builder = find_builder(strategy)
    if world is None:
        raise StrategyError(
            f"strategy {strategy!r} needs mesh=: a DeviceMesh with named axes, or LocalWorld.mesh(rank)"
        )
    return StrategySteps(builder, world, tp_dim, window)


def _agreed(before: Sequence[MeshStep], index: int) -> Sequence[str]:
    return before[index].agreed if index < len(before) else ()


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """What a config said about these parameters, asked once. ``state`` is this optimizer's own copy."""

    params: Sequence[Tensor]
    state: dict[str, Any]
    meshes: Sequence[MeshParameters]
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
    """Find out where the parameters lie if a helper can, and ask ``assign_fn``.

    An error on one rank is kept until ranks compare plans, so that all learn of it.
    """
    state = dict(config.state)
    meshes = () if config.helper is None else config.helper.on_meshes(params, state).meshes
    try:
        return Assigned(params, state, meshes, checked_assignments(config, params, state))
    except TutorialError as error:
        return Assigned(params, state, meshes, error)


def _check_no_ddp(strategy: str, groups: Groups) -> None:
    """Refuse parameters of a DistributedDataParallel module for a plan that averages gradients itself.

    Nothing on a parameter tells: the objects that are alive are looked through, once a plan, and by their
    type alone, since asking more of each would take a fifth of a second.
    """
    if not dist.is_initialized():
        return
    kinds = _subclasses(DistributedDataParallel)
    modules = [thing for thing in gc.get_objects() if type(thing) in kinds]
    wrapped = {id(param) for module in modules for param in module.parameters()}
    for number, group in enumerate(groups):
        for name, param in named_params(group, number):
            if id(param) in wrapped:
                raise StrategyError(
                    f"{name} belongs to a DistributedDataParallel module, which averages its gradient; "
                    f"strategy {strategy!r} would average it again: leave DDP out, or take 'round_robin'"
                )


def _subclasses(kind: type) -> set[type]:
    """A class and all that derive from it."""
    return {kind}.union(*map(_subclasses, type.__subclasses__(kind)))


def _parameter_states(groups: Groups, state: State) -> list[ParameterState]:
    return [ParameterState(param, group, state[param]) for group in groups for param in group["params"]]


def _names(groups: Groups) -> list[str]:
    return [name for number, group in enumerate(groups) for name, _ in named_params(group, number)]


def _described(param: Tensor) -> str:
    shape = f"shape {tuple(param.shape)}" if isinstance(param, DTensor) else f"{param.ndim} dimensions"
    return f"{shape}, {param.dtype}"
