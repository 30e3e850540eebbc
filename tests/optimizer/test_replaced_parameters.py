"""If a host puts other parameters into the groups, they are stepped, or an error says what is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muon_tutorial import STRATEGIES, Grid, LocalWorld, Muon, MuonWithAdamW, launch
from muon_tutorial.errors import UsageError


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))


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
    muon = Muon(model.parameters(), lr=0.1, strategy=strategy, mesh=LocalWorld(Grid.of(dp=1)).mesh(0))
    others = list(copy.deepcopy(model).parameters())
    muon.param_groups[0]["params"] = others
    give(others)
    muon.step()
    assert all(map(torch.equal, others, stocks_answer()))


def test_parameters_put_in_later_are_refused_since_their_momentum_would_be_lost() -> None:
    params = list(layers().parameters())
    muon = Muon(params, lr=0.1, strategy="owner", mesh=LocalWorld(Grid.of(dp=1)).mesh(0))
    give(params)
    muon.step()
    muon.param_groups[0]["params"] = [nn.Parameter(param.detach().clone()) for param in params]
    with pytest.raises(UsageError, match="2 parameters were replaced after they had been stepped"):
        muon.step()


def swap_as_accelerate_does(rank: int) -> list[Tensor]:
    """Make the optimizer over plain parameters, apply FSDP2, and put its parameters into the groups."""
    model = layers()
    muon = Muon(model.parameters(), lr=0.1)
    fully_shard(model)
    params = list(model.parameters())
    muon.param_groups[0]["params"] = params
    give(params)
    muon.step()
    return [param.full_tensor() for param in params if isinstance(param, DTensor)]


@pytest.mark.live
def test_fsdp2s_parameters_put_in_by_a_host_give_the_single_processs_bits() -> None:
    for found in launch(swap_as_accelerate_does, 2):
        assert len(found) == 2
        assert all(map(torch.equal, found, stocks_answer()))


def test_what_was_frozen_is_known_after_a_host_has_replaced_it() -> None:
    """Accelerate with FSDP2 replaces the model's parameters and then the optimizer's."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    both = MuonWithAdamW.from_model(model, lr=0.1)
    others = {
        param: nn.Parameter(param.detach().clone(), param.requires_grad) for param in model.parameters()
    }
    for module in model:
        for name, param in list(module.named_parameters()):
            setattr(module, name, others[param])
    for group in both.param_groups:
        group["params"] = [others[param] for param in group["params"]]
    model[0].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight, 0\.bias: frozen when this optimizer"):
        both.step()
    assert list(map(torch.equal, model.parameters(), before)) == [True] * 2 + [False] * 4
    both.add_param_group({"params": list(model[0].parameters())})
    both.step()
    assert not any(map(torch.equal, model.parameters(), before))
