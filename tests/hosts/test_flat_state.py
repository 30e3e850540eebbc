"""The calls that torchtitan's newer container makes to any optimizer, without torch's helpers.

It makes state by a step with zero gradients and a learning rate of zero, reads ``state_dict()`` by parameter
names, saves that as one flat dict, and builds a state for ``load_state_dict()`` in the live optimizer's form.
"""

from __future__ import annotations

from typing import Any

import torch

from muon_tutorial import MuonWithAdamW
from scripts.recipes.tiny import Sequences, TinyGPT

STEPS = 2


def make() -> tuple[TinyGPT, MuonWithAdamW]:
    torch.manual_seed(0)
    model = TinyGPT()
    return model, MuonWithAdamW.from_model(model, lr=0.02, adamw_lr=3e-3)


def train(model: TinyGPT, optimizer: MuonWithAdamW) -> None:
    for item in list(map(Sequences(STEPS).__getitem__, range(STEPS))):
        model(**{name: tokens[None] for name, tokens in item.items()})["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def make_state(optimizer: MuonWithAdamW) -> None:
    """Take a step that changes no parameter."""
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, kept, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


def flatten(optimizer: MuonWithAdamW) -> dict[str, Any]:
    """One flat dict: ``state.NAME.KEY`` and ``param_groups.NAME.KEY``."""
    saved = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for group in saved["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            flat |= {f"state.{name}.{key}": value for key, value in saved["state"][index].items()}
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def unflatten(optimizer: MuonWithAdamW, flat: dict[str, Any]) -> dict[str, Any]:
    """The state for ``load_state_dict``, in the form of the live optimizer's."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        indices = range(len(state), len(state) + len(group["params"]))
        for index, name, param in zip(indices, group["param_names"], group["params"], strict=True):
            state[index] = {key: flat[f"state.{name}.{key}"] for key in optimizer.state[param]}
        first = group["param_names"][0]
        options = {
            key: flat[f"param_groups.{first}.{key}"] for key in group if key not in ("params", "param_names")
        }
        groups.append({**options, "params": [*indices]})
    return {"state": state, "param_groups": groups}


def test_a_step_without_gradient_and_learning_rate_makes_state_and_moves_nothing() -> None:
    model, optimizer = make()
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert not optimizer.state
    make_state(optimizer)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert {param for group in optimizer.param_groups for param in group["params"]} == {*optimizer.state}


def test_a_flat_state_resumes_to_the_bit() -> None:
    model, optimizer = make()
    train(model, optimizer)
    flat = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in flatten(optimizer).items()
    }
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer)

    again, resumed = make()
    again.load_state_dict(weights)
    make_state(resumed)
    resumed.load_state_dict(unflatten(resumed, flat))
    train(again, resumed)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert {len(entry) for entry in resumed.state.values()} == {1, 3}
