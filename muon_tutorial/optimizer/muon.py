"""Muon as a ``torch.optim.Optimizer``, in one process or distributed over a plan.

A step has two parts: the guard checks it (``guard/``), then a world (``worlds/``) runs it (``step/``). If
AdamW steps the other parameters, the guard averages both optimizers' gradients after its checks
(``PlanStep.ready``). Without a strategy, results match ``torch.optim.Muon`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from ..engine.collective import Walk
from ..errors import TutorialError, UsageError
from ..guard.check_hyperparameters import check_hyperparameters, check_options
from ..guard.current_steps import CurrentSteps, MeshStep
from ..guard.gradient_hooks import GradientHooks
from ..guard.guard import Guard, NoGuard, params_of
from ..guard.momentum_slice import mark_slices
from ..guard.same_on_all_ranks import count_on
from ..launching.group_timeouts import warn_of_long_waits
from ..newton_schulz import DEFAULT_EPS, DEFAULT_STEPS, KELLER_JORDAN, Coefficients
from ..orthogonalizers.named import STOCK
from ..parameters.describe_matrices import check_matrices
from ..parameters.tensor_parallel import TpDim
from ..plan.matrix import Parts, part_boxes
from ..plan.rounds import IN_FLIGHT
from ..plan.strategies import Builder, Plan
from ..step.parameter_state import group_parts
from ..step.step import PlanStep
from ..worlds.live import LiveWorld, NoMesh
from .load_state import follow_names, hide_tensors, own_lr, show_tensors
from .make_steps import DefaultSteps, choose_maker, with_recipes

if TYPE_CHECKING:
    from ..callbacks.config import DistributedConfig
    from ..worlds.local import LocalMesh
    from .auto_recipes import Source


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton–Schulz: an optimizer for the hidden matrices of a network.

    The arguments up to ``adjust_lr_fn`` are ``torch.optim.Muon``'s; ``ns_coefficients`` may also hold one
    triple per step. Parameters other than hidden matrices belong to AdamW: see ``split_parameters``.

    Args:
        orthogonalize: the variant of Newton–Schulz. ``"stock"`` matches ``torch.optim.Muon`` bit for bit and
            uses ``ns_coefficients`` and ``ns_steps``; the recipes in ``orthogonalizers.named.RECIPES`` have
            coefficients of their own. ``"auto"`` takes, for each shape, the fastest recipe on this machine
            that is no worse than stock. The first rank chooses, and parameter groups and checkpoints record
            the choice. A group may set its own ``orthogonalize``. For a given recipe, every strategy except
            ``gram`` gives the same bits. All recipes except ``"float32"`` and ``"gram"`` make updates 4 to
            15 % larger than stock's, like a larger learning rate (``orthogonalizers.named.LARGER_UPDATES``).
        calibration: the timings that ``"auto"`` uses: an ``orthogonalizers.calibration.Calibration``, or a
            folder with one file per machine, torch version and number of threads (default:
            ``~/.cache/muon_tutorial``). Shapes without timings are measured when the optimizer is made, which
            takes about a second each.
        strategy: a name from ``STRATEGIES``, or a builder that turns matrices and a grid into a plan (such as
            ``functools.partial(zero1, round_bytes=1_000_000)``). With a strategy, all ranks of the mesh must
            construct, step and load together.
        mesh: a ``DeviceMesh`` with named axes (``dp``, ``tp``), or a ``LocalWorld``'s ``mesh(rank)``. A
            ``LocalWorld`` steps all ranks at once: ``world.run([muon.program() for muon in muons])``.
        distributed_config: the user's own functions, or the config of a helper such as
            ``create_dtensor_config``, in place of ``strategy`` and ``mesh``.
        tp_dim: the dimension along which tensor parallelism has cut plain parameters; None if they are whole.
            A mapping from the parameter's index, or a function of index and parameter, gives a ``tp_dim`` to
            each. A parameter keeps its index when others leave. An attribute ``partition_dim`` takes
            precedence; ``partition_sizes`` lists an uneven cut.
        window: how many rounds may be in flight at once: with three, one travels to its owners, one is
            orthogonalized, and one travels back. A group of one dtype that takes at most ``round_bytes`` is
            one round.
        parts: how a parameter holds several matrices; each is orthogonalized on its own. ``parts`` is each
            matrix's number of rows (``(d, d, d)`` for fused QKV), one number if all are equal (heads),
            ``"stack"`` for experts, or ``"flatten"`` for convolutions. A group may set its own ``parts``.
        transposed: whether a group's weights are stored as (in, out), as in Hugging Face's ``Conv1D``.
            For such weights, the learning rate is scaled by outputs and inputs, and ``parts`` counts columns.
        initial_values: what the constructor does if several ranks hold copies of the same parameter.
            ``"broadcast"`` gives all copies the first rank's values, as DDP does, if the parameters have
            names; ``"compare"`` changes nothing. In both cases the first step compares the copies.
        compare_every: every so many steps, ranks compare hashes of their copies of parameters and state
            again, along every axis of the mesh; with None, never, not even in the first step.
        guard: ``"on"`` checks before every step that all ranks can take it, and that it is the same step.
            ``"off"``, for benchmarks, checks nothing, and ranks exchange only the step's own messages.
        overlap_grad_reduce: send each bucket's gradients, in their own process group, as soon as
            ``backward()`` has produced all of them. Only for strategies that average gradients (``zero1``,
            ``layerwise``, ``gram``); does not change the bits. When you accumulate gradients, wrap every
            ``backward()`` except the last in ``no_sync()``, and run the last on the CUDA stream of its
            forward pass. A bucket with a frozen or unused matrix waits for ``step()``, and so do later ones.
            ``GradScaler`` is refused: it changes gradients after backward.

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
    """Whether ``step()`` has been called, for schedulers. torch sets it, and so does ``MuonWithAdamW``."""

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
        guard: Literal["on", "off"] = "on",
    ) -> None:
        check_options(window, compare_every, initial_values, guard)
        world = LiveWorld(mesh) if isinstance(mesh, DeviceMesh) else mesh
        if isinstance(world, LiveWorld) and world.at.rank == 0:
            warn_of_long_waits({axis: world.group((axis,)) for axis in world.grid.axes})
        make = choose_maker(strategy, world, tp_dim, window, distributed_config)
        self.world = world or NoMesh()
        steps = CurrentSteps(with_recipes(make, calibration), alone=isinstance(make, DefaultSteps))
        kind = Guard if guard == "on" else NoGuard
        hooks = GradientHooks(overlap_grad_reduce)
        self.guard = kind(steps, hooks, self.world, compare_every, initial_values == "broadcast")
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
        self.guard.agree_when_made(self)
        if isinstance(self.world, LiveWorld):
            self.guard.number = count_on(self.world.mesh)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and return the closure's loss if there is one."""
        loss = None if closure is None else self.guard.loss_of(closure)
        if getattr(self, "found_inf", None) is not None and self.guard.skips_overflow(self, self):
            self.guard.after_step(self, "skipped")
        else:
            self.take_step()
        return loss

    @torch.no_grad()
    def take_step(self, beside: Sequence[Tensor] | None = None, error: TutorialError | None = None) -> None:
        """Step without a closure or a ``GradScaler``. The arguments are the same as in ``program``."""
        try:
            with torch._C._DisableAutocast():  # a loop may step inside autocast
                self.world.run(self.program(beside, error))
        except TutorialError as refusal:
            self.guard.step_was_refused(refusal)
            raise

    def program(self, beside: Sequence[Tensor] | None = None, error: TutorialError | None = None) -> Walk:
        """One step as a generator of requests. The arguments are the same as in ``Guard.before_step``."""
        for each in (yield from self.guard.before_step(self, beside, error)):  # one mesh's step
            yield from each.step.walk()
        self.guard.after_step(self, "taken")

    def ready_gradients(self, max_norm: float | None = None, *, rest: Iterable[Tensor] = ()) -> Tensor | None:
        """Average the gradients before ``step()``, once per step, after the last ``backward()``.

        With ``max_norm``, gradients are clipped by their total norm, which is returned. The norm covers the
        matrices and ``rest``, the parameters of another optimizer; matrices in ``rest`` count once. If
        a gradient is not finite, no gradient changes, the returned norm is infinite, and ``step()`` raises,
        unless ``GradScaler`` makes it skip. A single process checks gradients only when it clips.

        Raises:
            UsageError: this was already called for the step, or this is the Muon of a ``MuonWithAdamW``; call
                the pair's own ``ready_gradients``, which averages AdamW's gradients, too.
        """
        with torch.no_grad():
            return self.world.run(self.ready_program(max_norm, rest=rest))

    def ready_program(self, max_norm: float | None = None, *, rest: Iterable[Tensor] = ()) -> Walk:
        """``ready_gradients`` as a generator of requests, for a world to answer."""
        return self.guard.ready(self, max_norm, rest)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let ``backward()`` add to gradients without sending them, like DDP's ``no_sync``.

        Wrap every ``backward()`` of a step except the last. If you wrap the last ``backward()``, too,
        ``step()`` sends the gradients. Without ``overlap_grad_reduce`` this does nothing.
        """
        return self.guard.hooks.pause()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.guard.before_zero_grad(self)
        super().zero_grad(set_to_none)
        self.guard.look_at_gradients(self)

    @property
    def steps(self) -> list[MeshStep]:
        """The steps for the current groups and state, one per mesh."""
        return self.guard.current_steps(self)

    @property
    def plan_steps(self) -> list[PlanStep]:
        """The steps that run a plan, at most one per mesh."""
        return [mesh.step for mesh in self.steps if isinstance(mesh.step, PlanStep)]

    @property
    def plans(self) -> list[Plan]:
        """The plans of a step, one per mesh; empty without a strategy or with a user's own functions."""
        return [step.plan for step in self.plan_steps]

    @property
    def plan(self) -> Plan | None:
        """The first of the ``plans``, if there is any."""
        return next(iter(self.plans), None)

    def audit(self) -> Any:
        """Audit the next steps; see ``audit.audit``."""
        from .audit import Audit

        return Audit(self, None)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step()`` itself skips when gradients overflow; ``GradScaler`` reads this.

        Ranks must skip together, because a rank that skipped alone would hang the rest. For DTensors this is
        False: ``GradScaler`` itself asks all their ranks, and Lightning clips only if this is False.
        """
        return not self.guard.steps.alone and not all(isinstance(it, DTensor) for it in params_of(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices. If the group is refused, the optimizer does not change."""
        self.guard.refuse_while_ready("add_param_group")
        super().add_param_group(param_group)
        try:
            check_matrices(param_group, index=len(self.param_groups) - 1)
            check_hyperparameters(param_group)
            if self.guard.steps.alone:
                for param in param_group["params"]:
                    part_boxes(tuple(param.shape), *group_parts(param_group))
        except UsageError:
            self.param_groups.pop()
            raise
        own_lr(param_group, self.param_groups[:-1])
        self.guard.steps.forget()
        self.guard.is_compared = False

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state in the form of torch's optimizers, without communication.

        A DTensor's momentum is a DTensor, too, so ``torch.distributed.checkpoint`` saves it whole.
        With ``zero1`` each rank has only a slice of each momentum; the first call warns of that.
        """
        self.guard.warn_of_slices()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state that this class or another Muon saved.

        Parameters are matched by name if names are on both sides, otherwise by position. Momentum keeps its
        dtype, unless the parameter's is wider. So nothing is rounded. (The stock method rounds fp32 momentum
        to a bf16 parameter's dtype.)

        Raises:
            UsageError: a saved momentum differs in size from this rank's, only some of a group's names are on
                both sides, or a group was saved with other ``parts`` or ``transposed``. Nothing is changed.
        """
        self.guard.refuse_while_ready("load_state_dict")
        before = self.state, self.param_groups
        made = self.guard.steps.made
        groups = [dict(group) for group in self.param_groups]
        # These hooks are registered last, so they see the state after the user's own hooks have changed it.
        handles = [self.register_load_state_dict_pre_hook(hook) for hook in (follow_names, hide_tensors)]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        for group, old in zip(self.param_groups, groups, strict=True):  # other Muons save fewer keys
            group.update({**old, **group})
        self.guard.steps.forget()
        try:
            for number, group in enumerate(self.param_groups):
                check_hyperparameters(group, number)
            self.guard.current_steps(self, made)
        except UsageError:
            self.restore(*before)
            raise
        self.guard.was_loaded()

    def restore(self, state: Any, param_groups: list[dict[str, Any]]) -> None:
        """Put back the state and the groups from before a load that failed."""
        self.state, self.param_groups = state, param_groups
        self.guard.steps.forget()

    def __getstate__(self) -> dict[str, Any]:
        if not self.guard.steps.alone:
            raise UsageError(
                "a Muon with a strategy cannot be copied or pickled: its mesh belongs to this process. "
                "Construct another Muon and load this one's state_dict() into it"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "guard" not in self.__dict__:  # this is a copy; only a Muon without a strategy can be copied
            self.world = NoMesh()
            steps = CurrentSteps(with_recipes(DefaultSteps(), None), alone=True)
            self.guard = Guard(steps, GradientHooks(), is_new=not state["state"])
        show_tensors(state["state"])
        super().__setstate__(state)
