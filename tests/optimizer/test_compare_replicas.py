"""Ranks that begin with different weights are told so by the first step, before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muon_tutorial import MuonWithAdamW, build_mesh, launch
from muon_tutorial.errors import MismatchError

pytestmark = pytest.mark.live


def begun(rank: int, layout: str, other: str) -> str:
    """What a rank hears of its first step where the last rank began with something else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    if rank == 3:
        with torch.no_grad():
            {"nothing": nn.Linear(1, 1).weight, **dict(model.named_parameters())}[other].add_(1e-3)
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
        both = MuonWithAdamW.from_model(model, lr=0.0)
    else:
        mesh = build_mesh({"dp": 2, "tp": 2})
        both = MuonWithAdamW.from_model(model, lr=0.0, strategy=layout, mesh=mesh, muon={"tp_dim": None})
    model(torch.ones(2, 6)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    try:
        both.step()
    except MismatchError as error:
        assert all(map(torch.equal, before, model.parameters()))
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("zero1", "2.weight"),
        ("owner", "0.weight"),
        ("zero1", "2.bias"),
        ("hsdp", "2.weight"),
        ("hsdp", "2.bias"),
    ],
)
def test_another_beginning_on_one_rank_is_named_on_all(layout: str, other: str) -> None:
    for heard in launch(begun, 4, args=(layout, other)):
        assert f"before the first step {other} is not the same on all ranks" in heard


@pytest.mark.parametrize("layout", ["zero1", "owner", "hsdp"])
def test_ranks_that_begin_alike_hear_nothing(layout: str) -> None:
    assert launch(begun, 4, args=(layout, "nothing")) == ["nothing"] * 4
