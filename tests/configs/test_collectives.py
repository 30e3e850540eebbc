"""Collectives per step: at most two per bucket for ``owner``; and stock Muon's on the same DTensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from muon_tutorial.callbacks.create_configs import create_dtensor_config
from muon_tutorial.evidence.ledger import Ledger
from muon_tutorial.launching.launch import launch
from muon_tutorial.optimizer.muon import Muon
from muon_tutorial.plan.strategies import Plan, owner
from muon_tutorial.worlds.live import LiveWorld, build_mesh

from .setups import batch, full, hidden, learn, mlp, sharded, tensor_parallel

DEPTH = 6
ROUND_BYTES = 1
OPTIONS: dict[str, Any] = {"lr": 0.02}


def model_on(mesh: DeviceMesh) -> nn.Module:
    return sharded(tensor_parallel(mlp(DEPTH), mesh["tp"]), mesh["fsdp"])


def peak_buffer(plan: Plan, rank: int) -> int:
    """Bytes of the largest flat buffer that a rank sends or receives: its own pieces, or whole matrices."""
    at = plan.grid.at(rank)
    layouts = [(b, layout) for b in plan.buckets for layout in (b.storage_layout, b.compute_layout)]
    return max(bucket.length(layout, at) * bucket.compute.dtype.itemsize for bucket, layout in layouts)


Account = tuple[int, int, str]
"""A step's number of buckets, the bytes of its largest flat buffer, and its requests as text."""


def run_accounts(rank: int) -> list[Account]:
    mesh = build_mesh({"fsdp": 2, "tp": 2})
    return [account(mesh, strategy) for strategy in ("owner", "create_dtensor_config")]


def account(mesh: DeviceMesh, strategy: str) -> Account:
    model, ledger = model_on(mesh), Ledger()
    params = hidden(model)
    if strategy == "owner":
        builder = partial(owner, round_bytes=ROUND_BYTES)
        muon = Muon(params, **OPTIONS, strategy=builder, mesh=mesh)
    else:
        muon = Muon(params, **OPTIONS, distributed_config=create_dtensor_config())
    for leg in muon.steps:
        assert isinstance(leg.world, LiveWorld)
        leg.world.observers.append(ledger)
    learn(model, batch(0, mesh.get_local_rank("fsdp")))
    muon.step()
    flags = sum(entry.phase == "gradient flags" for entry in ledger.entries)
    kinds = Counter(entry.kind for entry in ledger.entries if entry.phase != "gradient flags")
    (plan,) = muon.plans
    stock, apart = of_stock(mesh, model)
    assert kinds["all_to_all"] <= 2 * len(plan.buckets)
    assert flags == 2  # one tiny exchange per axis: which gradients exist, and whether they are finite
    assert kinds["all_reduce"] == 0
    assert stock >= 5 * len(params)
    rank = plan.grid.rank({axis: mesh.get_local_rank(axis) for axis in plan.grid.axes})
    words = (
        f"a step: {kinds['all_to_all']} exchanges and {flags} flags; torch.optim.Muon "
        f"makes {stock} collectives and its worst update is {apart:.1%} off"
    )
    return len(plan.buckets), peak_buffer(plan, rank), words


def of_stock(mesh: DeviceMesh, ours: nn.Module) -> tuple[int, float]:
    """The number of collectives of ``torch.optim.Muon`` on the same DTensors, and its largest distance from
    our update."""
    model = model_on(mesh)
    stock = torch.optim.Muon(hidden(model), **OPTIONS)
    learn(model, batch(0, mesh.get_local_rank("fsdp")))
    with CommDebugMode() as watch:
        stock.step()
    apart = []
    for theirs, mine, before in zip(hidden(model), hidden(ours), hidden(mlp(DEPTH)), strict=True):
        error = full(theirs, theirs).detach() - full(mine, mine).detach()
        apart.append(float(error.norm() / (full(mine, mine).detach() - before.detach()).norm()))
    return watch.get_total_counts(), max(apart)


@pytest.mark.live
def test_owner_needs_two_collectives_a_bucket_where_stock_muon_needs_many_a_matrix(
    record_property: Callable[[str, object], None],
) -> None:
    accounts = list(zip(*launch(run_accounts, 4, output="quiet"), strict=True))
    for name, ranks in zip(("owner, small buckets", "create_dtensor_config"), accounts, strict=True):
        buckets, _, words = ranks[0]
        peak = max(peak for _, peak, _ in ranks)
        head = f"{name}: {2 * DEPTH} matrices of FSDP2 and TP, buckets: {buckets}, peak buffer: {peak} bytes"
        record_property("collectives", f"{head}, {words}")
        print(f"{head}, {words}")
    assert accounts[0][0][0] > 1
    assert accounts[1][0][0] == 1
