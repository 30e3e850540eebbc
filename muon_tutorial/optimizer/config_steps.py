"""Makes steps from a ``DistributedConfig``.

If a helper such as ``create_dtensor_config`` made the config, the steps follow plans. Otherwise the steps
call the user's functions. This module is imported only for an optimizer that gets a config or DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..callbacks.callback_step import CallbackStep
from ..callbacks.check_user_functions import checked_assignments
from ..callbacks.config import DistributedConfig
from ..callbacks.create_configs import INDEPENDENT
from ..engine.collective import Walk
from ..errors import TutorialError
from ..guard.current_steps import Groups, MeshStep, State
from ..parameters.describe_matrices import all_named
from ..parameters.mesh_parameters import MeshParameters
from ..parameters.tensor_parallel import kept_indices
from ..plan.matrix import Matrix, split_parts
from ..plan.strategies import Plan, one_by_one, owner
from ..step.agreement import Ranks
from ..step.parameter_state import group_parts, same_tensors
from ..step.step import PlanStep
from ..worlds.compare_plans import check_same
from ..worlds.live import LiveWorld, NoMesh
from .load_state import check_momentum
from .make_steps import agreed, parameter_states, plan_step


@dataclass(slots=True, eq=False)
class ConfigSteps:
    """Makes the steps of a ``DistributedConfig``. Calls ``assign_fn`` once per list of parameters."""

    config: DistributedConfig
    _params: Sequence[Tensor] | None = None
    _answer: dict[int, int] | TutorialError = field(default_factory=dict)
    _indices: dict[Tensor, int] = field(default_factory=dict)

    def __call__(self, groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        """Make one step per mesh, or a single step that calls the user's functions.

        Raises:
            ConfigError: ``assign_fn`` broke its contract.
            PlanMismatchError: ranks made different plans.
        """
        params = [param for group in groups for param in group["params"]]
        if self._params is None or not same_tensors(self._params, params):
            self._ask(params)
        helper = self.config.helper if self.config.planned else None
        if helper is None:
            return [self._callback_step(params, groups, state, agreed(before, 0))]
        meshes = helper.on_meshes(params, self.config.state)
        return [self._planned_step(mesh, groups, state, agreed(before, i)) for i, mesh in enumerate(meshes)]

    def _ask(self, params: list[Tensor]) -> None:
        """Call ``assign_fn``. If the config has a helper, let it find the parameters' meshes first."""
        self.config = replace(self.config, state=dict(self.config.state))  # this optimizer's own copy
        if self.config.helper is not None:
            self.config.state["indices"] = kept_indices(params, self._indices)
            self.config.helper.on_meshes(params, self.config.state)
        try:
            self._answer = checked_assignments(self.config, params)
        except TutorialError as error:  # all ranks raise this error together, when they compare plans
            self._answer = error
        self._params = params

    def _assignments(self) -> dict[int, int]:
        """Return each parameter's rank, or raise the error that ``assign_fn`` caused on this rank."""
        if isinstance(self._answer, TutorialError):
            raise self._answer
        return self._answer

    def _callback_step(
        self, params: Sequence[Tensor], groups: Groups, state: State, agreed: Sequence[str]
    ) -> MeshStep:
        names = [name for name, *_ in all_named(groups)]

        def lines(assignments: dict[int, int]) -> list[str]:
            said = []
            for index, (name, param) in enumerate(zip(names, params, strict=True)):
                is_dtensor = isinstance(param, DTensor)
                shape = f"shape {tuple(param.shape)}" if is_dtensor else f"{param.ndim} dimensions"
                said.append(f"{name}: {shape}, {param.dtype}, to rank {assignments[index]}")
            return said

        group = self.config.state.get("agree_group")
        assignments, said = check_same(self._assignments, lines, group, agreed)
        check_momentum(groups, state)
        step = CallbackStep(self.config, assignments, names, parameter_states(groups, state))
        step.fill_state()
        return MeshStep(step, NoMesh(), said)

    def _planned_step(
        self, mesh: MeshParameters, groups: Groups, state: State, agreed: Sequence[str]
    ) -> MeshStep:
        names = [name for name, *_ in all_named(groups)]
        parameters = parameter_states(groups, state)
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        members = list(mesh.matrices)

        def make() -> Plan:
            matrices: list[Matrix] = []
            for position, index in enumerate(members):
                whole = replace(mesh.matrices[index], index=position, name=names[index], group=numbers[index])
                parts, transposed = group_parts(groups[numbers[index]])
                matrices += split_parts(whole, parts, len(matrices), transposed)
            assignments = self._assignments()
            owners = [mesh.position_of(assignments[members[matrix.param]]) for matrix in matrices]
            plan = owner(matrices, mesh.world.grid, assign=owners)
            return plan if self.config.async_gpu_parallelism else one_by_one(plan)

        window = 1 + self.config.prefetch_count
        its, world = [parameters[index] for index in members], mesh.world
        kind = partial(StepInOwnWorld, world=world) if isinstance(world, LiveWorld) else PlanStep
        made = plan_step(make, world, its, window, agreed, kind)
        crossing = self.config.state.get("process_groups", {})
        apart = (axis for axis in INDEPENDENT if axis in crossing and crossing[axis].size() > 1)
        return replace(made, assumed=mesh.assumed, own_along=next(apart, None))


@dataclass(eq=False)
class StepInOwnWorld(PlanStep):
    """A step over a plan on one of several meshes. The mesh's own ``world`` answers the step's requests."""

    world: LiveWorld = field(kw_only=True)

    @cached_property
    def ranks(self) -> Ranks:
        ranks = super().ranks
        return replace(ranks, total=lambda numbers, phase: self._run(ranks.total(numbers, phase)))

    def walk(self) -> Walk:
        """One optimizer step. All ranks of the mesh must run it."""
        return self._run(super().walk())

    def ready(self, *args: Any, **kwargs: Any) -> Walk:
        """Reduce and clip gradients before ``walk``. All ranks of the mesh must run it."""
        return self._run(super().ready(*args, **kwargs))

    def _run(self, walk: Walk) -> Walk:
        return self.world.run(walk)
        yield  # never reached, but makes this function a generator
