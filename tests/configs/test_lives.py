"""Parameters that accumulate gradients, are frozen, are unfrozen late, or have no gradient in some step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import Muon, build_mesh, create_dtensor_config, create_processgroup_config, launch

from . import functions
from .setups import Oracle, batch, error_of, full, hidden, mlp, sharded

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
MICROBATCHES = 3


def accumulate(model: nn.Module, step: int) -> None:
    """Several backward passes, of which only the last one reduces."""
    for micro in range(MICROBATCHES):
        last = micro == MICROBATCHES - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        waiting = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if waiting else nullcontext():  # type: ignore[operator]
            model(batch(10 * step + micro, dist.get_rank())).pow(2).mean().backward()


def live(model: nn.Module, oracle: Oracle, muon: Muon) -> list[str]:
    """Differences after four steps: in the second, one matrix lacks its gradient; in the third, except under
    DDP, another is frozen."""
    params = hidden(model)
    for step in range(4):
        muon.zero_grad()
        params[1].requires_grad_(step != 2 or isinstance(model, DistributedDataParallel))
        accumulate(model, step)
        if step == 1:
            params[0].grad = None
        oracle.step()
        muon.step()
    return oracle.differences()


def run_lives(rank: int) -> dict[str, list[str]]:
    """The differences after ``live`` for each kind of model, under configs and a strategy."""
    world = dist.get_world_size()
    fsdp, dp = build_mesh({"fsdp": world}), build_mesh({"dp": world})
    group = dp.get_group()

    def fsdp2() -> nn.Module:
        return sharded(mlp(), fsdp)

    def ddp() -> nn.Module:
        return DistributedDataParallel(mlp(), process_group=group)

    makers: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "FSDP2": (fsdp2, {"distributed_config": create_dtensor_config()}),
        "FSDP2, owner": (fsdp2, {"strategy": "owner", "mesh": fsdp}),
        "DDP": (ddp, {"distributed_config": create_processgroup_config(dp_pg=group)}),
        "DDP, own functions": (ddp, {"distributed_config": functions.config(False)}),
        "DDP, round_robin": (ddp, {"strategy": "round_robin", "mesh": dp}),
    }
    found = {}
    for name, (make, settings) in makers.items():
        model = make()
        params = hidden(model)
        oracle = Oracle(params, full, **OPTIONS)
        found[name] = live(model, oracle, Muon(params, **OPTIONS, **settings))
    return found


def test_accumulated_frozen_and_missing_gradients_equal_the_single_process() -> None:
    for found in launch(run_lives, 3):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def run_two_meshes() -> tuple[str, str, bool]:
    """The error if the second mesh's gradient is not finite; whether the first mesh's parameter stayed."""
    params = []
    for name in ("one", "other"):
        whole = distribute_tensor(torch.ones(4, 6), build_mesh({name: 2}), [Shard(0)])
        params.append(nn.Parameter(whole))
        params[-1].grad = whole.clone()
    params[1].grad = params[1] * float("inf")
    muon = Muon(params, **OPTIONS, distributed_config=create_dtensor_config())
    said = error_of(muon.step)
    return *said, bool((params[0].to_local() == 1).all())  # type: ignore[attr-defined]


SPOILT = {
    "not finite": ("NotFiniteError", "group 0, parameter 2 holds NaN or infinity on 1 of 2 ranks"),
    "missing": ("GradientError", "group 0, parameter 2 is missing on 1 of 2"),
    "another learning rate": ("MismatchError", "ranks would step differently: lr ("),
}


def run_spoilt(rank: int) -> dict[str, tuple[str, str, bool]]:
    """One rank's step is not possible: returns the error, and whether all parameters stayed unchanged."""
    dp, found = build_mesh({"dp": dist.get_world_size()}), {"two meshes": run_two_meshes()}
    configs = {"helper": create_processgroup_config(dp_pg=dp.get_group()), "own": functions.config(False)}
    for name, config in configs.items():
        for case in SPOILT:
            model = mlp()
            params = hidden(model)
            before = [param.detach().clone() for param in params]
            muon = Muon(params, **OPTIONS, distributed_config=config)
            model(batch(0, 0)).pow(2).mean().backward()
            if rank == 1 and case == "another learning rate":
                muon.param_groups[0]["lr"] = 0.3
            elif rank == 1:
                params[2].grad = None if case == "missing" else torch.full_like(params[2], float("nan"))
            kind, said = error_of(muon.step)
            stayed = all(param.equal(old) for param, old in zip(params, before, strict=True))
            found[f"{name}, {case}"] = kind, said, stayed
    return found


def test_a_step_that_one_rank_cannot_take_is_refused_on_every_rank_before_anything_changes() -> None:
    for found in launch(run_spoilt, 2):
        kind, said, stayed = found.pop("two meshes")
        assert (kind, stayed) == ("NotFiniteError", True)
        assert said.startswith("the gradient of group 0, parameter 1 holds NaN or infinity on 2 of 2 ranks")
        assert len(found) == 2 * len(SPOILT)
        for case, (kind, said, stayed) in found.items():
            error, words = SPOILT[case.partition(", ")[2]]
            assert (kind, stayed) == (error, True), case
            assert words in said
