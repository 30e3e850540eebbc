"""After a host has changed or replaced parameters, the next step is right, or an error says what happened."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muon_tutorial import STRATEGIES, Grid, LocalWorld, Muon, MuonWithAdamW, launch
from muon_tutorial.errors import StrategyError, UsageError
from muon_tutorial.guard.changed_parameters import MadeFor, follow_changes

WAYS = (None, *STRATEGIES)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.GELU(), nn.Linear(12, 8, bias=False))


def muon_of(model: nn.Module, way: str | None, **options: Any) -> Muon:
    mesh = None if way is None else LocalWorld(Grid.of(dp=1)).mesh(0)
    return Muon(model.named_parameters(), lr=0.1, strategy=way, mesh=mesh, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stepped", [0, 2])
def test_moved_to_another_dtype(way: str | None, stepped: int) -> None:
    """In bf16, Muon steps like a new Muon that has loaded the momentum; later it steps in fp32 again."""
    ours = layers()
    muon = muon_of(ours, way)
    train(ours, muon, stepped)
    theirs = layers()
    theirs.load_state_dict(ours.state_dict())
    saved = [torch.clone(muon.state[param]["momentum_buffer"]) for param in ours.parameters() if stepped]
    ours.to(torch.bfloat16)
    theirs.to(torch.bfloat16)
    other = muon_of(theirs, way)
    state = other.state_dict()
    for index, momentum in enumerate(saved):
        state["state"].setdefault(index, {})["momentum_buffer"] = momentum
    if stepped:
        other.load_state_dict(state)
    train(ours, muon, 2)
    train(theirs, other, 2)
    assert_same(ours, theirs)
    ours.to(torch.float32)
    train(ours, muon)
    assert all(muon.state[param]["momentum_buffer"].dtype == torch.float32 for param in ours.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_a_grad_dtype_that_is_set_after_the_optimizer_was_made_counts(way: str | None) -> None:
    """The momentum of bf16 parameters is then fp32, as if ``grad_dtype`` had been set before."""
    found = []
    for late in (False, True):
        model = layers().bfloat16()
        muon = muon_of(model, way) if late else None
        for param in model.parameters():
            param.grad_dtype = torch.float32
        muon = muon or muon_of(model, way)
        for step in range(2):
            made = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=made)
            muon.step()
        found.append((model, [muon.state[param]["momentum_buffer"] for param in model.parameters()]))
    (model, momenta), (other, its) = found
    assert {it.dtype for it in its} == {torch.float32}
    assert all(map(torch.equal, momenta, its))
    assert_same(model, other)


def test_the_momentum_goes_to_the_device_where_its_parameter_went() -> None:
    """The meta device serves as the other device."""
    there = nn.Parameter(torch.empty(2, 3, device="meta"))
    state: dict[Tensor, Any] = {there: {"momentum_buffer": torch.ones(2, 3)}}
    before = MadeFor.of([{"params": [torch.ones(2, 3)]}], {})
    follow_changes([{"params": [there]}], before, state)
    assert state[there]["momentum_buffer"].device == there.device


@pytest.mark.parametrize("way", WAYS)
def test_recut_in_place(way: str | None) -> None:
    """Before the first step, new shapes are accepted; later an error says that the momentum does not fit."""
    model, other = layers(), layers()
    muon, stock = muon_of(model, way), torch.optim.Muon(list(other.parameters()), lr=0.1)
    for each in (model, other):
        first, last = each.parameters()
        first.data, last.data = first.data[:6].clone(), last.data[:, :6].clone()
    for each, optimizer in ((model, muon), (other, stock)):
        train(each, optimizer)
    assert_same(model, other)
    first = next(model.parameters())
    first.grad = None
    first.data = first.data[:3].clone()
    first.grad = torch.ones(3, 8)
    said = r"0\.weight had shape \(6, 8\) when its momentum began, and has \(3, 8\)"
    with pytest.raises(UsageError, match=said):
        muon.step()


def frozen_first(replaced: bool = False) -> tuple[nn.Sequential, MuonWithAdamW]:
    """``replaced``: Accelerate with FSDP2 replaces the model's parameters and then the optimizer's."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    model[0].requires_grad_(False)
    both = MuonWithAdamW.from_model(model, lr=0.1)
    if replaced:
        others = {it: nn.Parameter(it.detach().clone(), it.requires_grad) for it in model.parameters()}
        for module in model:
            for name, param in list(module.named_parameters()):
                setattr(module, name, others[param])
        for group in both.param_groups:
            group["params"] = [others[param] for param in group["params"]]
    return model, both


@pytest.mark.parametrize("replaced", [False, True])
def test_parameters_that_were_frozen_when_the_pair_was_made_are_warned_of(replaced: bool) -> None:
    model, both = frozen_first(replaced)
    train(model, both)
    model[0].requires_grad_(True)
    before = copies(model)
    with pytest.warns(UserWarning, match=r"^0\.weight, 0\.bias: frozen .* this optimizer does not step them"):
        train(model, both)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, both)
    assert list(map(torch.equal, before, copies(model))) == [True, True, False, False]


def test_a_parameter_may_leave_its_group() -> None:
    """A program may give a parameter to another optimizer, or stop training it."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    both = MuonWithAdamW.from_model(model, lr=0.1)
    for group in both.param_groups:
        group["params"] = [param for param in group["params"] if param is not model[0].weight]
        group["param_names"] = [name for name in group["param_names"] if name != "0.weight"]
    before = copies(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, both)
    assert list(map(torch.equal, before, copies(model))) == [True, False, False, False]


def test_parameters_that_were_replaced_are_let_go() -> None:
    model, both = frozen_first()
    train(model, both)
    gone = [weakref.ref(param) for param in model.parameters()]
    del model[0], model[0]
    model.extend([nn.Linear(8, 12), nn.Linear(12, 8)])
    model[0].requires_grad_(False)
    both.state.clear()
    by_name = dict(model.named_parameters())
    for group in both.param_groups:
        group["params"] = [by_name[name] for name in group["param_names"]]
    train(model, both)
    gc.collect()
    assert [its() is None for its in gone] == [True] * 4


@pytest.mark.parametrize("how", ["added", "added, replaced", "included"])
def test_unfrozen_parameters_train_once_they_are_added_or_if_they_were_included(how: str) -> None:
    """Lightning's fine-tuning callbacks add a group with only parameters and a learning rate."""
    model, both = frozen_first(how.endswith("replaced"))
    if how == "included":
        both = MuonWithAdamW.from_model(model, lr=0.1, include_frozen=True)
    train(model, both)
    model[0].requires_grad_(True)
    if how != "included":
        both.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})
        assert [group["lr"] for group in both.param_groups] == [0.1, 0.1, 0.03, 0.03]
        assert [group["param_names"] for group in both.param_groups[2:]] == [["0.weight"], ["0.bias"]]
    before = copies(model)
    train(model, both)
    assert not any(map(torch.equal, before, copies(model)))


def test_groups_that_are_added_later_are_saved_and_loaded() -> None:
    def unfrozen() -> tuple[nn.Sequential, MuonWithAdamW]:
        torch.manual_seed(0)
        model, both = frozen_first()
        train(model, both)
        model[0].requires_grad_(True)
        both.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})
        return model, both

    (model, both), (other, its) = unfrozen(), unfrozen()
    train(model, both, 2)
    saved = copy.deepcopy(both.state_dict())
    other.load_state_dict(model.state_dict())
    its.param_groups = list(its.param_groups)  # as Lightning does when it restarts
    its.load_state_dict(saved)
    train(model, both)
    train(other, its)
    assert_same(model, other)


def copies(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_the_pair_says_what_adamw_cannot_follow_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    both = MuonWithAdamW.from_model(model, lr=0.1)
    train(model, both)
    saved = both.state_dict()
    model.to(torch.bfloat16)
    before = copies(model)
    said = r"0\.bias is bfloat16 of shape \(12,\) on cpu now, and AdamW's moments"
    with pytest.raises(UsageError, match=said):
        train(model, both)
    assert all(map(torch.equal, before, copies(model)))
    anew = MuonWithAdamW.from_model(model, lr=0.1)
    anew.load_state_dict(saved)
    train(model, anew)
    assert not any(map(torch.equal, before, copies(model)))


@pytest.mark.parametrize("way", ["zero1", "layerwise", "owner"])
def test_a_transposed_view_of_another_parameter_is_refused_where_its_update_would_be_lost(way: str) -> None:
    model = layers()
    first: Any = model[0]
    model[2].weight = nn.Parameter(first.weight.detach().T)
    if way == "owner":
        muon_of(model, way)
        return
    with pytest.raises(StrategyError, match=r"2\.weight and 0\.weight share memory"):
        muon_of(model, way)


# Other parameters in the groups


def give(params: list[nn.Parameter]) -> None:
    for number, param in enumerate(params, start=1):
        param.grad = torch.full_like(param, 0.1) + param.detach() * number


def stocks_answer() -> list[Tensor]:
    """The weights after one step of the single-process optimizer."""
    params = list(layers().parameters())
    give(params)
    torch.optim.Muon(params, lr=0.1).step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_put_in_before_the_first_step_are_stepped(strategy: str) -> None:
    model = layers()
    muon = muon_of(model, strategy)
    others = list(copy.deepcopy(model).parameters())
    muon.param_groups[0]["params"] = others
    give(others)
    muon.step()
    assert all(map(torch.equal, others, stocks_answer()))


@pytest.mark.parametrize("strategy", [None, "owner"])
def test_parameters_put_in_later_are_refused_since_their_momentum_would_be_lost(strategy: str | None) -> None:
    model = layers()
    params, muon = list(model.parameters()), muon_of(model, strategy)
    give(params)
    muon.step()
    muon.param_groups[0]["params"] = [nn.Parameter(param.detach().clone()) for param in params]
    with pytest.raises(UsageError, match="2 parameters were replaced after they had been stepped"):
        muon.step()


def swap_as_accelerate_does(rank: int) -> list[Tensor]:
    """Make the optimizer over plain parameters, apply FSDP2, and put the new parameters into the groups."""
    model = layers()
    muon = Muon(model.parameters(), lr=0.1)
    fully_shard(model)
    params = list(model.parameters())
    muon.param_groups[0]["params"] = params
    give(params)
    muon.step()
    return [param.full_tensor() for param in params if isinstance(param, DTensor)]


def test_fsdp2s_parameters_put_in_by_a_host_give_the_single_processs_bits() -> None:
    for found in launch(swap_as_accelerate_does, 2):
        assert len(found) == 2
        assert all(map(torch.equal, found, stocks_answer()))
