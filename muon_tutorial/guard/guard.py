"""Protects ranks from each other, and an optimizer from its host, by checks before each step.

::

                     ready_gradients()
              ┌─────────────────────────────► READY ───────────┐
              │                                 │              │ before_step()
              │       gradients dropped,        │              ▼
    OPEN ─────┤ ◄──── zero_grad() ──────────────┤          STEPPING ── after_step() ──► OPEN
              │                                 │              ▲
              │   ready_gradients(max_norm)     │              │
              ├─────────────────────────────► NOT_FINITE       │
              │                                                │
              └──────────────── before_step() ─────────────────┘

Before any rank writes to a parameter, ``before_step`` makes sure that all ranks can take this step, and that
it is the same step. If a step without ``ready_gradients()`` is refused, the state is ``OPEN`` again. If a
call fails halfway, the state stays ``STEPPING``, and the next call begins anew. ``after_step`` checks
nothing: it counts the step, and records which gradients the step has used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..engine.collective import Walk
from ..errors import GradientError, NotFiniteError, TutorialError, UsageError
from ..step.agreement import NOTHING_TO_COMPARE, Fingerprint, agree_on_overflow, compare_fingerprints
from ..step.parameter_state import same_tensors
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, NoMesh
from .changed_parameters import Changed, SeenGradients, check_flattened
from .check_clipping import refused_beside, the_plan_step, warn_of_copies
from .check_hyperparameters import check_hyperparameters, check_numbers
from .check_strategy import check_gram_recipes
from .compare_replicas import broadcast_parameters, compare_gradients, compare_in_process, compare_replicas
from .current_steps import CurrentSteps, MeshStep
from .gradient_hooks import GradientHooks
from .gradient_warnings import warn_of_no_gradients, warn_of_others_gradients
from .same_on_all_ranks import compared_texts, dimensions

if TYPE_CHECKING:
    from ..worlds.local import LocalMesh


class State(Enum):
    """The progress of the next step."""

    OPEN = "gradients are as backward() leaves them, and may change"
    READY = "gradients are averaged and clipped, and must not change"
    NOT_FINITE = "ready_gradients() found a gradient that is not finite, and changed nothing"
    STEPPING = "a call averages gradients or writes parameters, or the last call failed while it did so"


@dataclass(eq=False)
class Guard:
    """Checks an optimizer before each of its steps. ``world`` connects its ranks.

    ``companions`` are the optimizers that step with this optimizer, such as AdamW. ``unstepped`` are the
    parameters that no optimizer steps, with names. ``beside`` are the other parameters whose gradients were
    last averaged together with the matrices' gradients. ``unscaled`` are the gradients that a step unscaled
    before it was refused. ``broadcasts`` is whether all ranks get the first rank's values when the optimizer
    is made. ``number`` distinguishes the Muons on a mesh. ``skipped_gradients`` counts the ``zero_grad()``
    calls that dropped unused gradients. ``said`` are the groups' settings at the last check, and
    ``described`` the texts about them that ranks compare.
    ``compares_gradients`` is whether the next step must compare gradients again; see ``compare_gradients``.
    ``compared`` are the parameters, by index, that had a gradient in a step before: a parameter's first
    gradient is compared, because DDP does not average it if the parameter was frozen when DDP was made.
    ``is_halfway`` is whether a step has begun to write, and since then no step or load has ended.
    """

    steps: CurrentSteps
    hooks: GradientHooks
    world: LiveWorld | LocalMesh | NoMesh = field(default_factory=NoMesh)
    compare_every: int | None = 100
    broadcasts: bool = False
    number: int = 0
    companions: tuple[torch.optim.Optimizer, ...] = ()
    unstepped: Sequence[tuple[str, Tensor]] = ()
    beside: Sequence[Tensor] = ()
    state: State = State.OPEN
    readied: SeenGradients = field(default_factory=SeenGradients)
    used: SeenGradients = field(default_factory=SeenGradients)
    unscaled: SeenGradients = field(default_factory=SeenGradients)
    said: list[Any] = field(default_factory=list)
    described: dict[str, str] = field(default_factory=dict)
    is_new: bool = True
    has_warned_of_slices: bool = False
    has_warned_of_copies: bool = False
    has_looked_for_shards: bool = False
    is_compared: bool = False
    compares_gradients: bool = False
    compared: frozenset[int] = frozenset()
    is_halfway: bool = False
    steps_done: int = 0
    skipped_gradients: int = 0

    def agree_when_made(self, optimizer: Any) -> None:
        """Compare all parameters' dimensions across ranks; if ``broadcasts``, copy the first rank's values.

        All ranks of the mesh must call this when the optimizer is made, and when it gets a companion.
        """
        steps = self.current_steps(optimizer)
        if (error := refused_beside(steps, self.companions_params())) is not None:
            raise error
        for mesh in steps:
            if isinstance(mesh.world, LiveWorld) and mesh.step.ranks.device.type != "meta":
                alike = dimensions(self.all_groups(optimizer), self.world.grid)
                alike["overlap_grad_reduce"] = str(self.hooks.overlap)
                mesh.world.run(compare_fingerprints(mesh.step.ranks, Fingerprint(alike)))
        self.look_at_gradients(optimizer)
        if self.hooks.reduction is not None and not self.hooks.apart and isinstance(self.world, LiveWorld):
            self.hooks.apart.append(self.world.apart("dp"))  # sends gradients during backward
        if self.broadcasts:
            broadcast_parameters(steps, self.companions, self.unstepped)

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        beside: Sequence[Tensor] | None = None,
        error: TutorialError | None = None,
    ) -> Walk:
        """Check a step before it runs, and return the steps to run, one per mesh. All ranks must run it.

        New steps are made if parameters have changed. If the plan averages gradients, the gradients of
        ``beside`` are averaged, too. Without ``beside``, the companions' gradients are averaged. With an
        ``error``, all ranks refuse the step. This rank raises the error, and the other ranks raise an error
        that names this rank.

        Raises:
            TutorialError: a rank cannot take the step. All ranks raise it, before anything has changed.
        """
        is_ready = self.state is State.READY
        if self.hooks.reduction is not None:
            error = self.hooks.reduction.finish() or error
        if beside is None:
            beside = self.beside if is_ready else self.companions_params() if self.companions else ()
        changed = self.steps.made_for.changes(optimizer.param_groups, optimizer.state)
        error = error or self.find_error(optimizer, beside, changed)
        call = "step() after ready_gradients()" if is_ready else "step()"
        fingerprint = self.fingerprint(optimizer, call, beside, error, changed)
        steps = (yield from self.steps_anew(optimizer, fingerprint, changed)) if changed else self.steps.made
        self.beside, self.is_compared = beside, self.is_compared and not self.is_halfway
        if not self.is_compared and self.compare_every is not None:
            compare_in_process(steps)
        if self.state is State.OPEN:  # READY and NOT_FINITE stay until all ranks agree
            self.state = State.STEPPING
        if beside and not is_ready and len(steps) == 1 and isinstance(steps[0].step, PlanStep):
            yield from steps[0].step.ready(beside, None, fingerprint)
        else:
            largest = max(steps, key=lambda mesh: mesh.step.ranks.size, default=None)
            for mesh in steps:  # all meshes agree before any of them changes
                yield from mesh.step.agree(fingerprint, beside if mesh is largest else ())
        one = steps[0].step if len(steps) == 1 else None  # ranks of one mesh agree on which gradients exist
        present = (one.present if isinstance(one, PlanStep) else None) or frozenset()
        begins = self.compare_every is not None and not present <= self.compared  # first gradients
        if self.compare_every is not None and not (self.is_compared and self.steps_done % self.compare_every):
            own = [(f"parameter {i} of the rest", param) for i, param in enumerate(self.beside)]
            still = () if self.is_compared else self.unstepped  # no step changes ``unstepped``
            self.compares_gradients = compare_replicas(steps, self.companions, self.steps_done, still, own)
            self.is_compared = True
        elif self.compares_gradients or begins:
            self.compares_gradients = compare_gradients(steps, again=not begins)
        self.compared = self.compared | present
        nothing = all(param.grad is None for group in optimizer.param_groups for param in group["params"])
        if self.steps_done == 0 or (nothing and not self.has_looked_for_shards):
            self.has_looked_for_shards = nothing
            warn_of_no_gradients(params_of(optimizer), self.companions_params(), self.steps_done == 0)
        if self.steps_done == 0:
            if not beside and steps[0].step.averages and isinstance(self.world, LiveWorld):
                warn_of_others_gradients(params_of(optimizer), self.world)
            if self.steps.alone:  # a process group made since then may have ranks with other recipes
                self.steps.make(optimizer.param_groups, optimizer.state, steps)
        self.state, self.is_halfway = State.STEPPING, True
        return steps

    def after_step(self, optimizer: torch.optim.Optimizer, end: Literal["taken", "skipped"]) -> None:
        """Forget the averaged gradients, and count the step if it was taken."""
        if end == "taken":
            self.steps_done, self.is_new, self.is_halfway = self.steps_done + 1, False, False
        self.skipped_gradients, self.unscaled = 0, SeenGradients()
        self.gradients_changed()
        self.look_at_gradients(optimizer)

    def step_was_refused(self, error: TutorialError) -> None:
        """Record that a step was refused or failed, so that all ranks begin the next step anew."""
        if self.hooks.reduction is not None or self.state in (State.OPEN, State.STEPPING):
            self.gradients_changed()
        if not isinstance(error, NotFiniteError):
            self.is_compared = False  # makes the next step compare replicas again, on all ranks

    def ready(self, optimizer: torch.optim.Optimizer, max_norm: float | None, rest: Iterable[Tensor]) -> Walk:
        """``Muon.ready_gradients`` as a generator of requests. All ranks must run it."""
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm must be positive, got {max_norm}")
        if self.gradients_ready:
            raise UsageError("ready_gradients() was already called for this step")
        beside = without(params_of(optimizer), rest)
        if left_out := without(beside, self.companions_params()):
            raise UsageError(
                f"this Muon belongs to a MuonWithAdamW, and {len(left_out)} of AdamW's gradients would be "
                "left out: call the ready_gradients() of the MuonWithAdamW"
            )
        seen = [*params_of(optimizer), *beside]
        if self.steps.alone:
            norm, self.state = None, State.READY
            if max_norm is not None:  # like clip_grad_norm_, but a norm that is not finite changes nothing
                norm = _norm_of_gradients(seen)
                if norm.isfinite():
                    torch.nn.utils.clip_grads_with_norm_(seen, max_norm, norm)
                else:
                    norm, self.state = torch.full_like(norm, math.inf), State.NOT_FINITE
            self.readied = SeenGradients.of(seen, changes_count=False)
            return norm
        changed = self.steps.made_for.changes(optimizer.param_groups, optimizer.state)
        error = self.hooks.finish() or self.find_error(optimizer, None, changed)
        error = error or refused_beside(self.steps.made, beside, max_norm)
        if max_norm is not None and not self.has_warned_of_copies:
            self.has_warned_of_copies = warn_of_copies(self.steps.made, beside)
        call = f"ready_gradients(max_norm={max_norm})"
        fingerprint = self.fingerprint(optimizer, call, beside, error, changed)
        steps = (yield from self.steps_anew(optimizer, fingerprint, changed)) if changed else self.steps.made
        self.beside = beside
        if max_norm is None and (len(steps) > 1 or steps[0].plan is None):
            self.state = State.READY  # a config expects gradients that are already averaged
            self.readied = SeenGradients.of(seen, changes_count=False)
            return None
        if apart := next((mesh.own_along for mesh in steps if mesh.own_along), None):
            raise UsageError(
                f"ranks of {apart}_pg have parameters of their own, whose gradients are not in this "
                "optimizer's norm: before step(), clip by the norm over all parameters "
                "(torch.nn.utils.clip_grads_with_norm_)"
            )
        self.state = State.STEPPING
        try:
            norm = yield from the_plan_step(steps).ready(beside, max_norm, fingerprint)
        except TutorialError as refusal:  # all ranks raise it
            self.state = State.OPEN
            if self.hooks.reduction is not None:
                self.gradients_changed()  # so the next call sends the gradients again
            if not isinstance(refusal, NotFiniteError):
                raise
            return None if max_norm is None else torch.tensor(math.inf)
        self.state, self.readied = State.READY, SeenGradients.of(seen)
        return norm

    def loss_of(self, closure: Callable[[], float]) -> float:
        """Run a closure and return its loss. It may drop gradients that are ready, but not change them."""
        if not (self.gradients_ready or self.state is State.NOT_FINITE):
            self.gradients_changed()
        with torch.enable_grad():
            loss = closure()
        if self.state is State.READY and self.readied.were_dropped():
            self.gradients_changed()
        return loss

    @property
    def gradients_ready(self) -> bool:
        """Whether ``ready_gradients()`` was called since the last step or ``zero_grad()``.

        The model's ``zero_grad()`` counts like the optimizer's, because a loop may call it to skip a step.
        """
        if self.state is State.READY and self.readied.were_dropped():
            self.gradients_changed()
        return self.state is State.READY

    def gradients_changed(self) -> None:
        """Record that gradients may have changed, so that the next step averages them again."""
        self.state = State.OPEN
        self.readied = SeenGradients()
        if self.hooks.reduction is not None:
            self.hooks.reduction.drop()
        for mesh in self.steps.made:
            mesh.step.forget()

    def before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Count this ``zero_grad()`` if it drops gradients that no step has used."""
        if not self.steps.alone:
            self.skipped_gradients += self.used.were_skipped(params_of(optimizer))
        self.gradients_changed()

    def look_at_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the current gradients as used, and hook the gradients of new parameters."""
        if self.steps.alone:
            return
        params = params_of(optimizer)
        self.used = SeenGradients.of(params, changes_count=False)
        if self.companions:
            self.hooks.attach(self.steps.made, params, self.companions_params())

    def refuse_while_ready(self, name: str) -> None:
        """Refuse a call that would lose averaged gradients.

        Raises:
            UsageError: gradients were averaged, or sent during backward.
        """
        if self.gradients_ready or (self.hooks.reduction is not None and self.hooks.reduction.begun):
            raise UsageError(
                f"{name}() between ready_gradients() and step() would lose the averaged gradients: "
                "call it after step(), or after zero_grad()"
            )

    def was_loaded(self) -> None:
        self.is_new = self.is_compared = self.is_halfway = False
        self.steps_done = self.skipped_gradients = 0

    def current_steps(self, optimizer: Any, before: Sequence[MeshStep] | None = None) -> list[MeshStep]:
        """Return the steps for the current groups and state. New steps get hooks on their gradients."""
        known = self.steps.made
        steps = self.steps.current(optimizer.param_groups, optimizer.state, before)
        if steps is not known:
            self.hooks.attach(steps, params_of(optimizer), self.companions_params())
        return steps

    def steps_anew(self, optimizer: Any, fingerprint: Fingerprint, changed: Changed) -> Walk:
        """Make the current steps anew, because something has changed since they were made.

        Parameters must have changed on all ranks or on no rank. The old steps compare fingerprints first,
        because a rank without changes would not answer messages sent for new steps.
        """
        if changed & (Changed.PARAMETERS | Changed.KINDS) and not self.steps.alone:
            for mesh in self.steps.made:
                if mesh.step.ranks.device.type != "meta":
                    yield from compare_fingerprints(mesh.step.ranks, fingerprint)
        return self.current_steps(optimizer)

    def fingerprint(
        self,
        optimizer: Any,
        call: str,
        beside: Sequence[Tensor],
        error: TutorialError | None,
        changed: Changed,
    ) -> Fingerprint:
        """Make the texts that ranks compare before the next step."""
        if self.steps.alone:
            if error is not None:
                raise error
            return NOTHING_TO_COMPARE
        if changed or not self.described or not (beside is self.beside or same_tensors(self.beside, beside)):
            states = [optimizer.state.get(param, {}) for param in params_of(optimizer)]
            self.described = compared_texts(self.all_groups(optimizer), states, beside, self.world.grid)
        moves = {entry["steps"] for entry in optimizer.state.values() if "steps" in entry}
        counted = {
            "compare_every": str(self.compare_every),
            "the number of steps since the optimizer was made or loaded": str(self.steps_done),
            "the number of zero_grad() calls that dropped unused gradients": str(self.skipped_gradients),
            "the number of steps that have updated the momentum": ", ".join(map(str, sorted(moves))),
            "whether the optimizer has stepped or loaded a state": str(not self.is_new),
            "whether a step was interrupted halfway (then load a checkpoint)": str(self.is_halfway),
            "whether the state was replaced": str(Changed.STATE in changed),
            "the optimizer's number among the Muons of this mesh": str(self.number),
            "the call": call,
        }
        return Fingerprint(self.described | counted, error)

    def find_error(
        self, optimizer: Any, beside: Sequence[Tensor] | None, changed: Changed
    ) -> TutorialError | None:
        """Return the error if this rank cannot step. ``beside`` are the companions' parameters.

        If the last call failed halfway, this first forgets the gradients that it averaged. Groups' settings
        are checked only if they have changed since the last check.
        """
        if self.state is State.STEPPING:  # the last call failed halfway
            self.gradients_changed()
        if self.state is State.NOT_FINITE and not _norm_of_gradients(self.readied.params).isfinite():
            return NotFiniteError(
                "a gradient holds NaN or infinity, as ready_gradients() found; nothing was changed: skip "
                "this step, or fix the loss"
            )
        groups = [group for it in (optimizer, *self.companions) for group in it.param_groups]
        said = [len(its) if key == "params" else its for group in groups for key, its in group.items()]
        try:
            if self.state is State.READY and (error := self._lost(changed, beside)) is not None:
                return error
            if changed or any(isinstance(its, Tensor) for its in said) or said != self.said:
                self.said, self.described = [], {}
                for plan in filter(None, (mesh.plan for mesh in self.steps.made)):
                    check_gram_recipes(plan, optimizer.param_groups)
                for number, group in enumerate(groups):
                    is_muons = number < len(optimizer.param_groups)
                    (check_hyperparameters if is_muons else check_numbers)(group, number)
                if changed & (Changed.KINDS | Changed.PARAMETERS):
                    check_flattened(optimizer.param_groups, self.steps.made_for)
                self.said = said
        except TutorialError as error:
            return error
        with torch._C.DisableTorchFunctionSubclass():  # skips UnreducedGradient's checks
            for param, grad in ((param, param.grad) for group in groups for param in group["params"]):
                if grad is not None and grad.layout is not torch.strided:
                    return UsageError(
                        f"Muon and AdamW take dense gradients, got a sparse one of shape {tuple(grad.shape)}"
                    )
                if grad is not None and (grad.shape != param.shape or grad.device != param.device):
                    return GradientError(
                        f"a parameter of shape {tuple(param.shape)} on {param.device} has a gradient of "
                        f"shape {tuple(grad.shape)} on {grad.device}: was its .data replaced?"
                    )
        return None

    def _lost(self, changed: Changed, beside: Sequence[Tensor] | None) -> TutorialError | None:
        """Return an error if the averaged gradients can no longer be used."""
        if changed and not self.steps.alone:
            return UsageError(
                "parameters, groups or state were replaced between ready_gradients() and step(), which "
                "loses the averaged gradients: make such replacements after step(), or after zero_grad()"
            )
        averages = any(mesh.step.averages for mesh in self.steps.made)
        if beside is not None and averages and not same_tensors(self.beside, beside):
            return UsageError(
                "ready_gradients() and step() got different sets of parameters: call ready_gradients() on "
                "the optimizer whose step() you call, or add parameters after step()"
            )
        if self.readied.have_changed():
            return GradientError(
                "gradients have changed since ready_gradients() averaged and clipped them: "
                "call it once per step, after the last backward()"
            )
        return None

    def skips_overflow(self, optimizer: Any, scaled: Any) -> bool:
        """Whether to skip this step, because ``GradScaler`` found infinity on all ranks.

        All ranks must call it. ``scaled`` is the optimizer that the scaler steps: this one, or the
        ``MuonWithAdamW`` that contains it. The scaler sets ``found_inf`` on ``scaled``, and ``grad_scale`` if
        gradients must be unscaled here.

        Raises:
            GradientError: only some ranks found infinity, or ``unscale_`` was not called, so ranks cannot
                skip together.
        """
        found_inf, scale = getattr(scaled, "found_inf", None), getattr(scaled, "grad_scale", None)
        if found_inf is None:
            return False
        scaled.found_inf, scaled.grad_scale = None, 1  # if this step fails, the scaler multiplies this scale
        scale = scale if isinstance(scale, Tensor) else None
        if self.hooks.reduction is not None:
            raise UsageError(
                "overlap_grad_reduce sends gradients before GradScaler unscales them: leave one of them out "
                "(bf16 needs no scaler)"
            )
        steps, params = self.current_steps(optimizer), params_of(scaled)
        if scale is not None and any(mesh.step.averages for mesh in steps):
            raise GradientError(
                "these gradients are each rank's own, and may overflow on one rank alone: scale with "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its "
                "unscale_(optimizer) before step, so that all ranks skip together"
            )
        # This is a list, not a generator, so that every mesh takes part.
        answers = [mesh.world.run(agree_on_overflow(found_inf, mesh.step.ranks)) for mesh in steps]
        if not any(answers) and scale is not None and self.unscaled.were_skipped(params):
            inverse = scale.double().reciprocal().float()  # as in GradScaler
            for param in params:
                if param.grad is not None:
                    param.grad.mul_(inverse.to(param.grad.device))
            self.unscaled = SeenGradients.of(params, changes_count=False)
        return any(answers)

    def warn_of_slices(self) -> None:
        """Warn if a step was interrupted, and once if this rank would save a slice that no other has."""
        if self.is_halfway:
            warnings.warn(
                "step() was interrupted halfway, so only some parameters have been stepped, and this "
                "state_dict() fits no step: load the last checkpoint, or save after a whole step",
                stacklevel=3,
            )
        slices = any(mesh.step.averages for mesh in self.steps.made)
        if slices and not self.is_new and not self.has_warned_of_slices:
            self.has_warned_of_slices = True
            warnings.warn(
                "with this strategy every rank keeps its own slice of the momentum, and state_dict() holds "
                "this rank's slice: save and load it on every rank, or use save_checkpoint()",
                stacklevel=4,
            )

    def companions_params(self) -> list[Tensor]:
        return [param for companion in self.companions for param in params_of(companion)]

    def all_groups(self, optimizer: Any) -> list[dict[str, Any]]:
        return [group for it in (optimizer, *self.companions) for group in it.param_groups]


class NoGuard(Guard):
    """Steps without checks, for benchmarks. Each rank trusts the other ranks and its host."""

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        beside: Sequence[Tensor] | None = None,
        error: TutorialError | None = None,
    ) -> Walk:
        """Return the steps as first made, without looking whether a host has changed the parameters since."""
        if error is not None:
            raise error
        if self.state is State.STEPPING:  # the last call failed halfway
            self.gradients_changed()
        self.hooks.finish()
        steps = self.current_steps(optimizer) if not self.steps.made_for.each else self.steps.made
        if self.state is State.OPEN:
            self.state = State.STEPPING
            beside = self.companions_params() if beside is None else beside
            if beside and any(mesh.step.averages for mesh in steps):
                yield from the_plan_step(steps).ready(beside)
            for mesh in steps:
                mesh.step.trust()
        self.state, self.is_halfway = State.STEPPING, True
        return steps


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def without(some: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return the ``others`` that are not among ``some``, without duplicates."""
    known = {id(param) for param in some}
    return [param for key, param in {id(param): param for param in others}.items() if key not in known]


def _norm_of_gradients(params: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
