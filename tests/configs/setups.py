"""Every entry of the helper table as a real model on real ranks: how to build, cut, feed and reduce it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_tutorial import DistributedConfig, TutorialError, zeropower_via_newtonschulz
from muon_tutorial.callbacks.create_configs import (
    create_devicemesh_config,
    create_dtensor_config,
    create_processgroup_config,
)
from muon_tutorial.parameters.tensor_parallel import TpDim
from muon_tutorial.step import orthogonalize

WIDTH, HIDDEN, TOKENS = 12, 20, 16  # 20 rows over 3 or 8 ranks: uneven; 12 over 8: empty shards


class Block(nn.Module):
    """One residual block; Muon steps its two weights."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlp(nn.Module):
    """A few blocks, and a norm that Muon does not step."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


Whole = Callable[[Tensor, Tensor], Tensor]
"""``(parameter, this rank's part of it or of its gradient) -> the whole``. All ranks must call."""


class Oracle:
    """On every rank, ``torch.optim.Muon`` over copies of the whole parameters."""

    def __init__(self, params: Sequence[Tensor], whole: Whole, **options: Any) -> None:
        self.params, self.whole = list(params), whole
        self.copies = [torch.nn.Parameter(whole(param, param.detach()).clone()) for param in self.params]
        self.stock = torch.optim.Muon(self.copies, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies with the gradients that the parameters have now."""
        for param, copy in zip(self.params, self.copies, strict=True):
            copy.grad = None if param.grad is None else self.whole(param, param.grad).clone()
        self.stock.step()

    @torch.no_grad()
    def differences(self) -> list[str]:
        """The parameters that differ from their copies in any bit."""
        return [
            f"parameter {index} of shape {tuple(copy.shape)}"
            for index, (param, copy) in enumerate(zip(self.params, self.copies, strict=True))
            if not torch.equal(self.whole(param, param.detach()), copy)
        ]


counted = partial(patch.object, orthogonalize, "zeropower_via_newtonschulz", wraps=zeropower_via_newtonschulz)
"""``with counted() as calls``: ``calls.call_count`` matrices were orthogonalized in this process."""


def full(param: Tensor, held: Tensor) -> Tensor:
    """The whole of a DTensor, or of a plain tensor that every rank holds whole."""
    return held.full_tensor() if isinstance(held, DTensor) else held


@dataclass(frozen=True, slots=True)
class Rig:
    """A ready model: Muon's parameters, one backward pass, and a function that makes a tensor whole."""

    params: list[nn.Parameter]
    backward: Callable[[int], None]
    whole: Whole = full
    tp_dim: TpDim = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """One kind of parallelism: its axes in order, and how to build it on a mesh of them.

    ``names`` are the arguments for ``create_devicemesh_config``.
    """

    axes: Mapping[str, int]
    build: Callable[[DeviceMesh], Rig]
    names: tuple[str, ...] = ()
    dtensors: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())


def mlp(depth: int = 2) -> Mlp:
    torch.manual_seed(5)
    return Mlp(WIDTH, HIDDEN, depth)


def batch(step: int, part: int) -> Tensor:
    """The tokens of one step; ranks with another ``part`` get other tokens."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))


def hidden(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


def learn(model: nn.Module, tokens: Tensor) -> None:
    model.zero_grad()
    model(tokens).pow(2).mean().backward()


def joined(group: dist.ProcessGroup, dims: Mapping[int, int]) -> Whole:
    """Return a function that joins tensors cut by hand over a group; ``dims`` are by parameters' ids."""

    def whole(param: Tensor, held: Tensor) -> Tensor:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, held.detach().clone(), group=group)
        return torch.cat(found, dims[id(param)])

    return whole


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the model with FSDP2, block by block; over two dimensions, that is HSDP."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def has(mesh: DeviceMesh, axis: str) -> bool:
    return axis in (mesh.mesh_dim_names or ())


def place(mesh: DeviceMesh, *axes: str) -> int:
    """This rank's number along those ``axes`` that the mesh has; the last axis varies fastest."""
    number = 0
    for axis in axes:
        if has(mesh, axis):
            number = number * mesh[axis].size() + mesh.get_local_rank(axis)
    return number


def rig(model: nn.Module, mesh: DeviceMesh) -> Rig:
    """Tokens differ along dp, fsdp and ep."""
    tokens = place(mesh, "dp", "fsdp", "ep")
    return Rig(hidden(model), lambda step: learn(model, batch(step, tokens)))


def fsdp(mesh: DeviceMesh) -> Rig:
    """FSDP2, or HSDP if there is a dp axis, on top of PyTorch's tensor parallelism if there is a tp axis."""
    model = tensor_parallel(mlp(), mesh["tp"]) if has(mesh, "tp") else mlp()
    return rig(sharded(model, mesh[tuple(axis for axis in ("dp", "fsdp") if has(mesh, axis))]), mesh)


def tp(mesh: DeviceMesh) -> Rig:
    return rig(tensor_parallel(mlp(), mesh), mesh)


def cut_by_hand(mesh: DeviceMesh) -> Rig:
    """Uneven tensor parallelism by hand: it cuts rows of some matrices and columns of others."""
    model = mlp()
    wholes = hidden(model)
    dims = {index: index % 2 for index in range(len(wholes))}

    def cut(index: int, tensor: Tensor) -> Tensor:
        return tensor.tensor_split(mesh.size(), dims[index])[mesh.get_local_rank()].clone()

    params = [nn.Parameter(cut(index, tensor.detach())) for index, tensor in enumerate(wholes)]
    whole = joined(mesh.get_group(), {id(param): dims[index] for index, param in enumerate(params)})

    def backward(step: int) -> None:
        for param, tensor in zip(params, wholes, strict=True):
            tensor.data = whole(param, param)
        learn(model, batch(step, 0))
        for index, (param, tensor) in enumerate(zip(params, wholes, strict=True)):
            assert tensor.grad is not None
            param.grad = cut(index, tensor.grad)

    return Rig(params, backward, whole, dims)


def dp(mesh: DeviceMesh) -> Rig:
    return rig(DistributedDataParallel(mlp(), process_group=mesh.get_group("dp")), mesh)


def cp(mesh: DeviceMesh) -> Rig:
    """Every rank gets its part of the sequence; gradients are summed by hand."""
    model, group = mlp(), mesh.get_group("cp")

    def backward(step: int) -> None:
        learn(model, batch(step, 0).tensor_split(mesh.size())[mesh.get_local_rank()])
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, group=group)

    return Rig(hidden(model), backward)


def ep(mesh: DeviceMesh) -> Rig:
    """Each rank has an expert and tokens of its own; the expert is sharded if there is an fsdp axis."""
    torch.manual_seed(7 + place(mesh, "ep"))
    expert = Block(WIDTH, HIDDEN)
    if has(mesh, "fsdp"):
        fully_shard(expert, mesh=mesh["fsdp"])
    return rig(expert, mesh)


def pp(mesh: DeviceMesh) -> Rig:
    """A pipeline stage, one block per rank along ``pp``, under TP or DDP if there is a tp or dp axis."""
    group, here, last = mesh.get_group("pp"), place(mesh, "pp"), mesh["pp"].size() - 1
    module = mlp(depth=last + 1).blocks[here]
    if has(mesh, "tp"):
        module = tensor_parallel(module, mesh["tp"])
    if has(mesh, "dp"):
        # Without find_unused_parameters, DDP rebuilds its buckets after the first step, and fails its own
        # assertion because the microbatches of a stage reported each parameter twice (torch 2.13).
        replicas = mesh.get_group("dp")
        module = DistributedDataParallel(module, process_group=replicas, find_unused_parameters=True)
    stage = PipelineStage(module, here, last + 1, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, due: (out - due).pow(2).mean())

    def backward(step: int) -> None:
        module.zero_grad()
        inputs = (batch(step, place(mesh, "dp")),) if here == 0 else ()
        schedule.step(*inputs, target=batch(step + 50, place(mesh, "dp")) if here == last else None)

    return Rig(hidden(module), backward)


def tp_dp(mesh: DeviceMesh) -> Rig:
    """PyTorch's tensor parallelism over tp; gradients are summed by hand over dp, which is not in the
    DTensors' mesh."""
    model = tensor_parallel(mlp(), mesh["tp"])

    def backward(step: int) -> None:
        learn(model, batch(step, place(mesh, "dp")))
        for param in hidden(model):
            assert isinstance(param.grad, DTensor)
            dist.all_reduce(param.grad.to_local(), group=mesh.get_group("dp"))

    return Rig(hidden(model), backward)


def mixed(mesh: DeviceMesh) -> Rig:
    """FSDP2 ignores one matrix, which stays a plain tensor. Its gradient is averaged by hand."""
    model = mlp()
    plain = hidden(model)[0]
    fully_shard(model, mesh=mesh, ignored_params={plain})

    def backward(step: int) -> None:
        learn(model, batch(step, place(mesh, "fsdp")))
        assert plain.grad is not None
        dist.all_reduce(plain.grad, group=mesh.get_group("fsdp"))
        plain.grad.div_(mesh.size())

    return Rig(hidden(model), backward)


SETUPS: dict[str, Setup] = {
    "fsdp": Setup({"fsdp": 3}, fsdp, ("dp_shard",), dtensors=True),
    "fsdp, empty shards": Setup({"fsdp": 8}, fsdp, ("fsdp",), dtensors=True),
    "fsdp, one matrix plain": Setup({"fsdp": 3}, mixed, ("shard",), dtensors=True),
    "tp": Setup({"tp": 2}, tp, ("tp",), dtensors=True),
    "tp, cut by hand": Setup({"tp": 3}, cut_by_hand, ("tp",)),
    "dp": Setup({"dp": 3}, dp, ("ddp",)),
    "cp": Setup({"cp": 2}, cp, ("cp",)),
    "ep": Setup({"ep": 2}, ep, ("ep",)),
    "pp": Setup({"pp": 2}, pp, ("pp",)),
    "fsdp+tp": Setup({"fsdp": 2, "tp": 2}, fsdp, ("dp_shard", "tp"), dtensors=True),
    "tp+dp": Setup({"dp": 2, "tp": 2}, tp_dp, ("replicate", "tp")),
    "dp+fsdp": Setup({"dp": 2, "fsdp": 2}, fsdp, ("dp_replicate", "dp_shard"), dtensors=True),
    "fsdp+tp+dp": Setup({"dp": 2, "fsdp": 2, "tp": 2}, fsdp, ("replicate", "dp_shard", "tp"), dtensors=True),
    "ep+fsdp": Setup({"fsdp": 2, "ep": 2}, ep, ("fsdp", "ep"), dtensors=True),
    "pp+tp": Setup({"pp": 2, "tp": 2}, pp, ("pp", "tp"), dtensors=True),
    "pp+dp": Setup({"pp": 2, "dp": 2}, pp, ("pp", "dp")),
}
MATRICES = 4  # in every setup, the number of matrices stepped, summed over ranks


def from_groups(setup: Setup, tp_dim: TpDim, mesh: DeviceMesh) -> DistributedConfig:
    groups: dict[str, Any] = {f"{axis}_pg": mesh.get_group(axis) for axis in setup.axes}
    return create_processgroup_config(**groups, tp_dim=tp_dim)


HELPERS: dict[str, Callable[[Setup, TpDim, DeviceMesh], DistributedConfig | None]] = {
    "create_processgroup_config": from_groups,
    "create_devicemesh_config": lambda setup, tp_dim, mesh: create_devicemesh_config(
        mesh, list(setup.names), tp_dim=tp_dim
    ),
    "create_dtensor_config": lambda *_: create_dtensor_config(),
    "no keyword": lambda *_: None,  # for DTensors, ``create_dtensor_config``
}


def error_of(act: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of the named error that ``act`` raises."""
    try:
        act()
    except TutorialError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def heard(act: Callable[[], Any]) -> str:
    """The type and text of the named error that ``act`` raises, in one line."""
    kind, said = error_of(act)
    return f"{kind}: {said}" if said else kind
