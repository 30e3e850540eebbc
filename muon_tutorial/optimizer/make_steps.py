"""Makes an optimizer's steps from its parameters: one for each mesh that parameters lie on.

The plan is compared across ranks once, when it is made. If ranks differ, all of them raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import StrategyError
from ..guard.check_strategy import (
    check_all_once,
    check_gram_recipes,
    check_no_ddp,
    check_no_tp_left_out,
    check_own_memory,
)
from ..guard.current_steps import Groups, MakeSteps, MeshStep, State
from ..orthogonalizers.orthogonalize_option import is_auto
from ..parameters.describe_matrices import describe_matrices
from ..parameters.tensor_parallel import TpDim, kept_indices
from ..plan.strategies import Builder, Plan, find_builder
from ..step.parameter_state import ParameterState
from ..step.single_process import AloneStep
from ..step.step import PlanStep
from ..worlds.compare_plans import check_same, describe_plan
from ..worlds.live import LiveWorld, NoMesh
from .load_state import check_momentum

if TYPE_CHECKING:
    from ..callbacks.config import DistributedConfig
    from ..worlds.local import LocalMesh
    from .auto_recipes import Source
    from .config_steps import ConfigSteps


@dataclass(slots=True, eq=False)
class DefaultSteps:
    """Makes the steps of an optimizer without a strategy: one per mesh of DTensors, or a single step."""

    _of_dtensors: ConfigSteps | None = None

    def __call__(self, groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        if self._of_dtensors is None and any(
            isinstance(param, DTensor) for group in groups for param in group["params"]
        ):
            from ..callbacks.create_configs import create_dtensor_config
            from .config_steps import ConfigSteps

            self._of_dtensors = ConfigSteps(create_dtensor_config())
        if self._of_dtensors is not None:
            return self._of_dtensors(groups, state, before)
        kept = [mesh.step.workspace for mesh in before if isinstance(mesh.step, AloneStep)]
        check_momentum(groups, state)
        return [MeshStep(AloneStep(groups, state, *kept[:1]), NoMesh())]


def with_recipes(make: MakeSteps, calibration: Source) -> MakeSteps:
    """Return a wrapped ``make`` that writes each shape's recipe into groups with ``orthogonalize="auto"``."""

    def steps(groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        made = make(groups, state, before)
        if any(is_auto(group.get("orthogonalize")) for group in groups):
            from .auto_recipes import choose_recipes

            choose_recipes(groups, made, calibration)
        return made

    return steps


def strategy_steps(builder: Builder, world: LiveWorld | LocalMesh, tp_dim: TpDim, window: int) -> MakeSteps:
    """Return a function that makes a strategy's step, or raises an error if ranks made different plans."""
    known: dict[Tensor, int] = {}

    def steps(groups: Groups, state: State, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        params = [param for group in groups for param in group["params"]]
        by_index = isinstance(tp_dim, Mapping) or callable(tp_dim)
        indices = kept_indices(params, known) if by_index else None

        def make() -> Plan:
            matrices = describe_matrices(groups, world.at, tp_dim, indices)
            plan = builder(matrices, world.grid)
            check_all_once(plan, matrices)
            check_no_tp_left_out(world, groups)
            if plan.expects == "local":
                check_no_ddp(plan.strategy, groups)
                check_own_memory(plan.strategy, groups)
            check_gram_recipes(plan, groups)
            return plan

        return [plan_step(make, world, parameter_states(groups, state), window, agreed(before, 0))]

    return steps


def plan_step(
    make: Callable[[], Plan],
    world: LiveWorld | LocalMesh,
    parameters: Sequence[ParameterState],
    window: int,
    agreed: Sequence[str],
    kind: Callable[..., PlanStep] = PlanStep,
) -> MeshStep:
    """Make a plan, compare it across the ranks of a mesh, and fill the state that it needs."""

    def lines(plan: Plan) -> list[str]:
        return [f"window {window}", *describe_plan(plan)]

    if isinstance(world, LiveWorld):
        group = world.group(world.grid.axes) if world.grid.axes else None
        plan, said = check_same(make, lines, group, agreed)
    else:
        plan = make()
        said = lines(plan)
        world.compare(said)
    step = kind(plan, world.at, parameters, window)
    step.fill_state()
    return MeshStep(step, world, said)


def choose_maker(
    strategy: str | Builder | None,
    world: LiveWorld | LocalMesh | None,
    tp_dim: TpDim,
    window: int,
    config: DistributedConfig | None,
) -> MakeSteps:
    """Choose the function that makes an optimizer's steps.

    Raises:
        StrategyError: the arguments contradict each other, or one of them is missing.
    """
    if config is not None:
        if strategy is not None or world is not None:
            raise StrategyError("pass either distributed_config=, or strategy= and mesh=, not both")
        from .config_steps import ConfigSteps

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
    return strategy_steps(builder, world, tp_dim, window)


def agreed(before: Sequence[MeshStep], index: int) -> Sequence[str]:
    return before[index].agreed if index < len(before) else ()


def parameter_states(groups: Groups, state: State) -> list[ParameterState]:
    return [ParameterState(param, group, state[param]) for group in groups for param in group["params"]]
