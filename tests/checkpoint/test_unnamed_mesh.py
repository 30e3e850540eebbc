"""A checkpoint of FSDP2 without a named mesh: ``fully_shard(model)`` makes a mesh with unnamed dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muon_tutorial import MuonWithAdamW, launch, load_checkpoint, save_checkpoint


def made(seed: int, shard: bool) -> tuple[nn.Module, MuonWithAdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    if shard:
        fully_shard(model)
    return model, MuonWithAdamW.from_model(model, lr=0.1)


def train(model: nn.Module, optimizer: MuonWithAdamW) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


def save(rank: int, folder: str) -> dict[str, Tensor]:
    """Save after a step; returns the saved parameters, whole."""
    model, optimizer = made(0, shard=True)
    train(model, optimizer)
    save_checkpoint(folder, model, optimizer)
    return contents(model, optimizer)


def contents(model: nn.Module, optimizer: MuonWithAdamW) -> dict[str, Tensor]:
    found = {name: whole(param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name} {key}": whole(value) for key, value in optimizer.state[param].items()}
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.live
def test_it_is_saved_and_loaded_by_a_process_alone(tmp_path) -> None:
    saved = launch(save, 3, args=(str(tmp_path / "saved"),))[0]
    model, optimizer = made(1, shard=False)
    load_checkpoint(tmp_path / "saved", model, optimizer)
    loaded = contents(model, optimizer)
    assert saved.keys() == loaded.keys()
    assert saved["0.weight momentum_buffer"].any()
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
