"""A small model with matrices for Muon and a vector for AdamW, which tests of checkpoints save and load."""

from __future__ import annotations

import torch
from torch import nn

from muon_tutorial import Muon, MuonWithAdamW

Pair = tuple[nn.Module, MuonWithAdamW]


class Small(nn.Module):
    """Two matrices and a vector, from a seed; ``shapes`` replaces or adds parameters."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        for name, shape in ({"one": (4, 3), "two": (3, 4), "bias": (4,)} | shapes).items():
            value = torch.randn(shape, generator=made).to(dtype)
            self.register_parameter(name, nn.Parameter(value))


def pair_of(model: nn.Module) -> Pair:
    params = dict(model.named_parameters())
    muon = Muon([(name, params.pop(name)) for name in ("one", "two")], lr=0.02)
    return model, MuonWithAdamW(muon, torch.optim.AdamW(list(params.items()), lr=0.01))


def trained(steps: int) -> Pair:
    """Train a pair for ``steps`` steps; every call gives the same bits."""
    model, both = pair_of(Small(1))
    for step in range(steps):
        made = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=made)
        both.step()
    return model, both


def fresh() -> Pair:
    """An untrained pair with other values."""
    return pair_of(Small(9))


def bits(model: nn.Module, both: MuonWithAdamW) -> dict[str, torch.Tensor]:
    """A copy of everything that a checkpoint of the pair holds."""
    found = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value.clone() for key, value in both.state.get(param, {}).items()}
    for index, group in enumerate(both.param_groups):
        found[f"lr {index}"] = torch.tensor(group["lr"])
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    for (name, tensor), its in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, its), name
