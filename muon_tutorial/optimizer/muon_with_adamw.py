"""Muon for the hidden matrices and AdamW for the rest, behind the face of one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import UsageError
from ..plan.strategies import Builder
from ..worlds.live import LiveWorld
from ..worlds.local import LocalMesh
from .changed_parameters import check_moments
from .muon import Muon
from .split_parameters import Experts, split_parameters


class MuonWithAdamW(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` that readies, steps and saves a ``Muon`` and a ``torch.optim.AdamW``.

    Its ``param_groups`` are theirs (Muon's first), so that a learning-rate scheduler moves both. A scheduler
    that cycles the momentum writes ``momentum`` into every group: AdamW takes it for its first beta. Both
    optimizers stay reachable as ``.muon`` and ``.adamw``.

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

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW | None = None, **others: Any) -> None:
        if not isinstance(muon, Muon) or not isinstance(adamw, torch.optim.AdamW) or others:
            found = [f"{_class_of(muon)} and {_class_of(adamw)}", *(f"{name}=" for name in others)]
            raise UsageError(
                "MuonWithAdamW takes a muon_tutorial.Muon and a torch.optim.AdamW, got "
                f"{', '.join(found)}; MuonWithAdamW.from_model makes them from a model, in transformers' "
                "Trainer by optimizer_cls_and_kwargs=(lambda: MuonWithAdamW.from_model, {'lr': …})"
            )
        _check_disjoint(muon, adamw)
        muon.companions = (adamw,)
        # The unpickling path of the base class: it sets up hooks, and leaves the groups to the two inside.
        # Without "betas" among the defaults, a scheduler that cycles momentum writes "momentum" everywhere.
        self.__setstate__({"defaults": dict(muon.defaults), "muon": muon, "adamw": adamw})

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        lr: float | Tensor,
        adamw_lr: float | Tensor | None = None,
        strategy: str | Builder | None = None,
        mesh: DeviceMesh | LiveWorld | LocalMesh | None = None,
        exclude: Sequence[str] = (),
        experts: Experts | None = None,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> MuonWithAdamW:
        """Make the pair for a model, its parameters split by ``split_parameters``.

        Call it where AdamW would be made: after ``fully_shard`` or ``parallelize_module``, and before or
        after DDP. DTensors and DDP need no strategy.

        Args:
            lr: Muon's learning rate. Without ``adamw_lr`` it serves AdamW too, and ``adjust_lr_fn`` is
                ``"match_rms_adamw"`` unless ``muon`` says otherwise: an update of Muon is then as large as
                one of AdamW.
            exclude: patterns of names that AdamW gets, too.
            experts: ``"muon"`` gives it three-dimensional experts, matrix by matrix.
            muon: further arguments of ``Muon``: ``{"weight_decay": 0.01}``.
            adamw: further arguments of ``torch.optim.AdamW``: ``{"betas": (0.9, 0.95)}``.

        Raises:
            UsageError: the model has no hidden matrix, or ``split_parameters`` refuses it.
        """
        hidden, rest = split_parameters(model, exclude=exclude, experts=experts)
        if not hidden:
            raise UsageError(f"{type(model).__name__} has no hidden matrix for Muon: use torch.optim.AdamW")
        options = dict(muon or {})
        if adamw_lr is None:
            options.setdefault("adjust_lr_fn", "match_rms_adamw")
        others = torch.optim.AdamW(
            [{"params": rest}], lr=lr if adamw_lr is None else adamw_lr, **(adamw or {})
        )
        return cls(Muon(hidden, lr, strategy=strategy, mesh=mesh, **options), others)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of both, Muon's first, as they are now."""
        return [*self.muon.param_groups, *self.adamw.param_groups]

    @property
    def state(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """The state of both, keyed by parameter, in a new dict: its entries may be written to.

        Empty before the first step: by that, ``torch.distributed.checkpoint`` tells an optimizer whose state
        has yet to be made, AdamW's here.
        """
        if self.muon.is_new and not self.adamw.state:
            return defaultdict(dict)
        return defaultdict(dict, {**self.muon.state, **self.adamw.state})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: only the caller knows whose group it is."""
        raise UsageError("add the group to .muon or to .adamw: MuonWithAdamW cannot tell whose it is")

    def ready_gradients(self, max_norm: float | None = None) -> Tensor | None:
        """Make the gradients of both ready for ``step()``, clipped together if ``max_norm`` is given."""
        rest = [param for group in self.adamw.param_groups for param in group["params"]]
        return self.muon.ready_gradients(max_norm, rest=rest)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``GradScaler`` asks: whether ``step()`` is to skip by itself where gradients overflowed."""
        return self.muon._step_supports_amp_scaling

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Ready the gradients if nobody did, step both, and return the closure's loss if there is one."""
        loss = None
        if closure is not None:
            self.muon.gradients_changed()
            with torch.enable_grad():
                loss = closure()
        if self.muon.skips_overflow(self):
            return loss
        check_moments(self.adamw)
        if not self.muon.gradients_ready:
            self.ready_gradients()
        self.muon.step()
        _take_momentum_for_beta1(self.adamw)
        self.adamw.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of both."""
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of both in the form of any optimizer's: parameters counted through, Muon's first."""
        self.muon.warn_of_slices()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; a state that does not fit changes neither of the two.

        A state of an earlier version, ``{"muon": …, "adamw": …}``, is read as well.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        states = state_dict if set(state_dict) == {"muon", "adamw"} else self._taken_apart(state_dict)
        for name, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            _check_groups(name, states[name]["param_groups"], optimizer.param_groups)
        muon_before, adamw_before = ((it.state, it.param_groups) for it in (self.muon, self.adamw))
        self.muon.load_state_dict(states["muon"])
        try:
            self.adamw.load_state_dict(states["adamw"])
        except Exception:
            self.muon.restore(*muon_before)
            self.adamw.state, self.adamw.param_groups = adamw_before
            raise
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _taken_apart(self, state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The states of the two, from one that counts parameters through."""
        if not {"state", "param_groups"} <= set(state_dict):
            raise UsageError(
                f"a state of MuonWithAdamW has the keys 'state' and 'param_groups', got {sorted(state_dict)}"
            )
        groups, edge = state_dict["param_groups"], len(self.muon.param_groups)
        if len(groups) != len(self.param_groups):
            raise UsageError(f"the state has {len(groups)} groups, this pair {len(self.param_groups)}")
        return {
            "muon": _state_of(groups[:edge], state_dict["state"]),
            "adamw": _state_of(groups[edge:], state_dict["state"]),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "muon": self.muon, "adamw": self.adamw}


def _take_momentum_for_beta1(adamw: torch.optim.AdamW) -> None:
    for group in adamw.param_groups:
        if "momentum" in group:
            group["betas"] = (group["momentum"], group["betas"][1])


def _state_of(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> dict[str, Any]:
    theirs = {index for group in groups for index in group["params"]}
    return {
        "state": {index: entry for index, entry in state.items() if index in theirs},
        "param_groups": list(groups),
    }


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _check_disjoint(muon: Muon, adamw: torch.optim.AdamW) -> None:
    in_muon = {param for param, _ in _named(muon)}
    shared = [name for param, name in _named(adamw) if param in in_muon]
    if shared:
        raise UsageError(
            f"parameters given to both Muon and AdamW: {', '.join(shared)}; each needs one owner"
        )


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    for group in optimizer.param_groups:
        shapes = [f"shape {tuple(param.shape)}" for param in group["params"]]
        yield from zip(group["params"], group.get("param_names", shapes), strict=True)


def _check_groups(name: str, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state whose groups do not fit, before anything is loaded."""
    theirs, ours = ([len(group["params"]) for group in some] for some in (saved, groups))
    if theirs != ours:
        raise UsageError(f"the saved {name} has groups of {theirs} parameters, this one of {ours}")
