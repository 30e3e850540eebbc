"""One step that calls a user's own functions, with several parameters in flight.

``gather_fn`` gets the Newton–Schulz input (momentum, with Nesterov already applied) in bfloat16. This input
is a DTensor if the parameter is a DTensor. An error names the function, the parameter and the rank. The first
answers for a parameter are checked on all ranks together, so if one rank's answer is wrong, every rank raises
the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..adjusted_lr_and_decay import ShardRange
from ..engine.collective import IDLE, Call, Idle, Label, Walk
from ..engine.order import pipeline
from ..errors import ConfigError, TutorialError
from ..launching.errors_of_lost_ranks import is_about_lost_rank
from ..parameters.dtensor_placements import dtensor_cuts
from ..parameters.mesh_parameters import whole_matrix, with_names
from ..plan.bucket import flat_frame
from ..plan.strategies import WIRE
from ..step.agreement import ALONE, Fingerprint, OwnGradients, Ranks, agree_on_gradients
from ..step.momentum import momentum_update
from ..step.orthogonalize import newton_schulz_update
from ..step.parameter_state import ParameterState, gradient_dtype, local_part, placed_as
from ..step.write_parameters import apply_update
from ..worlds.live import LiveWorld, gather_objects, global_rank, sum_counts
from .check_user_functions import BARE_WORK, complaint_about_full, complaint_about_part
from .config import DistributedConfig

MISSING = ': give it to all ranks or to none, or name the ranks that share parameters in state["agree_group"]'


@dataclass(slots=True, eq=False)
class CallbackStep:
    """One rank's step with a config's functions. The fields refer to parameters by index.

    ``shapes`` are the shapes of the full matrices, and ``ranges`` say where this rank's parts lie in them.
    ``settled``: parameters whose first answers were right on all ranks. ``present``: those with gradients.
    """

    config: DistributedConfig
    assignments: dict[int, int]
    names: Sequence[str]
    parameters: Sequence[ParameterState]
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    ranges: dict[int, ShardRange | None] = field(default_factory=dict)
    present: list[int] | None = None

    def __post_init__(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            parts = parameter.group.get("parts")
            if parts not in (None, "flatten", "stack"):
                raise ConfigError(
                    f"{name}: parts={parts!r} needs a strategy or a helper's config; functions of your own "
                    "are given whole parameters"
                )

    def fill_state(self) -> None:
        """Give every parameter without a momentum a momentum of zeros."""
        for parameter in self.parameters:
            blank = torch.zeros_like(parameter.param.detach(), dtype=gradient_dtype(parameter.param))
            parameter.state.setdefault("momentum_buffer", blank)

    def forget(self) -> None:
        self.present = None

    def agree(self, fingerprint: Fingerprint, rest: Sequence[Tensor] = ()) -> Walk:
        """Find out which gradients exist, before anything changes. Those of ``rest`` must be finite.

        All ranks of ``state["agree_group"]`` must run it, and all raise the same error.

        Raises:
            GradientError: a gradient is missing on only some ranks, or is not finite.
            MismatchError: the ranks' fingerprints differ.
        """
        others = [local_part(param.new_zeros(0) if param.grad is None else param.grad) for param in rest]
        grads = [*(parameter.grad for parameter in self.parameters), *others]
        names = [*self.names, *(f"parameter {i} of the rest" for i in range(len(rest)))]
        own = OwnGradients([] if fingerprint.error else grads, names, MISSING)
        found = yield from agree_on_gradients(own, self.ranks, fingerprint)
        self.present = [index for index, there in enumerate(found[: len(self.parameters)]) if there]

    def trust(self) -> None:
        self.present = [i for i, each in enumerate(self.parameters) if each.grad is not None]

    @property
    def ranks(self) -> Ranks:
        """The ranks of ``state["agree_group"]``, with a function that sums a few numbers over them."""
        if not dist.is_initialized():
            return ALONE
        group = self._group
        return Ranks(
            dist.get_rank(group),
            dist.get_world_size(group),
            self.parameters[0].data.device if self.parameters else torch.device("cpu"),
            lambda numbers, phase: _asked(Call(partial(sum_counts, numbers, group), Label(phase))),
        )

    averages = False
    """Always False: the user has averaged the gradients."""

    def walk(self) -> Walk:
        """Take one optimizer step, after ``agree`` or ``trust``. All ranks must run it."""
        assert self.present is not None
        together = len(set(self.assignments.values())) if self.config.async_gpu_parallelism else 1
        window = together + self.config.prefetch_count
        yield from pipeline((self._step(index) for index in self.present), window, together)
        self.forget()

    def _step(self, index: int) -> Walk:
        parameter, owner = self.parameters[index], self.assignments[index]
        full = yield self._call("gather_fn", index, self._newton_schulz_input(parameter), owner)
        wrong = complaint_about_full(full, self._where("gather_fn", index), owner, parameter)
        update = None
        try:
            update = None if full is None or wrong else self._orthogonalized(full, parameter.group)
        except TutorialError as error:  # ``_settle`` raises the error on all ranks
            wrong = f"Newton–Schulz of {self.names[index]}: {error}"
        # This yield ends the task's turn, so all owners in the window compute before the first
        # ``redistribute_fn``.
        yield self._settle("gather_fn", index, full, wrong)
        part = yield self._call("redistribute_fn", index, update, owner)
        wrong = complaint_about_part(part, self._where("redistribute_fn", index), parameter)
        yield self._settle("redistribute_fn", index, None, wrong)
        self.settled.add(index)
        if parameter.data.numel():  # updates of empty shards may have other empty shapes
            self._apply(index, local_part(part))

    def _apply(self, index: int, update: Tensor) -> None:
        """Decay and step this rank's part.

        For DTensors and whole parameters, the optimizer knows where the part lies in the matrix, so this
        rank's part gets the same bits as in a step over the whole matrix.
        """
        parameter = self.parameters[index]
        sides = self._sides(self.shapes[index], parameter.group)
        stacked = len(sides) > 2
        shard = None if stacked else self._range(index, (sides[0], sides[1]))
        here = parameter.data
        run = here if stacked else here.contiguous()
        apply_update(run, update.contiguous(), parameter.group, sides[-2:], shard)
        if run is not here:
            here.copy_(run)

    def _range(self, index: int, sides: tuple[int, int]) -> ShardRange | None:
        """Return where this rank's part lies in the whole matrix; None if only the user knows."""
        if index not in self.ranges:
            param, shape = self.parameters[index].param, self.shapes[index]
            if isinstance(param, DTensor):
                world, numel = LiveWorld(with_names(param.device_mesh)), self.parameters[index].data.numel()
                matrix = whole_matrix(index, param, dtensor_cuts(self.names[index], param, world.grid.axes))
                self.ranges[index] = ShardRange(sides, *flat_frame(matrix, world.at), 0, numel)
            else:
                whole = tuple(param.shape) == tuple(shape)
                self.ranges[index] = ShardRange.whole(sides) if whole else None
        return self.ranges[index]

    def _newton_schulz_input(self, parameter: ParameterState) -> Tensor:
        assert parameter.grad is not None
        buffer, group = parameter.momentum, parameter.group
        moved = momentum_update(buffer, parameter.grad, group["momentum"], group["nesterov"])
        return placed_as(moved.to(WIRE, copy=True), parameter.param)

    def _orthogonalized(self, full: Tensor, group: dict) -> Tensor:
        """Compute the update of a full matrix.

        Input and result are made row-major. A column-major input gives other bits. A column-major result
        would arrive transposed, because a tensor is sent in the order in which it lies in memory.
        """
        full = full.contiguous()
        return newton_schulz_update(full, self._sides(tuple(full.shape), group), group).contiguous()

    def _sides(self, shape: tuple[int, ...], group: dict) -> tuple[int, ...]:
        """Return the shape for Newton–Schulz: [rows, columns], or [matrices, rows, columns] for a stack."""
        if group.get("parts") == "stack" and len(shape) > 2:
            return math.prod(shape[:-2]), shape[-2], shape[-1]
        return shape[0], math.prod(shape[1:])

    def _call(self, name: str, index: int, tensor: Tensor | None, rank: int) -> Call:
        return Call(partial(self._ask, name, index, tensor, rank), Label(name, self.names[index]))

    def _ask(self, name: str, index: int, tensor: Tensor | None, rank: int) -> Any:
        """Call the user's function with a fresh copy of the state."""
        parameter = self.parameters[index]
        state = {
            **self.config.state,
            "param_idx": index,
            "full_shape": tuple(parameter.param.shape) if isinstance(parameter.param, DTensor) else None,
            "local_shape": tuple(parameter.data.shape),
            "dtype": parameter.param.dtype,
            "wire_dtype": WIRE,
        }
        try:
            answer = getattr(self.config, name)(tensor, rank, state)
        except TutorialError:
            raise
        except Exception as error:
            if is_about_lost_rank(error):  # another rank has ended, so this function is not at fault
                raise
            raised = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self._where(name, index)} raised {raised}") from error
        if isinstance(answer, dist.Work):
            return BARE_WORK
        # The function may use one buffer for all parameters, and is called again before this answer is used,
        # so the answer is copied. An answer that is still on its way is a new tensor, and needs no copy.
        its = answer.to_local() if isinstance(answer, DTensor) else answer
        return answer.clone() if type(its) is Tensor else answer

    def _settle(self, name: str, index: int, full: Tensor | None, wrong: str) -> Call | Idle:
        """At a parameter's first step, let ranks exchange errors and the full matrix's shape."""
        if index not in self.settled:
            label = Label(f"check of {name}", self.names[index])
            return Call(partial(self._share, index, full, wrong), label)
        if wrong:
            raise ConfigError(wrong)
        return IDLE

    def _share(self, index: int, full: Tensor | None, wrong: str) -> None:
        mine = wrong, None if full is None or wrong else tuple(full.shape)
        found = gather_objects(mine, self._group)
        for text in (wrong, *(text for text, _ in found)):
            if text:
                raise ConfigError(text)
        for _, shape in found:
            if shape is not None:
                self.shapes[index] = shape

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.config.state.get("agree_group")

    def _where(self, name: str, index: int) -> str:
        return f"{name}, for {self.names[index]} on rank {global_rank()},"


def _asked(call: Call) -> Walk:
    return (yield call)
