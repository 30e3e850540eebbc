"""Collectives per step: at most two a bucket for ``owner``, beside stock Muon on the same DTensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
BUCKET_BYTES = 2000
OPTIONS: dict[str, Any] = {"lr": 0.02}


@dataclass(frozen=True, slots=True)
class Account:
    """What one rank's step asked for. ``peak`` is the largest flat buffer of a bucket, in bytes."""

    matrices: int
    buckets: int
    peak: int
    exchanges: int
    flags: int
    stock: int
    apart: float


def model_on(mesh: DeviceMesh) -> nn.Module:
    return sharded(tensor_parallel(mlp(DEPTH), mesh["tp"]), mesh["fsdp"])


def peak_buffer(plan: Plan, rank: int) -> int:
    """Bytes of the largest of a rank's flat buffers on the wire: of its own pieces, or of whole matrices."""
    at = plan.grid.at(rank)
    layouts = [(b, layout) for b in plan.buckets for layout in (b.storage_layout, b.compute_layout)]
    return max(bucket.length(layout, at) * bucket.compute.dtype.itemsize for bucket, layout in layouts)


def run_accounts(rank: int) -> list[Account]:
    mesh = build_mesh({"fsdp": 2, "tp": 2})
    return [account(mesh, strategy) for strategy in ("owner", "create_dtensor_config")]


def account(mesh: DeviceMesh, strategy: str) -> Account:
    model, ledger = model_on(mesh), Ledger()
    params = hidden(model)
    if strategy == "owner":
        builder = partial(owner, bucket_bytes=BUCKET_BYTES)
        muon = Muon(params, **OPTIONS, strategy=builder, mesh=mesh)
    else:
        muon = Muon(params, **OPTIONS, distributed_config=create_dtensor_config())
    for leg in muon._steps():
        assert isinstance(leg.world, LiveWorld)
        leg.world.observers.append(ledger)
    learn(model, batch(0, mesh.get_local_rank("fsdp")))
    muon.step()
    kinds = Counter(entry.kind for entry in ledger.entries)
    (plan,) = muon.plans
    stock, apart = of_stock(mesh, model)
    return Account(
        matrices=len(params),
        buckets=len(plan.buckets),
        peak=peak_buffer(plan, plan.grid.rank({axis: mesh.get_local_rank(axis) for axis in plan.grid.axes})),
        exchanges=kinds["all_to_all"],
        flags=kinds["all_reduce"],
        stock=stock,
        apart=apart,
    )


def of_stock(mesh: DeviceMesh, ours: nn.Module) -> tuple[int, float]:
    """How many collectives ``torch.optim.Muon`` makes on the same DTensors, and how far its worst update is
    from ours."""
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
    by_rank = launch(run_accounts, 4, output="quiet")
    for accounts in by_rank:
        for found in accounts:
            assert found.exchanges <= 2 * found.buckets
            assert found.flags == 2  # one tiny sum an axis: which gradients are there, and finite
            assert found.stock >= 5 * found.matrices
    for name, found in zip(("owner, small buckets", "create_dtensor_config"), by_rank[0], strict=True):
        peak = max(accounts[name != "owner, small buckets"].peak for accounts in by_rank)
        line = (
            f"{name}: {found.matrices} matrices of FSDP2 and TP, buckets: {found.buckets}, peak buffer: "
            f"{peak} bytes, a step: {found.exchanges} exchanges and {found.flags} flags; torch.optim.Muon "
            f"makes {found.stock} collectives and its worst update is {found.apart:.1%} off"
        )
        record_property("collectives", line)
        print(line)
    assert by_rank[0][0].buckets > 1
    assert by_rank[0][1].buckets == 1
