"""A host's own checkpoint by ``torch.distributed.checkpoint`` holds the whole state."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import DistributedConfig, Muon, MuonWithAdamW, build_mesh, create_dtensor_config, launch

from ..configs.setups import heard
from ..exhaustive import left_out
from ..oracle import whole

LAYOUTS = {
    1: ("alone",),
    2: ("ddp", "fsdp2", "unnamed", "tp", "tp, embedding"),
    3: ("uneven",),
    4: ("fsdp2+tp", "hsdp"),
}
"""The layouts by their number of ranks."""
HOWS = ("nested", "flat", "full")
EVERY_HOW = ("alone", "fsdp2")
"""A usual run saves these layouts in every form, and other layouts only in the flat form."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False), nn.LayerNorm(8))


class Tokens(nn.Module):
    """Adds the embedding of one token to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.tensor([3]))


def on(layout: str, model: nn.Module) -> Any:
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout in ("unnamed", "uneven"):
        return fully_shard(model)
    if layout == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    if layout == "tp, embedding":  # the gradient is whole although the parameter is cut
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        embedding = {"4.table": RowwiseParallel(input_layouts=Replicate())}
        return parallelize_module(nn.Sequential(*model.children(), Tokens()), mesh, plan | embedding)
    if layout in ("tp", "fsdp2+tp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]) if layout == "fsdp2+tp" else model
    return model


def optimizer_of(model: nn.Module, kind: str = "pair") -> torch.optim.Optimizer:
    if kind == "pair":
        return MuonWithAdamW.from_model(model, lr=0.1, adamw_lr=0.01)
    config: dict[str, DistributedConfig | None] = {"muon": None, "config": create_dtensor_config()}
    hidden = [param for param in model.parameters() if param.ndim == 2]
    return Muon(hidden, lr=0.1, distributed_config=config[kind])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: whole(param.detach()).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name} {key}"] = whole(value).clone()
    return found


Stages = tuple[dict[str, Tensor], ...]
"""States as saved, as loaded, after more training without a load, and after more training from the load."""


def save_and_load(how: str, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, to: Any) -> None:
    """Save by the library's helpers, and load into another model and its optimizer."""
    other, fresh = to
    if how == "full":
        options = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(model, options=options)
        moments = get_optimizer_state_dict(model, optimizer, options=options)
        file = f"{folder} {dist.get_rank()}.pt"
        torch.save((weights, moments), file)
        weights, moments = torch.load(file, weights_only=True)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
        moments = get_optimizer_state_dict(model, optimizer, options=options)
        saved = {"model": get_model_state_dict(model), "optimizer": moments}
        dcp.save(saved, checkpoint_id=f"{folder}/{how}")
        weights = get_model_state_dict(other)
        moments = get_optimizer_state_dict(other, fresh, options=options)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{how}")
    set_model_state_dict(other, weights, options=options if how == "full" else None)
    set_optimizer_state_dict(other, fresh, moments, options=options)


def as_accelerate_does(optimizer: torch.optim.Optimizer) -> None:
    """Accelerate's wrapper loads what it has just saved, before the first step."""
    optimizer.load_state_dict(optimizer.state_dict())


Case = tuple[str, str, str]
"""A layout, the kind of optimizer, and how its state is saved."""


def resume(rank: int, cases: list[Case], folder: str) -> dict[Case, Stages]:
    """Take two steps, save as a host does, take two more; load the save and take the same two from there."""
    stages: dict[Case, Stages] = {}
    for layout, kind, how in cases:
        model = on(layout, network())
        optimizer = optimizer_of(model, kind)
        train(model, optimizer, range(2))
        other = on(layout, network())
        fresh = optimizer_of(other, kind)
        as_accelerate_does(fresh)
        save_and_load(how, f"{folder}/{layout} {kind}", model, optimizer, (other, fresh))
        loaded = state_of(model, optimizer), state_of(other, fresh)
        train(model, optimizer, range(2, 4))
        train(other, fresh, range(2, 4))
        stages[layout, kind, how] = (*loaded, state_of(model, optimizer), state_of(other, fresh))
    return stages


def assert_resumed(stages: Stages, *moved: str) -> None:
    saved, loaded, straight, resumed = stages
    assert all(saved[name].any() for name in moved)
    for before, after in ((saved, loaded), (straight, resumed)):
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(
    ("ranks", "thorough"),
    [*((ranks, EVERY_HOW) for ranks in LAYOUTS), *(left_out(ranks, LAYOUTS[ranks]) for ranks in (2, 3, 4))],
)
def test_training_resumes_to_the_bit_from_dcps_files(tmp_path, ranks: int, thorough: tuple[str, ...]) -> None:
    """Muon without AdamW goes on as well, whether it knows the cuts from placements or from a config."""
    hows = {layout: HOWS if layout in thorough else ("flat",) for layout in LAYOUTS[ranks]}
    cases = [(layout, "pair", how) for layout in hows for how in hows[layout]]
    alone = [("fsdp2", kind, "flat") for kind in ("muon", "config")] if ranks == 2 else []
    for stages in launch(resume, ranks, args=([*cases, *alone], str(tmp_path)), timeout=60):
        for layout, kind, how in cases:
            prefix = "module." if layout == "ddp" else ""
            moved = f"{prefix}0.weight momentum_buffer", f"{prefix}0.bias exp_avg"
            assert_resumed(stages[layout, kind, how], *moved)
        for case in alone:
            assert_resumed(stages[case], "2.weight momentum_buffer")


def load_shards(rank: int, folder: str) -> list[str]:
    """What this rank hears if it loads what ``torch.save`` wrote on rank 0 and on rank 1."""
    model = network()
    fully_shard(model)
    both = optimizer_of(model)
    train(model, both, range(1))
    torch.save(both.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    files = [torch.load(f"{folder}/{saver}.pt", weights_only=False) for saver in (0, 1)]
    return [heard(partial(both.load_state_dict, file)) for file in files]


def test_a_rank_loads_its_own_shards_and_no_others(tmp_path) -> None:
    for rank, told in enumerate(launch(load_shards, 2, args=(str(tmp_path),))):
        assert told.pop(rank) == "nothing"
        assert told[0].startswith("UsageError: the loaded momentum_buffer is the piece of the rank at (")


def save_slices(rank: int, folder: str) -> str:
    model = network()
    both = MuonWithAdamW.from_model(model, lr=0.1, strategy="zero1", mesh=build_mesh({"dp": 2}))
    train(model, both, range(1))
    torch.save(copy.deepcopy(both.state_dict()), f"{folder}/{rank}.pt")
    both.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    train(model, both, range(1, 2))
    try:
        dcp.save({"optimizer": get_optimizer_state_dict(model, both)}, checkpoint_id=f"{folder}/saved")
    except BaseException as error:  # torch's CheckpointException is no Exception
        return str(error)
    return "saved"


def test_slices_of_zero1_are_refused_where_they_would_be_lost_and_named(tmp_path) -> None:
    for said in launch(save_slices, 2, args=(str(tmp_path),)):
        assert "momentum_buffer is one rank's slice of the momentum" in said
        assert "save by save_checkpoint(folder, model, optimizer)" in said
