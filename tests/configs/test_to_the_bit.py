"""Configs and DTensors in unusual arrangements give one process's bits, or a named error refuses them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from muon_tutorial import DistributedConfig, Muon, MuonWithAdamW, build_mesh, launch
from muon_tutorial.callbacks.create_configs import create_processgroup_config
from muon_tutorial.errors import StrategyError
from muon_tutorial.orthogonalizers.named import RECIPES
from muon_tutorial.parameters.dtensor_placements import dtensor_cuts

from ..oracle import whole
from .functions import in_turn
from .setups import heard

STEPS = 3


def made(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differing(params: Sequence[nn.Parameter], group: Any = None, **settings: Any) -> list[int]:
    """The parameters that differ in any bit from those of one process after a few steps."""
    options = {"lr": 0.02, "weight_decay": 0.1, **(group or {})}
    copies = [nn.Parameter(whole(param.detach()).clone()) for param in params]
    for mine, copy in zip(params, copies, strict=True):
        copy.grad_dtype = mine.grad_dtype
    alone, together = Muon(copies, **options), Muon(params, **options, **settings)
    for step in range(STEPS):
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            gradient = made(copy.shape, 100 * step + index, copy.grad_dtype or copy.dtype)
            copy.grad = gradient.clone()
            param.grad = (
                distribute_tensor(gradient, param.device_mesh, param.placements)
                if isinstance(param, DTensor)
                else gradient.clone()
            )
        alone.step()
        together.step()
    pairs = enumerate(zip(params, copies, strict=True))
    return [index for index, (param, copy) in pairs if not torch.equal(whole(param.detach()), copy.detach())]


def gather_whole(matrix: Tensor, owner: int, state: dict[str, Any]) -> Tensor | None:
    full = whole(matrix)
    return full if dist.get_rank() == owner else None


def broadcast_update(update: Tensor | None, owner: int, state: dict[str, Any]) -> Tensor:
    if update is None:
        update = torch.empty(state["full_shape"] or state["local_shape"], dtype=state["wire_dtype"])
    dist.broadcast(update, owner)
    param = state["params"][state["param_idx"]]
    if not isinstance(param, DTensor):
        return update
    return distribute_tensor(update, param.device_mesh, param.placements)


def broadcast_into_kept_buffer(update: Tensor | None, owner: int, state: dict[str, Any]) -> Tensor:
    shape = state["local_shape"]
    view = state["buffer"][: shape[0] * shape[1]].view(shape)
    if update is not None:
        view.copy_(update)
    dist.broadcast(view, owner)
    return view


def gather_into_kept_buffer(matrix: Tensor, owner: int, state: dict[str, Any]) -> Tensor | None:
    view = state["gathered"][: matrix.numel()].view(matrix.shape)
    view.copy_(matrix)
    return view if dist.get_rank() == owner else None


def in_parameter_dtype(update: Tensor | None, owner: int, state: dict[str, Any]) -> Tensor:
    if update is None:
        update = torch.empty(state["local_shape"], dtype=state["dtype"])
    dist.broadcast(update, owner)
    return update


SHAPES = [(8, 6), (10, 6), (6, 9), (12, 12), (33, 17), (5, 7)]


def plain(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(made(shape, index, dtype)) for index, shape in enumerate(SHAPES)]


def with_own_functions(rank: int) -> dict[str, Any]:
    """Own functions that keep buffers, use other dtypes, work on DTensors, or return wrong results."""
    found: dict[str, Any] = {}
    for at_once in (True, False):
        for ahead in (0, 1, 3):
            kept = {"buffer": torch.empty(600, dtype=torch.bfloat16), "gathered": torch.empty(600).bfloat16()}
            fns = in_turn, gather_into_kept_buffer, broadcast_into_kept_buffer
            config = DistributedConfig(*fns, kept, at_once, ahead)
            found[f"kept buffers {at_once} {ahead}"] = differing(plain(), distributed_config=config)
    config = DistributedConfig(in_turn, gather_whole, in_parameter_dtype)
    found["another dtype"] = heard(partial(differing, plain(), distributed_config=config))

    def own(params: list[nn.Parameter]) -> DistributedConfig:
        return DistributedConfig(in_turn, gather_whole, broadcast_update, {"params": params})

    halves = plain(torch.bfloat16)
    found["whole, bf16"] = differing(halves, distributed_config=own(halves))
    mesh = build_mesh({"fsdp": dist.get_world_size()})
    wholes = enumerate(plain(torch.bfloat16))
    cut = [nn.Parameter(distribute_tensor(it.detach(), mesh, [Shard(i % 2)])) for i, it in wholes]
    found["DTensors, bf16"] = differing(cut, distributed_config=own(cut))
    stored: dict[str, Any] = {"transposed": True}
    found["DTensors, stored (in, out)"] = differing(cut, stored, distributed_config=own(cut))
    stack = [nn.Parameter(made((2, 3, 5, 4), 1))]
    found["4-D stack"] = differing(stack, {"parts": "stack"}, distributed_config=own(stack))
    kinds: dict[str, Callable[[list[nn.Parameter]], dict[str, Any]]] = {
        "own": lambda params: {"distributed_config": own(params)},
        "helper": lambda params: {"distributed_config": create_processgroup_config(dp_pg=dist.group.WORLD)},
        "owner": lambda params: {"strategy": "owner", "mesh": build_mesh({"dp": dist.get_world_size()})},
    }
    for name, settings in kinds.items():
        params = plain()
        found[f"stored (in, out), {name}"] = differing(params, stored, **settings(params))
        params = plain(torch.bfloat16)
        for param in params:
            param.grad_dtype = torch.float32
        found[f"grad_dtype, {name}"] = differing(params, **settings(params))
    params[0].grad_dtype = None
    found["any grad_dtype"] = heard(lambda: Muon(params, distributed_config=own(params)).step())
    for recipe in RECIPES:
        tall = [nn.Parameter(made(shape, i, torch.bfloat16)) for i, shape in enumerate(((64, 24), (33, 17)))]
        group = {"orthogonalize": recipe}
        found[f"tall, {recipe}"] = differing(tall, group, **kinds["owner"](tall))
    return found


def test_own_functions_and_helpers_step_as_one_process_does() -> None:
    for found in launch(with_own_functions, 2):
        said = "ConfigError: .* in torch.bfloat16, as state.'wire_dtype'. says; got torch.float32"
        assert re.match(said, found.pop("another dtype"))
        assert re.match("StrategyError: .* has grad_dtype=None", found.pop("any grad_dtype"))
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def on_sub_meshes(rank: int) -> dict[str, Any]:
    """Matrices on meshes that cross, in either order."""
    mesh = build_mesh({"fsdp": 2, "tp": 2})
    kinds: dict[str, Callable[[], nn.Parameter]] = {
        "fsdp": lambda: nn.Parameter(distribute_tensor(made((8, 6), 1), mesh["fsdp"], [Shard(0)])),
        "both": lambda: nn.Parameter(distribute_tensor(made((12, 10), 2), mesh, [Shard(0), Shard(1)])),
        "tp": lambda: nn.Parameter(distribute_tensor(made((10, 6), 3), mesh["tp"], [Shard(0)])),
    }
    orders = ["fsdp both", "both fsdp", "tp fsdp", "fsdp both tp", "tp both fsdp"]
    return {order: differing([kinds[kind]() for kind in order.split()]) for order in orders}


def test_matrices_on_crossing_meshes_get_owners_that_all_their_ranks_agree_on() -> None:
    for found in launch(on_sub_meshes, 4):
        assert {order: wrong for order, wrong in found.items() if wrong} == {}


class WithExpert(nn.Module):
    """Dense layers, and one expert per rank, of which FSDP2 knows nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.router, self.head = (nn.Linear(8, out, bias=False) for out in (8, 4, 3))
        torch.manual_seed(100 + rank)
        self.expert = nn.Linear(8, 8)


def with_experts(rank: int) -> dict[str, Any]:
    mesh = build_mesh({"dp": 2})
    found: dict[str, Any] = {}
    model = WithExpert(rank)
    fully_shard(model, mesh=mesh, ignored_params={*model.expert.parameters()})
    before = [it.detach().clone() for it in model.expert.parameters()]
    optimizer = MuonWithAdamW.from_model(model, lr=0.02)
    same = zip(before, model.expert.parameters(), strict=True)
    found["kept"] = all(torch.equal(one, other.detach()) for one, other in same)
    for param in model.parameters():
        param.grad = param.detach().clone()
    found["told"] = heard(optimizer.step)
    for one, other in (("fsdp", "ep"), ("tp", "ep"), ("dp", "ep"), ("fsdp", "pp")):
        groups: dict[str, Any] = {f"{name}_pg": mesh.get_group() for name in (one, other)}
        cut = nn.Parameter(distribute_tensor(made((8, 6), 1), mesh, [Shard(0)]))
        config = create_processgroup_config(**groups)
        found[f"{one} {other}"] = heard(partial(Muon, [("dense", cut)], distributed_config=config))
        assert torch.equal(whole(cut.detach()), made((8, 6), 1))
    own = nn.Parameter(made((8, 6), rank))
    own.grad = own.detach().clone()
    muon = Muon([("expert", own)], distributed_config=create_processgroup_config(ep_pg=mesh.get_group()))
    found["clipped"] = heard(partial(muon.ready_gradients, 1.0))
    return found


def test_experts_of_each_ranks_own_keep_their_values_and_two_roles_of_a_group_are_refused() -> None:
    for found in launch(with_experts, 2):
        assert found.pop("kept") is True
        assert re.match("UsageError: .*ranks of ep_pg have parameters of their own", found.pop("clipped"))
        told = found.pop("told")
        assert told.startswith("MismatchError: ")
        assert "expert.weight is not the same on all ranks" in told
        assert "create_processgroup_config(ep_pg=...)" in told
        assert set(found) == {"fsdp ep", "tp ep", "dp ep", "fsdp pp"}
        for case, said in found.items():
            crossing, own = case.split()
            assert re.match(f"ConfigError: .*{own}_pg has ranks of {crossing}_pg", said)


def pretended(placements: Sequence[Any], sizes: Sequence[int]) -> Any:
    names = tuple(f"axis{place}" for place in range(len(sizes)))
    mesh = SimpleNamespace(mesh_dim_names=names, shape=tuple(sizes), size=lambda dim: sizes[dim])
    return SimpleNamespace(device_mesh=mesh, placements=tuple(placements))


def test_strided_shards_are_cut_in_the_order_that_pytorch_reads_from_their_factors() -> None:
    draw, orders = random.Random(0), set()
    for _ in range(3000):
        sizes = [draw.choice((2, 3)) for _ in range(draw.choice((2, 3)))]
        kinds = [Shard(0), *(_StridedShard(0, split_factor=factor) for factor in (2, 3, 4, 6))]
        if draw.random() < 0.5:
            kinds += [Replicate(), Shard(1)]
        param = pretended([draw.choice(kinds) for _ in sizes], sizes)
        due = DTensorSpec._maybe_convert_StridedShard_to_shard_order(param.placements, param.device_mesh)
        if due is None:
            with pytest.raises(StrategyError, match=r"within each of \d pieces, but no axes"):
                dtensor_cuts("w", param)
            continue
        found: dict[int, list[int]] = {}
        for axis, shard in dtensor_cuts("w", param):
            found.setdefault(shard.dim, []).append(int(axis[-1]))
        assert found == {entry.tensor_dim: list(entry.mesh_dims) for entry in due}
        orders.add(tuple(found.get(0, ())))
    assert {(2, 0, 1), (1, 0), (2, 1, 0)} <= orders


def with_copies(rank: int) -> dict[str, tuple[int, int]]:
    """DTensors, and plain parameters that differ over dp although the config says that dp copies them."""
    mesh, found = build_mesh({"dp": 2, "tp": 2}), {}
    dp_group, tp_group = mesh.get_group("dp"), mesh.get_group("tp")
    told: dict[str, Callable[[], dict[str, Any]]] = {
        "zero1": lambda: {"strategy": "zero1", "mesh": mesh},
        "owner": lambda: {"strategy": "owner", "mesh": mesh},
        "groups": lambda: {"distributed_config": create_processgroup_config(dp_pg=dp_group, tp_pg=tp_group)},
    }
    for name, settings in told.items():
        cut = nn.Parameter(distribute_tensor(made((8, 8), 1), mesh["tp"], [Shard(0)]))
        matrix, vector = (nn.Parameter(made(shape, mesh.get_local_rank("dp"))) for shape in ((8, 6), (8,)))
        muon = Muon([("cut", cut), ("matrix", matrix)], lr=0.1, **settings())
        both = MuonWithAdamW(muon, torch.optim.AdamW([("vector", vector)], lr=0.1))
        for param in (cut, matrix, vector):
            param.grad = torch.ones_like(param)
        both.step()
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, [param.detach().tolist() for param in (matrix, vector)])
        found[name] = len({str(one) for one, _ in held}), len({str(other) for _, other in held})
    return found


def test_plain_parameters_beside_dtensors_begin_alike_where_dp_is_said_to_copy_them() -> None:
    for found in launch(with_copies, 4):
        assert found == {"zero1": (1, 1), "owner": (1, 1), "groups": (1, 1)}
