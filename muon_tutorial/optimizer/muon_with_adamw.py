"""Muon for the hidden matrices and AdamW for the rest, used like one optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import UsageError
from ..guard.changed_parameters import check_moments, has_moved
from ..guard.guard import params_of
from ..guard.momentum_slice import mark_slices
from ..parameters.describe_matrices import FLATTENED, all_named
from ..plan.matrix import Parts
from ..plan.strategies import Builder
from ..step.parameter_state import same_tensors
from ..worlds.live import LiveWorld
from ..worlds.local import LocalMesh
from .combined_state import PairGroups, PairState
from .load_state import check_moment_values, follow_names, in_order, own_lr
from .muon import Muon
from .split_parameters import Experts, Heads, parameters_by_name, split_parameters
from .split_table import ParameterSplit, SplitVerdict

_P = ParamSpec("_P")
_R = TypeVar("_R")

VECTORS = ("bias", "gain", "state-space parameter")
"""The verdicts' reasons for parameters that count as vectors even if they have two or more dimensions."""

IN_TRAINER = (
    "in transformers' Trainer, wrap it in a lambda: "
    "optimizer_cls_and_kwargs=(lambda: MuonWithAdamW.from_model, {'lr': …})"
)


class MuonWithAdamW(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` that prepares, steps and saves a ``Muon`` and a ``torch.optim.AdamW``.

    ``param_groups`` lists the groups of both, Muon's first, so a learning-rate scheduler affects both. If the
    scheduler cycles the momentum, AdamW uses that momentum as its first beta. The two optimizers are
    ``.muon`` and ``.adamw``.

    Raises:
        UsageError: the two are not of these classes, or share a parameter.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> both = MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-4)
    >>> [group["lr"] for group in both.param_groups]
    [0.02, 0.0003]
    """

    muon: Muon
    adamw: torch.optim.AdamW
    order: list[str]
    """The optimizer of each group in ``param_groups``: "muon" or "adamw". Groups that were added to ``.muon``
    or ``.adamw`` directly come last and have no entry."""

    verdicts: dict[Tensor, SplitVerdict]
    """The verdict of ``split_parameters`` on each parameter of the model, even on a frozen parameter."""

    decay_vectors: bool
    """Whether weight decay applies to norms and biases in groups that are added later."""

    _model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    """Returns the model that ``from_model`` was given, or None once it is deleted."""

    _seen: Sequence[Tensor] = ()
    """The parameters of all groups at the last call of ``_look_at_groups``."""

    _stepped: Set[Tensor] = frozenset()
    """The model's parameters that are, or once were, in a group."""

    _told: Set[str] = frozenset()
    """Names of unstepped parameters that a warning has already listed."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW | None = None, **others: Any) -> None:
        if not isinstance(muon, Muon) or not isinstance(adamw, torch.optim.AdamW) or others:
            found = [" and ".join(map(torch.typename, (muon, adamw))), *(f"{name}=" for name in others)]
            raise UsageError(
                "MuonWithAdamW takes a muon_tutorial.Muon and a torch.optim.AdamW, got "
                f"{', '.join(found)}; MuonWithAdamW.from_model makes them from a model; {IN_TRAINER}"
            )
        _refuse_shared(muon, adamw)
        # __setstate__ sets up the base class's hooks, but not its groups, which the two optimizers hold.
        # The defaults have no "betas", so a scheduler that cycles momentum writes "momentum" into all groups.
        order = ["muon"] * len(muon.param_groups) + ["adamw"] * len(adamw.param_groups)
        parts = {"muon": muon, "adamw": adamw, "order": order, "verdicts": {}, "decay_vectors": True}
        self.__setstate__({"defaults": dict(muon.defaults), **parts})
        self.register_state_dict_post_hook(mark_slices)
        for group in adamw.param_groups:
            own_lr(group, muon.param_groups)
        muon.guard.agree_when_made(muon)

    @classmethod
    def from_model(
        cls,
        model: nn.Module | None = None,
        *,
        lr: float | Tensor | None = None,
        adamw_lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        decay_vectors: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        strategy: str | Builder | None = None,
        mesh: DeviceMesh | LiveWorld | LocalMesh | None = None,
        exclude: Sequence[str] = (),
        experts: Experts | None = None,
        heads: Heads = "together",
        parts: Mapping[str, Parts] | None = None,
        transposed: Sequence[str] = (),
        include_frozen: bool = False,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> MuonWithAdamW:
        """Split a model's parameters with ``split_parameters``, and make both optimizers.

        Call this where you would make AdamW: after ``fully_shard`` or ``parallelize_module``, before or after
        DDP, and before Accelerate's ``prepare``. DTensors and DDP need no strategy.

        Args:
            lr: Muon's learning rate. Without ``adamw_lr`` (or an ``"lr"`` in ``adamw``), AdamW uses ``lr``,
                too, and ``adjust_lr_fn`` becomes ``"match_rms_adamw"`` unless ``muon`` sets it, so that both
                optimizers' updates are about equally large.
            weight_decay: for both optimizers. By default Muon uses 0.1 and AdamW 0.01, as in torch.
            decay_vectors: whether weight decay applies to norms, biases and other vectors of any shape.
            betas: AdamW's betas.
            exclude, experts, heads, parts, transposed: as in ``split_parameters``; for example,
                ``parts={"*.qkv_proj.weight": (64, 32, 32)}``.
            include_frozen: whether to include frozen parameters, so that you can unfreeze them later.
            muon: more arguments for ``Muon``, for example ``{"momentum": 0.9}``.
            adamw: more arguments for ``torch.optim.AdamW``, for example ``{"eps": 1e-10}``.

        Raises:
            UsageError: an argument is unknown, or the model has no hidden matrix or cannot be split.
        """
        if model is None or lr is None:  # transformers' Trainer expects a class here, and calls it
            raise UsageError(f"from_model takes a model and lr=; {IN_TRAINER}")
        if others:
            remedy = "pass Muon's arguments by muon={…}, AdamW's by adamw={…}"
            raise UsageError(f"from_model takes no {', '.join(others)}: {remedy}")
        sort = partial(split_parameters, model, exclude=exclude, heads=heads, parts=parts)
        split = sort(transposed=transposed, experts=experts, include_frozen=include_frozen)
        if not split.hidden:
            what = f"{type(model).__name__} has no hidden matrix for Muon"
            raise UsageError(f"{what}: use torch.optim.AdamW, or include_frozen=True if matrices are frozen")
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        one_lr = {"adjust_lr_fn": "match_rms_adamw"} if adamw_lr is None and "lr" not in (adamw or {}) else {}
        first = Muon(split.hidden, lr, strategy=strategy, mesh=mesh, **{**decay, **one_lr, **(muon or {})})
        options = {"lr": lr if adamw_lr is None else adamw_lr, "betas": betas, **decay, **(adamw or {})}
        rest = torch.optim.AdamW(_decay_groups(split, decay_vectors), **options)
        if not include_frozen:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the first call of ``sort()`` has warned already
                split = sort(transposed=transposed, experts=experts, include_frozen=True)
        first.guard.unstepped = [(verdict.name, verdict.param) for verdict in split.verdicts]
        both = cls(first, rest)
        both._follow(model, split, decay_vectors)
        return both

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Muon's groups, AdamW's groups, and then groups added later, in a new list that refuses changes."""
        groups = {"muon": list(self.muon.param_groups), "adamw": list(self.adamw.param_groups)}
        ordered = [groups[owner].pop(0) for owner in self.order if groups[owner]]
        return PairGroups([*ordered, *groups["muon"], *groups["adamw"]])

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give each optimizer its groups (Muon's have ``ns_steps``). Lightning does this when it resumes."""
        self.order = [_owner_of(group) for group in groups]
        self.muon.param_groups = [group for group in groups if _owner_of(group) == "muon"]
        self.adamw.param_groups = [group for group in groups if _owner_of(group) == "adamw"]

    @property  # type: ignore[override]
    def state(self) -> PairState:
        """The state of both optimizers by parameter. Writes reach both optimizers; see ``PairState``."""
        return PairState(self.muon.state, self.adamw.state, self._is_adamws, self._has_no_state)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        check_moment_values(self.adamw.param_groups, state)
        entries = list(state.items())
        self.muon.state = defaultdict(dict, [it for it in entries if not self._is_adamws(it[0])])
        self.adamw.state = defaultdict(dict, [it for it in entries if self._is_adamws(it[0])])

    def _is_adamws(self, param: Any) -> bool:
        return any(param is own for own in self._rest)

    def _has_no_state(self) -> bool:
        entries = [entry for key, entry in self.muon.state.items() if isinstance(key, Tensor)]
        return not self.adamw.state and not any(map(has_moved, entries))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of ``from_model``'s model, each to Muon or to AdamW as the model's split says.

        The group's hyperparameters apply to both optimizers, except that AdamW gets none that only Muon has.
        If ``decay_vectors`` is False, weight decay does not apply to vectors. If ranks step together, the
        next step compares the parameters' values.

        Raises:
            UsageError: a parameter is not in that model, so only the caller knows which optimizer it needs.
        """
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        bare = [it[1] if isinstance(it, tuple) else it for it in params]
        self._follow_replaced()
        if any(param not in self.verdicts for param in bare):
            raise UsageError(
                "MuonWithAdamW cannot tell which of these parameters Muon should step: add the group to "
                '.muon or to .adamw, with names: {"params": [(name, parameter), …]}'
            )
        split = ParameterSplit(tuple(self.verdicts[param] for param in bare))
        self.order = [_owner_of(group) for group in self.param_groups]
        settings = {key: value for key, value in param_group.items() if key != "params"}
        muons = self.muon.defaults.keys() - self.adamw.defaults.keys()  # "momentum" would change betas
        adamws = {key: value for key, value in settings.items() if key not in muons}
        for group in split.hidden:
            self.muon.add_param_group({**settings, **group})
            self.order.append("muon")
        for group in _decay_groups(split, self.decay_vectors) if split.rest else ():
            self.adamw.add_param_group({**adamws, **group})
            self.order.append("adamw")
        self.muon.guard.is_compared = False

    def ready_gradients(self, max_norm: float | None = None) -> Tensor | None:
        """Call ``Muon.ready_gradients`` for the parameters of both optimizers."""
        return self.muon.ready_gradients(max_norm, rest=self._rest)

    def no_sync(self) -> AbstractContextManager[None]:
        """``Muon.no_sync``: wrap every ``backward()`` of a step except the last."""
        return self.muon.no_sync()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self.muon._step_supports_amp_scaling

    @staticmethod
    def profile_hook_step(func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Wrap ``step()`` as torch does, and keep ``torch.compile`` from tracing into it."""
        return torch.compiler.disable(torch.optim.Optimizer.profile_hook_step(func))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Average gradients that are still local, step both optimizers, and return the closure's loss."""
        loss = None if closure is None else self.muon.guard.loss_of(closure)
        self.muon._opt_called = True  # a scheduler on ``.muon`` checks this
        if self.muon.guard.skips_overflow(self.muon, self):
            self.muon.guard.after_step(self.muon, "skipped")
            return loss
        for before in self.muon._optimizer_step_pre_hooks.values():
            before(self.muon, (), {})
        error = None
        try:
            self._look_at_groups()
            self._warn_of_unstepped()
            check_moments(self.adamw)
        except UsageError as found:  # take_step() refuses the step on all ranks
            error = found
        self.muon.take_step(self._rest, error)
        for after in self.muon._optimizer_step_post_hooks.values():
            after(self.muon, (), {})
        for group in self.adamw.param_groups:
            if "momentum" in group:
                group["betas"] = (group["momentum"], group["betas"][1])
        self.muon.guard.is_halfway = True
        self.adamw.step()
        self.muon.guard.is_halfway = False
        return loss

    @property
    def _rest(self) -> list[Tensor]:
        return params_of(self.adamw)

    def _follow(self, model: nn.Module, split: ParameterSplit, decay_vectors: bool) -> None:
        """Store the model, its split and ``decay_vectors`` for groups and parameters that are added later."""
        self._model, self.decay_vectors = weakref.ref(model), decay_vectors
        self.verdicts = {verdict.param: verdict for verdict in split.verdicts}
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        """If the groups hold new parameters, update the records of which parameters are stepped."""
        now = params_of(self)
        if not same_tensors(self._seen, now):
            _refuse_shared(self.muon, self.adamw)
            self._follow_replaced()
            self._seen, self._stepped = now, (self._stepped | set(now)) & self.verdicts.keys()

    def verdicts_now(self) -> list[SplitVerdict]:
        """Return the verdicts on the model's current parameters; FSDP2 may have replaced some."""
        self._follow_replaced()
        return list(self.verdicts.values())

    def audit(self) -> Any:
        """Audit the next steps; see ``audit.audit``."""
        from .audit import Audit

        return Audit(self, None)

    def _warn_of_unstepped(self) -> None:
        """Warn once of each parameter that has gradients but that neither optimizer steps.

        Such a parameter was frozen when the optimizer was made, or was added to the model later. New
        parameters are looked for only in every hundredth step, and in steps without gradients.

        Raises:
            UsageError: FSDP1 has moved one of this optimizer's parameters into a flat parameter.
        """
        now: dict[str, nn.Parameter] = {}
        looks = self.muon.guard.steps_done % 100 == 0 or all(param.grad is None for param in self._seen)
        if looks and (model := self._model()) is not None:
            now = parameters_by_name(model)
        known = {*self._seen, *self.verdicts} if now else set()
        if late := _trained({name: it for name, it in now.items() if it not in known}, self._told):
            lost = self._stepped - {*now.values()}
            if lost and any(hasattr(now[name], "_is_flat_param") for name in late):
                name = next(it.name for param, it in self.verdicts.items() if param in lost)
                raise UsageError(f"{name} is in a flat parameter of the model now: {FLATTENED}")
            what, remedy = "not in the model yet", "make the optimizer after fully_shard() or adapters"
        elif len(self._stepped) != len(self.verdicts):
            still = {it.name: param for param, it in self.verdicts.items() if param not in self._stepped}
            late = _trained(still, self._told)
            what, remedy = "frozen", "call add_param_group() with them, or from_model(…, include_frozen=True)"
        if late:
            self._told = self._told | set(late)
            others = f", and {len(late) - 3} others" if len(late) > 3 else ""
            warnings.warn(
                f"{', '.join(late[:3])}{others}: {what} when this optimizer was made, but trained now, "
                f"and this optimizer does not step them. If no other optimizer does, {remedy}",
                stacklevel=5,
            )

    def _follow_replaced(self) -> None:
        """Find parameters that replaced others of the same name, as Accelerate does to apply FSDP2."""
        model = self._model()
        if model is None or all(param in self.verdicts for param in model.parameters()):
            return
        by_name = {verdict.name: verdict for verdict in self.verdicts.values()}
        now = parameters_by_name(model)
        if by_name.keys() <= now.keys():
            self.verdicts = {now[name]: replace(its, param=now[name]) for name, its in by_name.items()}
            self.muon.guard.unstepped = [(name, now[name]) for name in by_name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return both optimizers' state in the form of torch's optimizers. Muon's parameters come first."""
        self.muon.guard.warn_of_slices()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned. If the state does not fit, neither optimizer changes.

        The form of an earlier version, ``{"muon": …, "adamw": …}``, can be read, too.

        Raises:
            UsageError: the saved groups or parameters differ, or the saved moments are impossible for AdamW.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        states = state_dict if set(state_dict) == {"muon", "adamw"} else self._taken_apart(state_dict)
        for name, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            both = states[name]["param_groups"], optimizer.param_groups
            theirs, ours = ([len(group["params"]) for group in some] for some in both)
            if theirs != ours:
                raise UsageError(f"the saved {name} has groups of {theirs} parameters; here they have {ours}")
        saved = [*states["muon"]["param_groups"], *states["adamw"]["param_groups"]]
        in_order(saved, [*self.muon.param_groups, *self.adamw.param_groups])
        muon_before, adamw_before = ((it.state, it.param_groups) for it in (self.muon, self.adamw))
        self.muon.load_state_dict(states["muon"])
        try:
            self.adamw.load_state_dict(follow_names(self.adamw, states["adamw"]))
            check_moment_values(self.adamw.param_groups, self.adamw.state)
        except Exception:
            self.muon.restore(*muon_before)
            self.adamw.state, self.adamw.param_groups = adamw_before
            raise
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _taken_apart(self, state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the states of the two optimizers, from a state that numbers all parameters together."""
        if not {"state", "param_groups"} <= set(state_dict):
            raise UsageError(
                f"a state of MuonWithAdamW has the keys 'state' and 'param_groups', got {sorted(state_dict)}"
            )
        groups = state_dict["param_groups"]
        if all(_owner_of(group) == "adamw" for group in groups):
            raise UsageError(
                "this is the state of another optimizer, without a Muon group: load only the model's "
                "weights, and start with a new optimizer state"
            )
        return {owner: _state_of(owner, groups, state_dict["state"]) for owner in ("muon", "adamw")}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("defaults", "muon", "adamw", "order", "verdicts", "decay_vectors")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"decay_vectors": True, **state})
        self.muon.guard.companions = (self.adamw,)


def _refuse_shared(muon: Muon, adamw: torch.optim.AdamW) -> None:
    """Refuse parameters that both optimizers would step."""
    in_muon = {*params_of(muon)}
    if shared := [name for name, param, _ in all_named(adamw.param_groups) if param in in_muon]:
        raise UsageError(
            f"parameters given to both Muon and AdamW: {', '.join(shared)}; give each to only one of them"
        )


def _decay_groups(split: ParameterSplit, decay_vectors: bool) -> list[dict[str, Any]]:
    """Return AdamW's groups: one group, and a second for vectors if ``decay_vectors`` is False."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for verdict in split.verdicts:
        if verdict.who == "AdamW":
            is_vector = verdict.param.ndim < 2 or verdict.why in VECTORS
            groups[is_vector and not decay_vectors]["params"].append((verdict.name, verdict.param))
    return [group for group in groups if group["params"]] or groups[:1]


def _trained(params: Mapping[str, Tensor], told: Set[str]) -> list[str]:
    """Return the names of trainable parameters with gradients, except those that a warning has already named
    (``told``)."""
    grown = (name for name, it in params.items() if it.requires_grad and it.grad is not None)
    return [name for name in grown if name not in told]


def _owner_of(group: Mapping[str, Any]) -> str:
    return "muon" if "ns_steps" in group else "adamw"


def _state_of(owner: str, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return one optimizer's part of a state. Entries that belong to no parameter go to Muon."""
    owners = {index: _owner_of(group) for group in groups for index in group["params"]}
    return {
        "state": {index: entry for index, entry in state.items() if owners.get(index, "muon") == owner},
        "param_groups": [group for group in groups if _owner_of(group) == owner],
    }
