"""Every entry of the helper table as a real model on real ranks: how it is built, cut, fed and reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial.callbacks.config import DistributedConfig
from muon_tutorial.callbacks.create_configs import (
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)
from muon_tutorial.parameters.tensor_parallel import TpDim
from muon_tutorial.worlds.live import build_mesh

from .models import Block, CutMlp, Experts, Mlp
from .oracle import Whole

WIDTH, HIDDEN, TOKENS = 12, 20, 16  # 20 rows over 3 or 8 ranks: uneven; 12 over 8: empty shards


@dataclass(frozen=True, slots=True)
class Rig:
    """A model that is ready: what Muon steps, one backward pass, and how to see a tensor whole."""

    params: list[nn.Parameter]
    backward: Callable[[int], None]
    whole: Whole
    tp_dim: TpDim = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """One kind of parallelism: its axes in order, how to build it on a mesh of them, and how many different
    matrices the whole world then steps. ``names`` are what ``create_devicemesh_config`` is told."""

    axes: Mapping[str, int]
    build: Callable[[DeviceMesh], Rig]
    matrices: int
    names: tuple[str, ...] = ()
    dtensors: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())


def mlp(depth: int = 2) -> Mlp:
    """The same model on every rank."""
    torch.manual_seed(5)
    return Mlp(WIDTH, HIDDEN, depth)


def batch(step: int, part: int) -> Tensor:
    """The tokens of one step; ``part`` numbers the ranks that see different data."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of a model."""
    return [param for param in model.parameters() if param.ndim == 2]


def learn(model: nn.Module, tokens: Tensor) -> None:
    """One backward pass."""
    model.zero_grad()
    model(tokens).pow(2).mean().backward()


def as_it_is(param: Tensor, held: Tensor) -> Tensor:
    """For parameters that every rank holds whole."""
    return held


def full(param: Tensor, held: Tensor) -> Tensor:
    """For DTensors, and for plain tensors among them."""
    return held.full_tensor() if isinstance(held, DTensor) else held


def joined(group: dist.ProcessGroup, dims: Mapping[int, int]) -> Whole:
    """For tensors cut by hand over a group, along a dimension by the parameter's identity."""

    def whole(param: Tensor, held: Tensor) -> Tensor:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, held.detach().clone(), group=group)
        return torch.cat(found, dims[id(param)])

    return whole


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 (HSDP over two dimensions), block by block."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """PyTorch's own tensor parallelism."""
    for module in model.modules():
        if isinstance(module, Block):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def place(mesh: DeviceMesh, *axes: str) -> int:
    """This rank's number among those that differ in ``axes``."""
    number = 0
    for axis in axes:
        number = number * mesh[axis].size() + mesh.get_local_rank(axis)
    return number


def fsdp(mesh: DeviceMesh) -> Rig:
    model = sharded(mlp(), mesh)
    return Rig(hidden(model), lambda step: learn(model, batch(step, place(mesh, "fsdp"))), full)


def tp(mesh: DeviceMesh) -> Rig:
    model = tensor_parallel(mlp(), mesh)
    return Rig(hidden(model), lambda step: learn(model, batch(step, 0)), full)


def cut_by_hand(mesh: DeviceMesh) -> Rig:
    """Tensor parallelism by hand, uneven: rows of some, columns of others."""
    group = mesh.get_group("tp")
    model = CutMlp(mlp(), group)
    params = hidden(model)
    dims = {id(param): index % 2 for index, param in enumerate(params)}
    by_index = {index: index % 2 for index in range(len(params))}
    return Rig(params, lambda step: learn(model, batch(step, 0)), joined(group, dims), by_index)


def dp(mesh: DeviceMesh) -> Rig:
    model = DistributedDataParallel(mlp(), process_group=mesh.get_group("dp"))
    return Rig(hidden(model), lambda step: learn(model, batch(step, place(mesh, "dp"))), as_it_is)


def cp(mesh: DeviceMesh) -> Rig:
    """Every rank sees its run of the sequence; gradients are summed by hand."""
    model, group = mlp(), mesh.get_group("cp")

    def backward(step: int) -> None:
        learn(model, batch(step, 0).tensor_split(mesh.size())[mesh.get_local_rank()])
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, group=group)

    return Rig(hidden(model), backward, as_it_is)


def ep(mesh: DeviceMesh) -> Rig:
    """Every rank its own expert; the router, the same on all, belongs to another optimizer."""
    torch.manual_seed(7 + place(mesh, "ep"))
    model = Experts(WIDTH, HIDDEN, mesh.get_group("ep"))
    return Rig(hidden(model.expert), lambda step: learn(model, batch(step, place(mesh, "ep"))), as_it_is)


def ep_fsdp(mesh: DeviceMesh) -> Rig:
    torch.manual_seed(7 + place(mesh, "ep"))
    model = Experts(WIDTH, HIDDEN, mesh.get_group("ep"))
    fully_shard(model.expert, mesh=mesh["fsdp"])
    tokens = place(mesh, "fsdp", "ep")
    return Rig(hidden(model.expert), lambda step: learn(model, batch(step, tokens)), full)


def staged(mesh: DeviceMesh, wrap: Callable[[nn.Module], nn.Module], part: int = 0) -> Rig:
    """A stage of a pipeline: one block a rank along ``pp``."""
    group, here = mesh.get_group("pp"), place(mesh, "pp")
    module = wrap(mlp(depth=mesh["pp"].size()).blocks[here])
    stage = PipelineStage(module, here, mesh["pp"].size(), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).pow(2).mean()
    )

    def backward(step: int) -> None:
        module.zero_grad()
        inputs = (batch(step, part),) if here == 0 else ()
        target = batch(step + 50, part) if here == mesh["pp"].size() - 1 else None
        schedule.step(*inputs, target=target)

    return Rig(hidden(module), backward, full)


def pp(mesh: DeviceMesh) -> Rig:
    return staged(mesh, lambda module: module)


def pp_tp(mesh: DeviceMesh) -> Rig:
    return staged(mesh, lambda module: tensor_parallel(module, mesh["tp"]))


def pp_dp(mesh: DeviceMesh) -> Rig:
    def wrap(module: nn.Module) -> nn.Module:
        # Without unused ones to look for, DDP lays out its buckets anew after the first step, and fails an
        # assertion of its own because the microbatches of a stage reported each parameter twice (torch 2.13).
        return DistributedDataParallel(
            module, process_group=mesh.get_group("dp"), find_unused_parameters=True
        )

    return staged(mesh, wrap, place(mesh, "dp"))


def fsdp_tp(mesh: DeviceMesh) -> Rig:
    model = sharded(tensor_parallel(mlp(), mesh["tp"]), mesh["fsdp"])
    return Rig(hidden(model), lambda step: learn(model, batch(step, place(mesh, "fsdp"))), full)


def tp_dp(mesh: DeviceMesh) -> Rig:
    """PyTorch's tensor parallelism on one dimension of the mesh; averaged by hand over the other, which no
    placement shows."""
    model = tensor_parallel(mlp(), mesh["tp"])

    def backward(step: int) -> None:
        learn(model, batch(step, place(mesh, "dp")))
        for param in hidden(model):
            assert isinstance(param.grad, DTensor)
            dist.all_reduce(param.grad.to_local(), group=mesh.get_group("dp"))

    return Rig(hidden(model), backward, full)


def hsdp(mesh: DeviceMesh) -> Rig:
    model = sharded(mlp(), mesh)
    return Rig(hidden(model), lambda step: learn(model, batch(step, place(mesh, "dp", "fsdp"))), full)


def hsdp_tp(mesh: DeviceMesh) -> Rig:
    model = sharded(tensor_parallel(mlp(), mesh["tp"]), mesh["dp", "fsdp"])
    return Rig(hidden(model), lambda step: learn(model, batch(step, place(mesh, "dp", "fsdp"))), full)


def mixed(mesh: DeviceMesh) -> Rig:
    """FSDP2 that was told to leave one matrix alone: plain, and averaged by hand."""
    model = mlp()
    plain = hidden(model)[0]
    fully_shard(model, mesh=mesh, ignored_params={plain})

    def backward(step: int) -> None:
        learn(model, batch(step, place(mesh, "fsdp")))
        assert plain.grad is not None
        dist.all_reduce(plain.grad, group=mesh.get_group("fsdp"))
        plain.grad.div_(mesh.size())

    return Rig(hidden(model), backward, full)


SETUPS: dict[str, Setup] = {
    "fsdp": Setup({"fsdp": 3}, fsdp, 4, ("dp_shard",), dtensors=True),
    "fsdp, empty shards": Setup({"fsdp": 8}, fsdp, 4, ("fsdp",), dtensors=True),
    "fsdp, one matrix plain": Setup({"fsdp": 3}, mixed, 4, ("shard",), dtensors=True),
    "tp": Setup({"tp": 2}, tp, 4, ("tp",), dtensors=True),
    "tp, cut by hand": Setup({"tp": 3}, cut_by_hand, 4, ("tp",)),
    "dp": Setup({"dp": 3}, dp, 4, ("ddp",)),
    "cp": Setup({"cp": 2}, cp, 4, ("cp",)),
    "ep": Setup({"ep": 2}, ep, 4, ("ep",)),
    "pp": Setup({"pp": 2}, pp, 4, ("pp",)),
    "fsdp+tp": Setup({"fsdp": 2, "tp": 2}, fsdp_tp, 4, ("dp_shard", "tp"), dtensors=True),
    "tp+dp": Setup({"dp": 2, "tp": 2}, tp_dp, 4, ("replicate", "tp")),
    "dp+fsdp": Setup({"dp": 2, "fsdp": 2}, hsdp, 4, ("dp_replicate", "dp_shard"), dtensors=True),
    "fsdp+tp+dp": Setup(
        {"dp": 2, "fsdp": 2, "tp": 2}, hsdp_tp, 4, ("dp_replicate", "dp_shard", "tp"), dtensors=True
    ),
    "ep+fsdp": Setup({"fsdp": 2, "ep": 2}, ep_fsdp, 4, ("fsdp", "ep"), dtensors=True),
    "pp+tp": Setup({"pp": 2, "tp": 2}, pp_tp, 4, ("pp", "tp"), dtensors=True),
    "pp+dp": Setup({"pp": 2, "dp": 2}, pp_dp, 4, ("pp", "dp")),
}

MakeConfig = Callable[[Setup, Rig, DeviceMesh], DistributedConfig | None]


def from_groups(setup: Setup, rig: Rig, mesh: DeviceMesh) -> DistributedConfig:
    groups: dict[str, Any] = {f"{axis}_pg": mesh.get_group(axis) for axis in setup.axes}
    return create_processgroup_config(**groups, tp_dim=rig.tp_dim)


def from_mesh(setup: Setup, rig: Rig, mesh: DeviceMesh) -> DistributedConfig:
    return create_devicemesh_config(mesh, list(setup.names), tp_dim=rig.tp_dim)


def from_dtensors(setup: Setup, rig: Rig, mesh: DeviceMesh) -> DistributedConfig:
    return create_dtensor_config()


def from_nothing(setup: Setup, rig: Rig, mesh: DeviceMesh) -> None:
    """Neither keyword: DTensors go through ``create_dtensor_config``."""


HELPERS: dict[str, MakeConfig] = {
    "create_processgroup_config": from_groups,
    "create_devicemesh_config": from_mesh,
    "create_dtensor_config": from_dtensors,
    "no keyword": from_nothing,
}


def fits(setup: Setup, helper: str) -> bool:
    """Whether a helper can know enough: placements say nothing about plain parameters."""
    return setup.dtensors or helper in ("create_processgroup_config", "create_devicemesh_config")


def made_mesh(setup: Setup) -> DeviceMesh:
    return build_mesh(setup.axes)
