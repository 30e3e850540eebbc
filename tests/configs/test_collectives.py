"""Collectives per step: at most two per bucket for ``owner``; and stock Muon's on the same DTensors."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Muon as StockMuon

from muon_tutorial.callbacks.create_configs import create_dtensor_config
from muon_tutorial.evidence.ledger import Ledger
from muon_tutorial.launching.launch import launch
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.plan.strategies import owner
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from .setups import batch, hidden, learn, mlp, sharded, tensor_parallel

DEPTH = 6
ROUND_BYTES = 1
OPTIONS: dict[str, Any] = {"lr": 0.02}


def learned(mesh: DeviceMesh) -> list[nn.Parameter]:
    """The matrices of a model under FSDP2 and TP, with gradients."""
    model = sharded(tensor_parallel(mlp(DEPTH), mesh["tp"]), mesh["fsdp"])
    learn(model, batch(0, mesh.get_local_rank("fsdp")))
    return hidden(model)


def buckets_of_a_step(rank: int) -> tuple[int, int]:
    """The buckets of ``owner`` and of a helper's config, each of which keeps to two exchanges a bucket."""
    mesh = build_mesh({"fsdp": 2, "tp": 2})
    small = {"strategy": partial(owner, round_bytes=ROUND_BYTES), "mesh": mesh}
    return buckets(mesh, small), buckets(mesh, {"distributed_config": create_dtensor_config()})


def buckets(mesh: DeviceMesh, settings: dict[str, Any]) -> int:
    params, ledger = learned(mesh), Ledger()
    muon = Muon(params, **OPTIONS, **settings)
    for leg in muon.steps:
        assert isinstance(leg.world, LiveWorld)
        leg.world.observers.append(ledger)
    muon.step()
    flags = sum(entry.phase == "gradient flags" for entry in ledger.entries)
    kinds = Counter(entry.kind for entry in ledger.entries if entry.phase != "gradient flags")
    (plan,) = muon.plans
    assert kinds["all_to_all"] <= 2 * len(plan.buckets)
    assert flags == 2  # one tiny exchange per axis: which gradients exist, and whether they are finite
    assert kinds["all_reduce"] == 0
    stock = StockMuon(learned(mesh), **OPTIONS)
    with CommDebugMode() as watch:
        stock.step()
    assert watch.get_total_counts() >= 5 * len(params)
    return len(plan.buckets)


@pytest.mark.live
def test_owner_needs_two_collectives_a_bucket_where_stock_muon_needs_many_a_matrix() -> None:
    for of_owner, of_config in launch(buckets_of_a_step, 4, output="quiet"):
        assert of_owner > 1
        assert of_config == 1
