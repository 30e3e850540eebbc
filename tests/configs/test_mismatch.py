"""If ranks' parameters or answers differ, making the optimizer raises the same named error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from muon_tutorial import STRATEGIES, DistributedConfig, Muon, build_mesh, launch
from muon_tutorial.callbacks.create_configs import (
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)
from muon_tutorial.errors import ConfigError

from . import functions
from .setups import error_of

Said = tuple[str, str]
NAMED = ("ConfigError", "PlanMismatchError", "StrategyError", "GridError", "UsageError")


def params_of(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in shapes]


SHAPES = ((4, 6), (6, 4), (8, 8))
MISMATCHES: dict[str, Callable[[bool], Any]] = {  # a rank's parameters; one rank is ``odd``
    "a shape": lambda odd: params_of((4, 6), (4, 7) if odd else (4, 6), (8, 8)),
    "a dtype": lambda odd: params_of((4, 6), (4, 6), dtype=torch.bfloat16 if odd else torch.float32),
    "an order": lambda odd: params_of(*SHAPES[:: -1 if odd else 1]),
    "a missing parameter": lambda odd: params_of(*SHAPES[: 2 if odd else 3]),
    "names": lambda odd: list(zip("ab" if odd else "ba", params_of((4, 6), (4, 6)), strict=True)),
}


CONFIGS: dict[str, Callable[[DeviceMesh], DistributedConfig]] = {
    "dp": lambda mesh: create_processgroup_config(dp_pg=mesh.get_group("dp")),
    "fsdp": lambda mesh: create_processgroup_config(fsdp_pg=mesh.get_group("dp")),
    "tp": lambda mesh: create_processgroup_config(tp_pg=mesh.get_group("dp")),
    "mesh": lambda mesh: create_devicemesh_config(mesh, ["cp"]),
    "own functions": lambda mesh: functions.config(False),
}


def run_mismatches(rank: int) -> dict[str, Said]:
    """The error for each mismatch with each way of making an optimizer."""
    mesh, found = build_mesh({"dp": dist.get_world_size()}), {}
    for what, make in MISMATCHES.items():
        for strategy in STRATEGIES:
            act = partial(Muon, make(rank == 1), strategy=strategy, mesh=mesh)
            found[f"{what}, {strategy}"] = error_of(act)
        for name, config in CONFIGS.items():
            act = partial(Muon, make(rank == 1), distributed_config=config(mesh))
            found[f"{what}, config {name}"] = error_of(act)
    return found


# A user's own functions may cut as they like: shapes need not be the same.
FITS = {"a shape, config own functions", "an order, config own functions"}


def test_a_mismatch_ends_in_one_named_error_on_every_rank_at_construction() -> None:
    by_rank = launch(run_mismatches, 3)
    for case in by_rank[0]:
        said = [found[case] for found in by_rank]
        if case not in FITS:
            assert {kind for kind, _ in said} <= set(NAMED), (case, said)
            assert len(set(said)) == 1, (case, said)
            assert "rank 1" in said[0][1], (case, said)


def run_dtensors(rank: int) -> dict[str, Said]:
    """The errors for DTensors that no config can step."""
    mesh = build_mesh({"fsdp": 2, "tp": 2})
    shared = torch.zeros(4, 6)
    partial_sum = nn.Parameter(DTensor.from_local(shared, mesh, [Partial(), Replicate()], run_check=False))
    sharded = nn.Parameter(distribute_tensor(shared, mesh, [Shard(0), Shard(1)]))
    odd = sharded if rank != 1 else nn.Parameter(distribute_tensor(shared, mesh, [Shard(0), Replicate()]))
    if rank != 1:  # ``distribute_tensor`` is collective
        distribute_tensor(shared, mesh, [Shard(0), Replicate()])
    fsdp, tp = mesh.get_group("fsdp"), mesh.get_group("tp")
    makers: dict[str, tuple[list[nn.Parameter], Callable[[], DistributedConfig | None]]] = {
        "partial": ([partial_sum], create_dtensor_config),
        "partial, groups": ([partial_sum], lambda: create_processgroup_config(fsdp_pg=fsdp, tp_pg=tp)),
        "partial, no keyword": ([partial_sum], lambda: None),
        "partial on one rank": ([partial_sum if rank == 1 else sharded], create_dtensor_config),
        "another placement on one rank": ([odd], create_dtensor_config),
        "a group not given": ([sharded], lambda: create_processgroup_config(fsdp_pg=fsdp)),
        "another count on one rank": ([sharded] * (1 + (rank != 1)), create_dtensor_config),
    }
    return {name: error_of(partial(_muon_over, params, make)) for name, (params, make) in makers.items()}


def _muon_over(params: list[nn.Parameter], make: Callable[[], DistributedConfig | None]) -> Muon:
    return Muon([nn.Parameter(param.detach()) for param in params], distributed_config=make())


def test_dtensors_that_no_config_can_step_are_refused_by_name() -> None:
    by_rank = launch(run_dtensors, 4)
    for case in by_rank[0]:
        said = [found[case] for found in by_rank]
        assert {kind for kind, _ in said} <= set(NAMED), (case, said)
    first = by_rank[0]
    assert "along 'fsdp': reduce it before the step" in first["partial"][1]
    assert "pass that group too" in first["a group not given"][1]
    for case in ("another placement on one rank", "another count on one rank"):
        assert len({found[case] for found in by_rank}) == 1
    assert all("along 'fsdp': reduce it" in found["partial on one rank"][1] for found in by_rank)


def run_names(rank: int) -> list[Said]:
    mesh = build_mesh({"a": 1, "b": 1})
    names: list[list[str]] = [["fsdp", "sequence"], ["fsdp"], ["dp", "dp_replicate"]]
    return [error_of(partial(create_devicemesh_config, mesh, each)) for each in names]


def test_names_of_mesh_dimensions_are_checked() -> None:
    ((unknown, too_few, twice),) = launch(run_names, 1)
    assert unknown[0] == "ConfigError"
    assert "'sequence' has no known meaning; known: cp, ddp, dp, dp_replicate" in unknown[1]
    assert "has 2 dimensions; mesh_dim_names has 1" in too_few[1]
    assert "mean the same" in twice[1]


def test_a_config_is_checked_when_it_is_made() -> None:
    def fn(*args: Any) -> Any: ...

    with pytest.raises(ConfigError, match="assign_fn must be a function"):
        DistributedConfig(None, fn, fn)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prefetch_count must be an integer of at least 0, got -1"):
        DistributedConfig(fn, fn, fn, prefetch_count=-1)
    with pytest.raises(ConfigError, match="state must be a dict, got list"):
        DistributedConfig(fn, fn, fn, state=[])  # type: ignore[arg-type]


def test_a_config_works_without_other_processes() -> None:
    """A script's debug run: one process, without a process group."""
    whole = nn.Parameter(torch.eye(4))
    for config in (create_dtensor_config(), create_processgroup_config()):
        muon = Muon([whole], distributed_config=config)
        whole.grad = torch.eye(4)
        muon.step()
    with pytest.raises(ConfigError, match="must return a dict"):
        Muon([whole], distributed_config=DistributedConfig(lambda params, state: None, _nothing, _nothing))  # type: ignore[arg-type, return-value]


def _nothing(tensor: Tensor | None, rank: int, state: Any) -> Any: ...
