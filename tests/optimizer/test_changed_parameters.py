"""After a host has changed parameters, the next step is right, or an error says what happened."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

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


def stock_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(model.parameters()), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_wrapped_by_activation_checkpointing(way: str | None) -> None:
    ours, theirs = layers(), layers()
    muon, stock = muon_of(ours, way), stock_of(theirs)
    train(ours, muon)
    ours[0] = checkpoint_wrapper(ours[0])
    train(ours, muon)
    train(theirs, stock, 1)
    train(theirs, stock, 1)
    assert_same(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_and_unfrozen(way: str | None) -> None:
    """A frozen matrix rests with its momentum; once it trains again, both go on."""
    ours, theirs = layers(), layers()
    theirs[0].requires_grad_(False)
    ours[0].requires_grad_(False)
    muon, stock = muon_of(ours, way), stock_of(theirs)
    for frozen in (False, True, False):
        for model, optimizer in ((ours, muon), (theirs, stock)):
            train(model, optimizer)
            model[0].requires_grad_(frozen)
    assert not torch.equal(next(ours.parameters()), next(layers().parameters()))
    assert_same(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stepped", [0, 2])
def test_moved_to_another_dtype(way: str | None, stepped: int) -> None:
    """In bf16, as if the optimizer had been made over bf16 and its momentum loaded; and back in fp32."""
    ours = layers()
    muon = muon_of(ours, way)
    train(ours, muon, stepped)
    theirs = layers()
    theirs.load_state_dict(ours.state_dict())
    saved = (
        [torch.clone(muon.state[param]["momentum_buffer"]) for param in ours.parameters()] if stepped else []
    )
    ours.to(torch.bfloat16)
    theirs.to(torch.bfloat16)
    other = muon_of(theirs, way)
    if stepped:
        state = other.state_dict()
        for index, momentum in enumerate(saved):
            state["state"].setdefault(index, {})["momentum_buffer"] = momentum
        other.load_state_dict(state)
    train(ours, muon, 2)
    train(theirs, other, 2)
    assert_same(ours, theirs)
    ours.to(torch.float32)
    train(ours, muon)
    assert all(muon.state[param]["momentum_buffer"].dtype == torch.float32 for param in ours.parameters())


def test_the_momentum_goes_to_the_device_where_its_parameter_went() -> None:
    """The meta device is used as the other device."""
    there = nn.Parameter(torch.empty(2, 3, device="meta"))
    state: dict[Tensor, Any] = {there: {"momentum_buffer": torch.ones(2, 3)}}
    before = MadeFor.of([{"params": [torch.ones(2, 3)]}], {})
    follow_changes([{"params": [there]}], before, state)
    assert state[there]["momentum_buffer"].device == there.device


@pytest.mark.parametrize("way", WAYS)
def test_recut_in_place(way: str | None) -> None:
    """Before the first step the optimizer follows; later the momentum does not fit, and an error names it."""
    model, other = layers(), layers()
    muon, stock = muon_of(model, way), stock_of(other)
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
    with pytest.raises(
        UsageError, match=r"0\.weight had shape \(6, 8\) when its momentum began, and has \(3, 8\)"
    ):
        muon.step()


def test_a_loaded_model_whose_parameters_are_new_is_told_by_the_first_step() -> None:
    model = layers()
    muon = muon_of(model, None)
    model.load_state_dict(layers().state_dict(), assign=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="no parameter of this Muon has a gradient: if the model was wra"):
        muon.step()


def shard_after_making(rank: int, way: str) -> tuple[list[str], str]:
    """Make the optimizer over plain parameters, then apply FSDP2 without replacing the groups' parameters."""
    model = layers()
    muon = Muon(model.parameters(), lr=0.1)
    if way == "stepped":
        train(model, muon)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        muon.step()
    said = [str(each.message) for each in caught]
    muon.param_groups[0]["params"] = list(model.parameters())
    try:
        muon.step()
    except UsageError as error:
        return said, str(error)
    return said, ""


@pytest.mark.live
@pytest.mark.parametrize("way", ["new", "stepped"])
def test_sharded_again(way: str) -> None:
    for said, error in launch(shard_after_making, 2, args=(way,)):
        if way == "new":
            assert "no parameter of this Muon has a gradient" in said[0]
            assert error == ""
        else:
            assert "2 parameters were replaced after they had been stepped" in error


def frozen_first() -> tuple[nn.Sequential, MuonWithAdamW]:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    model[0].requires_grad_(False)
    return model, MuonWithAdamW.from_model(model, lr=0.1)


def test_what_was_frozen_when_the_pair_was_made_is_not_left_out_in_silence() -> None:
    model, both = frozen_first()
    train(model, both)
    model[0].requires_grad_(True)
    before = copies(model)
    with pytest.warns(UserWarning, match=r"^0\.weight, 0\.bias: frozen .* this optimizer does not step them"):
        train(model, both)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, both)
    assert list(map(torch.equal, before, copies(model))) == [True, True, False, False]


def test_what_once_stood_in_a_group_may_leave_it() -> None:
    """Another optimizer steps it now, or it is no longer trained."""
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
    assert [
        param is its for (_, param), its in zip(both.muon.guard.unstepped, model.parameters(), strict=True)
    ]


@pytest.mark.parametrize("how", ["added", "included"])
def test_what_is_unfrozen_trains_once_it_is_added_or_was_included(how: str) -> None:
    """Lightning's fine-tuning callbacks add a group with only parameters and a learning rate."""
    model, both = frozen_first()
    if how == "included":
        both = MuonWithAdamW.from_model(model, lr=0.1, include_frozen=True)
    train(model, both)
    model[0].requires_grad_(True)
    if how == "added":
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


def test_the_state_of_a_plain_adamw_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw)
    with pytest.raises(UsageError, match=r"the state of another optimizer.* load only the model's weights"):
        MuonWithAdamW.from_model(model, lr=0.1).load_state_dict(adamw.state_dict())


def copies(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_the_pair_says_what_adamw_cannot_follow_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    both = MuonWithAdamW.from_model(model, lr=0.1)
    train(model, both)
    saved = both.state_dict()
    model.to(torch.bfloat16)
    before = copies(model)
    with pytest.raises(
        UsageError, match=r"0\.bias is bfloat16 of shape \(12,\) on cpu now, and AdamW's moments"
    ):
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
