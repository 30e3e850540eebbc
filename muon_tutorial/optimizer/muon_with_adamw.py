"""Muon for the hidden matrices and AdamW for the rest, behind the face of one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import UsageError
from .muon import Muon


class MuonWithAdamW(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` that readies, steps and saves a ``Muon`` and a ``torch.optim.AdamW``.

    Its ``param_groups`` are theirs (Muon's first), so that a learning-rate scheduler moves both. Both stay
    reachable as ``.muon`` and ``.adamw``.

    Raises:
        UsageError: the two are not of these classes, or share a parameter.

    >>> import torch
    >>> from muon_tutorial.optimizer.split_parameters import split_parameters
    >>> model = torch.nn.Linear(3, 2)
    >>> hidden, rest = split_parameters(model)
    >>> both = MuonWithAdamW(Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-4))
    >>> [group["lr"] for group in both.param_groups]
    [0.02, 0.0003]
    """

    muon: Muon
    adamw: torch.optim.AdamW

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        if not isinstance(muon, Muon) or not isinstance(adamw, torch.optim.AdamW):
            raise UsageError(
                "MuonWithAdamW takes a muon_tutorial.Muon and a torch.optim.AdamW, "
                f"got {_class_of(muon)} and {_class_of(adamw)}"
            )
        _check_disjoint(muon, adamw)
        # The unpickling path of the base class: it sets up hooks, and leaves the groups to the two inside.
        self.__setstate__({"defaults": {}, "muon": muon, "adamw": adamw})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of both, Muon's first, as they are now."""
        return [*self.muon.param_groups, *self.adamw.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state of both, keyed by parameter: a view to read, not to write to."""
        return {**self.muon.state, **self.adamw.state}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: only the caller knows whose group it is."""
        raise UsageError("add the group to .muon or to .adamw: MuonWithAdamW cannot tell whose it is")

    def ready_gradients(self, max_norm: float | None = None) -> Tensor | None:
        """Make the gradients of both ready for ``step()``, clipped together if ``max_norm`` is given."""
        rest = [param for group in self.adamw.param_groups for param in group["params"]]
        return self.muon.ready_gradients(max_norm, rest=rest)

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
        if not self.muon.gradients_ready:
            self.ready_gradients()
        self.muon.step()
        self.adamw.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of both."""
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"muon": …, "adamw": …}``, the two states as each of them saves it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; a state that does not fit changes neither of the two."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        _check_saved(self, state_dict)
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "muon": self.muon, "adamw": self.adamw}


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


def _check_saved(both: MuonWithAdamW, state_dict: dict[str, Any]) -> None:
    """Refuse a state whose groups do not fit, before anything is loaded."""
    if set(state_dict) != {"muon", "adamw"}:
        raise UsageError(
            f"a state of MuonWithAdamW has the keys 'muon' and 'adamw', got {sorted(state_dict)}"
        )
    for name, optimizer in (("muon", both.muon), ("adamw", both.adamw)):
        saved = [len(group["params"]) for group in state_dict[name]["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if saved != ours:
            raise UsageError(f"the saved {name} has groups of {saved} parameters, this one of {ours}")
