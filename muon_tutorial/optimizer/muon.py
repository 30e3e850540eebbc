"""Muon as a ``torch.optim.Optimizer``: momentum, Newton–Schulz, decay, step; alone or over a plan.

With a strategy, a plan says which rank keeps and orthogonalizes what, and ``step/`` walks it. Without one
it is ``torch.optim.Muon`` to the bit, with two repairs: it never writes to its momentum while
orthogonalizing, and loading a state never makes the momentum less precise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from ..callbacks.config import DistributedConfig
from ..callbacks.create_configs import INDEPENDENT, create_dtensor_config
from ..engine.collective import Walk
from ..errors import (
    GradientError,
    NotFiniteError,
    StrategyError,
    TutorialError,
    UsageError,
)
from ..newton_schulz import DEFAULT_EPS, DEFAULT_STEPS, KELLER_JORDAN, Coefficients
from ..orthogonalizers.choices import check_orthogonalize
from ..orthogonalizers.named import STOCK
from ..parameters.mesh_parameters import same_tensors
from ..parameters.tensor_parallel import TpDim
from ..plan.matrix import Parts, part_boxes
from ..plan.rounds import IN_FLIGHT
from ..plan.strategies import Builder, Plan, find_builder
from ..step.agreement import Stamp
from ..step.parameter_state import group_parts, local_gradient
from ..step.step import PlanStep
from ..step.unreduced_gradient import mark_gradients
from ..worlds.live import LiveWorld
from ..worlds.local import LocalMesh
from .alike import count_on, dimensions, gradients_beside, hyperparameters, moves_of_momentum
from .auto_recipes import Source, choose_recipes
from .changed_gradients import SeenGradients
from .changed_parameters import MadeFor, check_momentum, drop_replaced, follow_changes, widened
from .check_groups import check_gradient, check_hyperparameters, check_matrices, check_numbers
from .compare_replicas import broadcast_parameters, compare_in_process, compare_replicas
from .early_reduction import EarlyReduction, send_early
from .grad_scaler import skip_overflow
from .make_steps import ConfigSteps, MakeSteps, MeshStep, StrategySteps, alone, check_gram_recipes
from .momentum_slice import mark_slices


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton–Schulz: an optimizer for the hidden matrices of a network.

    The arguments up to ``adjust_lr_fn`` are ``torch.optim.Muon``'s; ``ns_coefficients`` may also hold one
    triple per step. What is not a hidden matrix belongs to AdamW: ``split_parameters`` tells.

    Args:
        orthogonalize: which way Newton–Schulz goes: ``"stock"`` is ``torch.optim.Muon`` to the bit and takes
            ``ns_coefficients`` and ``ns_steps``; the names of ``orthogonalizers.named.RECIPES`` bring their
            own; ``"auto"`` takes, for each shape, the fastest on this machine of those no worse than stock,
            on all ranks what the first one finds. May be set on a parameter group, which then also says what
            was chosen, and so does a checkpoint. Every strategy has a recipe's bits alike, but for ``gram``.
            All recipes but ``"float32"`` and ``"gram"`` leave the singular values of a Gaussian matrix closer
            to 1 than stock does, so their updates are 4 to 17 % larger, as if the learning rate were
            (``orthogonalizers.named.LARGER_UPDATES``).
        calibration: what ``"auto"`` goes by: an ``orthogonalizers.calibration.Calibration``, or a folder that
            keeps what was measured, by machine, torch and threads (default: ``~/.cache/muon_tutorial``). What
            is missing is measured when the optimizer is made, about a second a shape.
        strategy: a name from ``STRATEGIES``, or a builder that turns matrices and a grid into a plan (such as
            ``functools.partial(zero1, round_bytes=1_000_000)``). All ranks of the mesh must then construct,
            step and load alike.
        mesh: a ``DeviceMesh`` with named axes (``dp``, ``tp``), or a ``LocalWorld``'s ``mesh(rank)``.
        distributed_config: in place of a strategy and a mesh: the user's own functions, or a helper's config.
        tp_dim: how tensor parallelism cut plain parameters: a dimension, None for not at all, a mapping from
            parameter index, or a function of index and parameter. DTensor placements and a parameter's own
            ``partition_dim`` go first.
        window: how many rounds of a strategy may be in flight at once: with three, one travels to its owners
            and one back while a third is worked on; with one, a step holds a third as much.
        parts: how parameters hold several matrices, each orthogonalized on its own: rows of each
            (``(d, d, d)`` for fused QKV), rows of all (a head's), ``"stack"`` for experts, ``"flatten"`` for
            convolutions. Best set on a parameter group.
        transposed: the weights are stored (in, out), as Hugging Face's ``Conv1D`` and some experts are. The
            learning rate goes by outputs and inputs, and ``parts`` count columns. Best set on a group.
        initial_values: of parameters that several ranks hold alike: ``"broadcast"`` gives all of them the
            first rank's, now, as DDP does, if they have names; ``"compare"`` leaves them. The first step
            compares either way.
        compare_every: how many steps lie between two comparisons of what several ranks hold alike, parameters
            and state (a hash of each, summed over every axis of the mesh); None for never.
        overlap_grad_reduce: for a strategy that averages itself (``zero1``, ``layerwise``, ``gram``): a
            bucket's gradients travel as soon as ``backward()`` has left all of them, in place of when
            ``step()`` is called, over a process group of their own. Same bits. All but a step's last
            ``backward()`` then belong into ``no_sync()``, and that one into the stream of forward. A bucket
            with a frozen or unused matrix, and those after it, wait for ``step()``. Not for ``GradScaler``,
            which writes to gradients after backward: that is refused.

    Raises:
        NotAMatrixError: a parameter is not a dense real matrix; the message names it.
        UsageError: a hyperparameter is out of range.
        StrategyError: the strategy is unknown or does not fit the parameters.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> muon = Muon([("weight", weight)], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.eye(2)
    >>> muon.step()
    >>> bool(weight[0, 0] < 1)
    True
    """

    _opt_called: bool
    """What schedulers ask: whether it has been stepped. torch sets it, and a pair does."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER_JORDAN,
        eps: float = DEFAULT_EPS,
        ns_steps: int = DEFAULT_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        orthogonalize: str = STOCK,
        calibration: Source = None,
        strategy: str | Builder | None = None,
        mesh: DeviceMesh | LiveWorld | LocalMesh | None = None,
        tp_dim: TpDim = 0,
        window: int = IN_FLIGHT,
        parts: Parts = None,
        transposed: bool = False,
        distributed_config: DistributedConfig | None = None,
        initial_values: Literal["broadcast", "compare"] = "broadcast",
        compare_every: int | None = 100,
        overlap_grad_reduce: bool = False,
    ) -> None:
        if window < 1:
            raise UsageError(f"window must be at least 1, the bucket at hand; got {window}")
        if compare_every is not None and compare_every < 1:
            raise UsageError(f"compare_every must be at least 1, or None for never; got {compare_every}")
        if initial_values not in ("broadcast", "compare"):
            raise UsageError(f"initial_values must be 'broadcast' or 'compare', got {initial_values!r}")
        self.initial_values, self.compare_every = initial_values, compare_every
        self.overlap_grad_reduce = overlap_grad_reduce
        self.world = LiveWorld(mesh) if isinstance(mesh, DeviceMesh) else mesh
        if isinstance(self.world, LiveWorld):
            self.world.warn_of_long_waits()
        self._make_steps = _make_steps(strategy, self.world, tp_dim, window, distributed_config)
        self.calibration = calibration
        self._begin()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "orthogonalize": orthogonalize,
            "parts": parts,
            "transposed": transposed,
        }
        check_hyperparameters(defaults)
        super().__init__(params, defaults)
        self.register_state_dict_post_hook(mark_slices)
        self.agree_on_values()
        if isinstance(self.world, LiveWorld):
            self._number = count_on(self.world.mesh)

    def _begin(self) -> None:
        """Set what an optimizer knows of its own life, which no state dict holds."""
        self.companions: tuple[torch.optim.Optimizer, ...] = ()
        self.unstepped: Sequence[tuple[str, Tensor]] = ()
        self._number = 0
        self._is_new, self._warned, self._compared = True, False, False
        self._steps_done = self._zeroed = 0
        self._made_steps: list[MeshStep] | None = None
        self._made_for = MadeFor()
        self._agreed_steps: list[MeshStep] = []
        self._rest: Sequence[Tensor] | None = None
        self._gradients_ready = self._not_finite = False
        self._readied = SeenGradients()
        self._marks: list[Any] = []
        self._marked: list[Tensor] | None = None
        self._early: EarlyReduction | None = None
        self._early_worlds: list[LiveWorld] = []
        self._paused = False

    def agree_on_values(self) -> None:
        """Give all ranks the first one's values where they should hold the same, unless told to leave them.

        Also of the companions' parameters, and of those that nobody steps. All ranks of the mesh must call.
        """
        steps = self._steps()
        for mesh in steps:
            if isinstance(mesh.world, LiveWorld):
                early = {"overlap_grad_reduce": str(self.overlap_grad_reduce)}
                mesh.run(mesh.step.compare(Stamp({**dimensions(self._all_groups()), **early})))
        self._mark_added()
        if self._early is not None and not self._early_worlds and isinstance(self.world, LiveWorld):
            self._early_worlds.append(self.world.apart("dp"))
        if self.initial_values == "broadcast":
            broadcast_parameters(steps, self.companions, self.unstepped)

    @property
    def plans(self) -> list[Plan]:
        """The plans of a step, one a mesh; none without a strategy, or with a user's own functions."""
        return [step.plan for step in self._steps() if step.plan is not None]

    @property
    def plan(self) -> Plan | None:
        """The plan of a step, where there is one."""
        return self.plans[0] if self.plans else None

    @property
    def distributed_functions(self) -> bool:
        """Whether a user's own functions move what is orthogonalized: there is no plan then."""
        return isinstance(self._make_steps, ConfigSteps) and not self._make_steps.config.planned

    def audit(self, **options: Any) -> Any:
        """Look at the coming steps: ``audit``, with this optimizer."""
        from .audit import audit

        return audit(self, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; a group that does not fit leaves the optimizer as it was."""
        self._refuse_while_ready("add_param_group")
        super().add_param_group(param_group)
        try:
            check_matrices(param_group, index=len(self.param_groups) - 1)
            check_hyperparameters(param_group)
            if self._make_steps is alone:
                for param in param_group["params"]:
                    part_boxes(tuple(param.shape), *group_parts(param_group))
        except UsageError:
            self.param_groups.pop()
            raise
        self._made_steps = None
        self._compared = False

    def compare_again(self) -> None:
        """Have the next step compare what several ranks hold alike: parameters were added beside these."""
        self._compared = False

    def ready_gradients(self, max_norm: float | None = None, *, rest: Iterable[Tensor] = ()) -> Tensor | None:
        """Make the gradients ready for ``step()``, once per step, after the last ``backward()``.

        With ``max_norm`` all gradients, of the matrices and of the ``rest`` (the parameters another optimizer
        steps; the matrices may be among them), are clipped together by their total norm, which is returned.
        ``step()`` calls this method if nobody did. Where a gradient is not finite, nothing is changed, the
        norm returned is infinite, and ``step()`` raises, unless ``GradScaler`` has it skip. A process alone
        looks for such a gradient only to clip.

        Raises:
            UsageError: it was called already for these gradients, or not for all that steps with them.
        """
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm must be positive, got {max_norm}")
        if self.gradients_ready:
            raise UsageError("ready_gradients() was already called for this step")
        others = self._others(rest)
        if self._make_steps is not alone:
            self._refuse_to_leave_out(others)
            return self._ready_planned(max_norm, others)
        norm = None if max_norm is None else self._clip_alone(others, max_norm)
        self._gradients_ready = not self._not_finite
        self._readied = SeenGradients.of([*self._params(), *others], changes_count=False)
        return norm

    def _others(self, rest: Iterable[Tensor]) -> list[Tensor]:
        """Those of ``rest`` that are not this optimizer's own, each once."""
        own = {id(param) for param in self._params()}
        return [param for key, param in {id(param): param for param in rest}.items() if key not in own]

    def _refuse_to_leave_out(self, rest: Sequence[Tensor]) -> None:
        """Refuse to average these gradients and not a companion's, which would step by this rank's own."""
        left_out = {id(param) for param in self._companions_params()} - {id(param) for param in rest}
        if left_out and any(mesh.step.averages for mesh in self._made_steps or ()):
            raise UsageError(
                f"this Muon belongs to a MuonWithAdamW, {len(left_out)} of whose gradients would not be "
                "averaged: call the pair's ready_gradients(), which takes all"
            )

    def _companions_params(self) -> list[Tensor]:
        return [it for one in self.companions for group in one.param_groups for it in group["params"]]

    def _clip_alone(self, rest: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip as ``clip_grad_norm_`` does, but change nothing where a gradient is not finite."""
        params = [*self._params(), *rest]
        norm = _norm_of_gradients(params)
        self._not_finite = not bool(norm.isfinite())
        if self._not_finite:
            return torch.full_like(norm, math.inf)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def _refuse_while_ready(self, name: str) -> None:
        if "_early" not in self.__dict__:  # it is being made
            return
        if self.gradients_ready or (self._early is not None and self._early.begun):
            raise UsageError(
                f"{name}() between ready_gradients() and step() would lose what was readied: "
                "call it after step(), or after zero_grad()"
            )

    @property
    def gradients_ready(self) -> bool:
        """Whether ``ready_gradients()`` was called since the last step or ``zero_grad()``.

        The model's ``zero_grad()`` counts, too: a loop that skips a step by it readies the next one's anew.
        """
        if self._gradients_ready and self._readied.were_dropped():
            self.gradients_changed()
        return self._gradients_ready

    def gradients_changed(self) -> None:
        """Say that gradients were written to since they were readied: the next step readies them again."""
        self._gradients_ready = self._not_finite = False
        self._readied = SeenGradients()
        if self._early is not None:
            self._early.drop()
        for mesh in self._made_steps or ():
            mesh.step.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let ``backward()`` add to gradients without sending them: for all but a step's last one.

        As DDP's. It matters with ``overlap_grad_reduce`` alone: with it, a ``backward()`` after the one that
        sent is refused, in here too. If all are in here, ``step()`` sends.
        """
        before, self._paused = self._paused, True
        self._pause_early()
        try:
            yield
        finally:
            self._paused = before
            self._pause_early()

    def _pause_early(self) -> None:
        if self._early is not None:
            self._early.paused = self._paused

    def _finish_early(self) -> TutorialError | None:
        """Wait for the gradients that set out during backward; what keeps this rank from stepping then."""
        return None if self._early is None else self._early.finish()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and return the closure's loss if there is one."""
        loss = None
        if closure is not None:
            self.gradients_changed()
            with torch.enable_grad():
                loss = closure()
        if self.skips_overflow(self):
            self.step_is_over()
            return loss
        self.take_step()
        return loss

    @torch.no_grad()
    def take_step(self, rest: list[Tensor] | None = None, complaint: TutorialError | None = None) -> None:
        """``step()`` without its closure, and without asking a ``GradScaler``.

        Gradients of ``rest`` are readied with these, if nobody did and a plan averages them. With a
        ``complaint`` all ranks refuse the step before anything changes: this one by it, the others by saying
        whose it was.

        Raises:
            TutorialError: as ``step()`` does.
        """
        try:
            self._take_step(None if rest is None else self._others(rest), complaint)
        except TutorialError as error:
            if self._early is not None or not (self._gradients_ready or self._not_finite):
                self.gradients_changed()  # the next step readies and sends them anew, on all ranks
            if not isinstance(error, NotFiniteError):
                self._compared = False  # all ranks have heard of it: nobody goes on with other values
            raise

    def _take_step(self, rest: list[Tensor] | None, complaint: TutorialError | None) -> None:
        call = "step() after ready_gradients()" if self._gradients_ready else "step()"
        complaint = self._finish_early() or complaint or self._complaint(rest)
        if rest is None:  # the step of a companion, if there is one, is yet to come
            rest = list(self._rest or ()) if self._gradients_ready else self._companions_params() or None
        stamp = self._stamp(call, complaint, rest)
        steps = self._steps_agreed(stamp, rest or ())
        if rest is not None and not self._gradients_ready and len(steps) == 1 and steps[0].plan is not None:
            steps[0].run(self.plan_step.ready(rest, None, stamp))
        else:
            for mesh in steps:
                mesh.run(mesh.step.agree(stamp, len(rest or ())))  # on all before anything changes on one
        self._compare(steps)
        self._warn_of_no_gradients()
        self._is_new = False
        for mesh in steps:
            mesh.run(mesh.step.step())
        self._steps_done += 1
        self.step_is_over()

    def step_is_over(self) -> None:
        """Forget what was readied and counted for it."""
        self._zeroed = 0
        self.gradients_changed()
        self._mark_added()

    def _compare(self, steps: Sequence[MeshStep]) -> None:
        """Compare what several ranks hold alike, if it is time to."""
        if self.compare_every is None:
            return
        if not self._compared or self._steps_done % self.compare_every == 0:
            rest = [(f"parameter {i} of the rest", param) for i, param in enumerate(self._rest or ())]
            still = () if self._compared else self.unstepped  # nobody writes to these
            compare_replicas(steps, self.companions, self._steps_done, still, rest)
            self._compared = True

    def _complaint(self, rest: Sequence[Tensor] | None = None) -> TutorialError | None:
        """What keeps this rank from stepping, whatever the others hold; ``rest`` is what steps beside it."""
        if self._not_finite and not bool(_norm_of_gradients(self._readied.params).isfinite()):
            return NotFiniteError(
                "a gradient holds NaN or infinity, as ready_gradients() found; nothing was changed: skip "
                "this step, or fix the loss"
            )
        if self._gradients_ready and self._made_steps is not None:
            if self._make_steps is not alone and not self._made_for.same(self._made_for_now()):
                return UsageError(
                    "parameters, groups or state were set anew between ready_gradients() and step(), which "
                    "loses what was readied: do so after step(), or after zero_grad()"
                )
            averages = any(mesh.step.averages for mesh in self._made_steps)
            if rest is not None and averages and not same_tensors(self._rest or (), rest):
                return UsageError(
                    "ready_gradients() averaged the gradients of other parameters than those that step now: "
                    "call the ready_gradients() of the optimizer whose step() you call"
                )
        if self._readied.have_changed():
            return GradientError(
                "gradients have changed since ready_gradients(), and would step otherwise than they were "
                "averaged and clipped: call it once a step, after the last backward()"
            )
        try:
            for group in self.param_groups:
                check_orthogonalize(group)
            for mesh in self._made_steps or ():
                check_gram_recipes(mesh.plan, self.param_groups)
            for group in self._all_groups():
                check_numbers(group)
                for param in group["params"]:
                    check_gradient(param)
            for param in self._params():
                local_gradient(param)
        except TutorialError as error:
            return error
        return None

    def _all_groups(self) -> list[dict[str, Any]]:
        """The groups of this optimizer, and of those beside it."""
        return [*self.param_groups, *(group for it in self.companions for group in it.param_groups)]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``GradScaler`` asks: whether ``step()`` is to skip by itself where gradients overflowed.

        Where ranks step together they must skip together: a rank that left its step out would hang the rest.
        Of DTensors the scaler asks all ranks itself, and hosts refuse to clip for an optimizer that skips.
        """
        return self._make_steps is not alone and not all(isinstance(it, DTensor) for it in self._params())

    def skips_overflow(self, scaled: torch.optim.Optimizer) -> bool:
        """Whether this step is to be skipped, since ``GradScaler`` found infinity on all ranks.

        ``scaled`` is the optimizer that it steps: this one, or the pair that it belongs to. Its gradients are
        unscaled here if nobody did. All ranks must call.

        Raises:
            GradientError: only some ranks found infinity, or may: gradients are each rank's own, and nobody
                called ``unscale_``.
        """
        found_inf = getattr(scaled, "found_inf", None)
        if found_inf is not None and self._early is not None:
            raise UsageError(
                "overlap_grad_reduce sends gradients before GradScaler unscales them: leave one of them out "
                "(bf16 needs no scaler)"
            )
        return found_inf is not None and skip_overflow(self._steps(), scaled, found_inf)

    def program(self) -> Walk:
        """One step as a generator of requests, for a world to answer: ``LocalWorld.run`` takes one a rank."""
        stamp = self._stamp("step()", self._complaint())  # of what the steps were made for, before this one's
        steps = self._steps()
        if not self._compared and self.compare_every is not None:
            compare_in_process(steps)
            self._compared = True
        for mesh in steps:
            yield from mesh.step.agree(stamp)
        for mesh in steps:
            yield from mesh.step.step()
        self._steps_done += 1
        self.step_is_over()

    def ready_program(self, max_norm: float | None = None, *, rest: Iterable[Tensor] = ()) -> Walk:
        """``ready_gradients`` as a generator of requests, for a world to answer."""
        others = self._others(rest)
        stamp = self._stamp(f"ready_gradients(max_norm={max_norm})", self._complaint(), others)
        return self._ready_or_infinite(max_norm, others, stamp)

    def _ready_or_infinite(self, max_norm: float | None, rest: list[Tensor], stamp: Stamp) -> Walk:
        try:
            norm = yield from self.plan_step.ready(rest, max_norm, stamp)
        except NotFiniteError:  # on all ranks alike
            if self._early is not None:
                self.gradients_changed()  # step() sends them again, and says what is wrong
            return None if max_norm is None else torch.tensor(math.inf)
        self._gradients_ready = True
        self._readied = SeenGradients.of([*self._params(), *rest])
        return norm

    @torch.no_grad()
    def _ready_planned(self, max_norm: float | None, rest: list[Tensor]) -> Tensor | None:
        complaint = self._finish_early() or self._complaint()
        stamp = self._stamp(f"ready_gradients(max_norm={max_norm})", complaint, rest)
        steps = self._steps_agreed(stamp, rest)
        if max_norm is not None and (apart := self._ranks_apart()):
            raise UsageError(
                f"ranks of {apart}_pg have parameters of their own, whose gradients are not in this "
                "optimizer's norm: before step(), clip by the norm over all of them "
                "(torch.nn.utils.clip_grads_with_norm_)"
            )
        if max_norm is None and (len(steps) > 1 or steps[0].plan is None):
            self._gradients_ready = True  # a config expects reduced gradients: there is nothing to do
            self._readied = SeenGradients.of([*self._params(), *rest], changes_count=False)
            return None
        return steps[0].run(self._ready_or_infinite(max_norm, rest, stamp))

    def _ranks_apart(self) -> str | None:
        """The axis of a config along which each rank has parameters of its own, if there is one."""
        config = self._make_steps.config if isinstance(self._make_steps, ConfigSteps) else None
        groups = {} if config is None else config.state.get("process_groups", {})
        return next((axis for axis in INDEPENDENT if axis in groups and groups[axis].size() > 1), None)

    @property
    def plan_steps(self) -> list[PlanStep]:
        """The steps over plans, one a mesh."""
        return [mesh.step for mesh in self._steps() if isinstance(mesh.step, PlanStep)]

    @property
    def plan_step(self) -> PlanStep:
        """The step over a plan, where there is exactly one.

        Raises:
            UsageError: there is none, or one for each of several meshes.
        """
        steps = [mesh.step for mesh in self._steps()]
        if len(steps) != 1 or not isinstance(steps[0], PlanStep):
            raise UsageError(
                "gradients on several meshes, or behind a config's own functions, are not clipped here: "
                "before step(), clip by torch.nn.utils.clip_grad_norm_. That takes one mesh at a time: for "
                "several, take torch.nn.utils.get_total_norm of each one's gradients, the root of the sum of "
                "their squares, and torch.nn.utils.clip_grads_with_norm_"
            )
        return steps[0]

    def _steps(self, before: Sequence[MeshStep] = ()) -> list[MeshStep]:
        """The steps over the current groups and state, made anew after either has changed.

        What ranks agreed on for the steps ``before`` is compared again only where it comes out otherwise.
        Hosts change groups behind an optimizer's back: Accelerate puts FSDP2's parameters in place of ours.
        """
        if self._make_steps is alone and any(isinstance(param, DTensor) for param in self._params()):
            self._make_steps = ConfigSteps(create_dtensor_config())
        seen, now = self._made_for, self._made_for_now()
        if not seen.same_params(now):
            drop_replaced(seen.params, now.params, self.state)
        elif not seen.same_plan(now):
            follow_changes(self.param_groups, seen, self.state)
        if not seen.same(now):
            if seen.same_plan(now):  # other groups, or other state: there is nothing to agree on
                before = before or self._made_steps or ()
            self._made_steps, self._made_for = None, now
        if self._made_steps is None or self._make_steps is alone:
            made = self._make_steps(self.param_groups, self.state, before or self._made_steps or ())
            choose_recipes(self.param_groups, made, self.calibration)
            self._made_steps, self._made_for = made, self._made_for_now()
            self._mark_gradients()
        return self._made_steps

    def _made_for_now(self) -> MadeFor:
        return MadeFor.of(self.param_groups, self.state)

    def _steps_agreed(self, stamp: Stamp, rest: Sequence[Tensor]) -> list[MeshStep]:
        """The steps for a step that averages ``rest`` too.

        Where this rank has come to other parameters, all ranks must have: they are asked by the steps of
        before, since making new ones takes exchanges of its own.
        """
        changed = self._made_steps is None or not self._made_for.same_plan(self._made_for_now())
        before = self._rest
        if before is not None and (changed or len(rest) != len(before)) and self._make_steps is not alone:
            for mesh in self._agreed_steps:
                mesh.run(mesh.step.compare(stamp, len(before)))
        self._agreed_steps, self._rest = self._steps(), rest
        return self._agreed_steps

    def _warn_of_no_gradients(self) -> None:
        """Warn, once, of a first step that would do nothing: these may not be the parameters that train."""
        trained = [param for param in self._params() if param.requires_grad]
        if self._is_new and trained and not any(param.grad is not None for param in trained):
            warnings.warn(
                "no parameter of this Muon has a gradient: if the model was wrapped, sharded or loaded after "
                "the optimizer was made, make the optimizer afterwards, over the model's parameters of now",
                stacklevel=4,
            )

    def _mark_added(self) -> None:
        """Mark the gradients of parameters that a companion has come to since."""
        if self._marked is not None and not same_tensors(self._marked, self._marked_params()):
            self._mark_gradients()

    def _marked_params(self) -> list[Tensor]:
        return [*self._params(), *self._companions_params()]

    def _mark_gradients(self) -> None:
        """Have gradients that the step will average refuse to be clipped one rank at a time."""
        if self._early is not None:
            self._early.drop()
        for handle in self._marks:
            handle.remove()
        self._marks, self._marked = [], None
        made = self._made_steps or []
        if any(mesh.step.averages for mesh in made):
            self._marked = self._marked_params()
            self._marks = mark_gradients(self._marked, self)
        self._early = self._early_reduction(made) if self.overlap_grad_reduce else None
        if self._early is not None:
            self._pause_early()
            self._marks += send_early(self._early, self._params(), self)

    def _early_reduction(self, made: Sequence[MeshStep]) -> EarlyReduction | None:
        """What sends gradients during backward; None where there is no other rank to send them to.

        Raises:
            StrategyError: there is nothing that could be sent early.
        """
        mesh = made[0]
        if len(made) != 1 or not isinstance(mesh.step, PlanStep) or mesh.step.plan.expects != "local":
            raise StrategyError(
                "overlap_grad_reduce is for a strategy that averages gradients itself ('zero1', "
                "'layerwise'); with the others, what averages them (DDP, FSDP2) does so during backward "
                "already"
            )
        if not isinstance(mesh.world, LiveWorld):
            raise StrategyError("overlap_grad_reduce needs a process a rank; a LocalWorld has one for all")
        if not mesh.step.averages:
            return None
        worlds = self._early_worlds  # filled once ranks have agreed on what they do
        return EarlyReduction(mesh.step, lambda walk: worlds[0].run(walk))

    def _stamp(
        self, call: str, complaint: TutorialError | None, rest: Sequence[Tensor] | None = None
    ) -> Stamp:
        """What ranks must have alike in the coming step, theirs and the companions', group by group."""
        if self._make_steps is alone:
            return Stamp(complaint=complaint)
        groups, grid = self._all_groups(), None if self.world is None else self.world.grid
        counted = {
            "compare_every": str(self.compare_every),
            "the number of steps since it was made or loaded": str(self._steps_done),
            "the number of zero_grad() calls since the last step": str(self._zeroed),
            "whether it has stepped or loaded a state": str(not self._is_new),
            "whether the state was set anew": str(not self._made_for.same_states(self._made_for_now())),
            "which Muon of this mesh it is": str(self._number),
            "the call": call,
        }
        alike = hyperparameters(groups) | dimensions(groups) | gradients_beside(rest or (), grid)
        return Stamp(alike | moves_of_momentum(self._params(), self.state) | counted, complaint)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all matrices."""
        self._zeroed += 1
        self.gradients_changed()
        self._mark_added()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, in the form of any optimizer's. It never communicates.

        Where a parameter is a DTensor, so is its momentum: ``torch.distributed.checkpoint`` saves it whole.
        ``zero1`` keeps a slice of each momentum on each rank, and warns of it, once.
        """
        self.warn_of_slices()
        return super().state_dict()

    def warn_of_slices(self) -> None:
        """Warn, once, if what this rank would save is a slice that no other rank has."""
        slices = any(mesh.step.averages for mesh in self._made_steps or ())
        if slices and not self._is_new and not self._warned:
            self._warned = True
            warnings.warn(
                "with this strategy every rank keeps its own slice of the momentum, and state_dict() holds "
                "this rank's: save it on every rank, and load each rank its own, or use save_checkpoint()",
                stacklevel=3,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, this class's or ``torch.optim.Muon``'s, as a copy.

        Momentum keeps its dtype, or takes the parameter's where that is wider: nothing is rounded. (The stock
        method rounds fp32 momentum to a bf16 parameter's dtype.)

        Raises:
            UsageError: a momentum is not what this rank keeps; everything is as it was before.
        """
        self._refuse_while_ready("load_state_dict")
        before = self.state, self.param_groups
        # Registered last, so that it sees what the user's own hooks made of the state.
        parts = [group_parts(group) for group in self.param_groups]
        names = [group.get("orthogonalize", STOCK) for group in self.param_groups]
        handle = self.register_load_state_dict_pre_hook(_hide_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, (its_parts, transposed), name in zip(self.param_groups, parts, names, strict=True):
            group.setdefault("parts", its_parts)
            group.setdefault("transposed", transposed)
            group.setdefault("orthogonalize", name)
        made, self._made_steps = self._made_steps or (), None
        try:
            for group in self.param_groups:
                check_orthogonalize(group)
            if self._make_steps is alone:
                check_momentum(self.param_groups, self.state)
            self._steps(made)
        except UsageError:
            self.restore(*before)
            raise
        self._is_new, self._steps_done, self._zeroed, self._compared = False, 0, 0, False

    def restore(self, state: Any, param_groups: list[dict[str, Any]]) -> None:
        """Put back the state and the groups that were here before a load that failed."""
        self.state, self.param_groups = state, param_groups
        self._made_steps = None

    def __getstate__(self) -> dict[str, Any]:
        if self._make_steps is not alone:
            raise UsageError(
                "a Muon with a strategy cannot be copied or pickled: its mesh belongs to this process. "
                "Construct another one and load this one's state_dict()"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_made_steps" not in self.__dict__:  # a copy: only what has no strategy is copied
            self._make_steps, self.calibration, self.world = alone, None, None
            self.initial_values, self.compare_every, self.overlap_grad_reduce = "compare", 100, False
            self._begin()
            self._is_new = not state["state"]
        for param, entry in state["state"].items():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                entry[key] = widened(value.tensor, param) if isinstance(value, _Hidden) else value
        super().__setstate__(state)


def _norm_of_gradients(params: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A saved tensor that the stock ``load_state_dict`` passes on as it is: it would cast a bare one."""

    tensor: Tensor


def _hide_tensors(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    hidden = {index: _hidden(entry) for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": hidden}


def _hidden(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {key: _Hidden(value) if isinstance(value, Tensor) else value for key, value in entry.items()}


def _make_steps(
    strategy: str | Builder | None,
    world: LiveWorld | LocalMesh | None,
    tp_dim: TpDim,
    window: int,
    config: DistributedConfig | None,
) -> MakeSteps:
    if config is not None:
        if strategy is not None or world is not None:
            raise StrategyError("pass either distributed_config=, or strategy= and mesh=, not both")
        return ConfigSteps(config)
    if strategy is None and world is not None:
        raise StrategyError("a mesh needs a strategy: pass strategy=, or leave mesh out")
    if strategy is None:
        return alone
    builder = find_builder(strategy)
    if world is None:
        raise StrategyError(
            f"strategy {strategy!r} needs mesh=: a DeviceMesh with named axes, or LocalWorld.mesh(rank)"
        )
    return StrategySteps(builder, world, tp_dim, window)
